"""Prioritized replay for Stable-Baselines3: sampled rows, weights and priorities, and the DQN that
uses them."""

import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="the sb3 extra is not installed")
import torch
from gymnasium import spaces
from stable_baselines3 import DQN

from jaxreplay import sb3
from jaxreplay.sb3 import buffers
from tests.support.hlo import check_in_place
from tests.support.sb3_streams import ACTIONS, VECTOR, numbered, params_of, stream


def test_priorities_decide_what_is_drawn():
    space = spaces.Box(-np.inf, np.inf, (1,))
    ours = sb3.PrioritizedReplayBuffer(100, space, ACTIONS["box"], alpha=0.5, beta=0.7, epsilon=0.0)
    for step in numbered(1, 4):
        ours.add(*step)
    seen = ours.sample(64)
    assert set(seen.observations[:, 0].tolist()) == {0, 1, 2, 3}  # new rows have equal priorities
    assert seen.weights.tolist() == [[1]] * 64
    assert seen.discounts[:, 0].tolist() == pytest.approx([0.99] * 64)
    # priority ** alpha is 1, 2, 3 and 4
    ours.update_priorities(seen.indices, (seen.observations[:, 0] + 1) ** 2)
    batch = ours.sample(8000)
    counts = np.bincount(batch.observations[:, 0].long(), minlength=4)
    assert np.abs(counts - 8000 * np.arange(1, 5) / 10).max() <= 1  # stratified
    # relative to the batch's largest weight, that of priority ** alpha = 1
    expected = (1 / (batch.observations + 1)) ** 0.7
    torch.testing.assert_close(batch.weights, expected)
    for step in list(numbered(1, 5))[4:]:
        ours.add(*step)
    share = (ours.sample(8000).observations == 4).float().mean()
    assert share == pytest.approx(4 / 14, abs=0.01)  # a new row has the largest priority so far


def test_priorities_of_any_kind_and_of_none():
    ours = sb3.PrioritizedReplayBuffer(10, VECTOR, ACTIONS["box"], epsilon=0.0)
    for step in stream(VECTOR, ACTIONS["box"], 1, 5):
        ours.add(*step)
    batch = ours.sample(np.int64(20))
    ours.update_priorities(
        batch.indices, torch.full((20, 1), 2.0, dtype=torch.bfloat16, requires_grad=True)
    )
    assert float(ours._state.sampler.max_priority) == 2
    ours.update_priorities(batch.indices, np.zeros(20))
    with pytest.raises(
        ValueError,
        match="every priority is 0, so nothing can be sampled; use a positive epsilon",
    ):
        ours.sample(4)


def test_a_late_update_changes_nothing():
    space = spaces.Box(-np.inf, np.inf, (1,))
    ours = sb3.PrioritizedReplayBuffer(3, space, ACTIONS["box"])
    steps = list(numbered(1, 20))
    for step in steps[:2]:
        ours.add(*step)
    old = ours.sample(4)
    for step in steps[2:]:
        ours.add(*step)
    before = np.asarray(ours._state.sampler.tree.sums[0])
    ours.update_priorities(old.indices, np.full(4, 100.0))
    np.testing.assert_array_equal(ours._state.sampler.tree.sums[0], before)
    assert int(ours._state.sampler.num_stale_updates) == 4


def test_prioritized_dqn_learns_from_weighted_losses():
    model = sb3.PrioritizedDQN(
        "MlpPolicy",
        "CartPole-v1",
        n_steps=2,
        learning_starts=10,
        train_freq=1,
        buffer_size=500,
        seed=0,
        device="cpu",
        gamma=0.9,
    )
    assert (model.replay_buffer.n_steps, model.replay_buffer.gamma) == (2, 0.9)
    before = params_of(model)
    model.learn(60)
    assert not torch.equal(before, params_of(model))
    assert model.replay_buffer.beta == pytest.approx(1.0, abs=0.02)  # annealed
    masses = np.asarray(model.replay_buffer._state.sampler.tree.sums[0])
    assert len(np.unique(masses[masses > 0])) > 10


def test_prioritized_dqn_hands_its_targets_to_a_class_that_is_given():
    class Own(sb3.PrioritizedReplayBuffer):
        pass

    options = {
        "n_steps": 3,
        "gamma": 0.9,
        "buffer_size": 100,
        "device": "cpu",
        "replay_buffer_class": Own,
    }
    model = sb3.PrioritizedDQN(
        "MlpPolicy", "CartPole-v1", **options, replay_buffer_kwargs={"alpha": 0.3}
    )
    buffer = model.replay_buffer
    assert (type(buffer), buffer.n_steps, buffer.gamma, buffer.alpha) == (Own, 3, 0.9, 0.3)
    model = sb3.PrioritizedDQN(
        "MlpPolicy", "CartPole-v1", **options, replay_buffer_kwargs={"n_steps": 2}
    )
    assert (model.replay_buffer.n_steps, model.replay_buffer.gamma) == (2, 0.9)


def test_prioritized_dqn_is_saved_and_goes_on(tmp_path):
    options = {
        "learning_starts": 10,
        "train_freq": 1,
        "buffer_size": 500,
        "device": "cpu",
        "policy_kwargs": {"net_arch": [8]},
    }
    model = sb3.PrioritizedDQN("MlpPolicy", "CartPole-v1", n_steps=2, gamma=0.9, **options).learn(
        30
    )
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    other = sb3.PrioritizedDQN.load(tmp_path / "model", env=model.get_env())
    assert torch.equal(params_of(model), params_of(other))
    other.load_replay_buffer(tmp_path / "buffer")
    buffer, saved = other.replay_buffer, model.replay_buffer
    assert (other.n_steps, buffer.n_steps, buffer.gamma, buffer.size()) == (2, 2, 0.9, 30)
    np.testing.assert_array_equal(
        buffer._state.sampler.tree.sums[0], saved._state.sampler.tree.sums[0]
    )
    other.learn(20, reset_num_timesteps=False)
    assert other.replay_buffer.size() == 50
    assert not torch.equal(params_of(model), params_of(other))


def test_prioritized_dqn_with_alpha_0_and_beta_0_is_dqn():
    """Sampling is uniform and weights are 1: each loss is that of DQN on the same batch."""
    batches = []

    class Recorded(sb3.PrioritizedReplayBuffer):
        def sample(self, batch_size, env=None):
            batches.append(super().sample(batch_size, env))
            return batches[-1]

    options = {
        "learning_starts": 10,
        "train_freq": 1,
        "buffer_size": 500,
        "seed": 0,
        "device": "cpu",
    }
    kwargs = {"alpha": 0.0, "gamma": 0.99}
    model = sb3.PrioritizedDQN(
        "MlpPolicy",
        "CartPole-v1",
        beta=0.0,
        replay_buffer_class=Recorded,
        replay_buffer_kwargs=kwargs,
        **options,
    )
    plain = DQN("MlpPolicy", "CartPole-v1", **options)
    plain.policy.load_state_dict(model.policy.state_dict())
    model.learn(20)
    assert all(batch.weights.eq(1).all() for batch in batches)

    class Replayed:
        def sample(self, batch_size, env=None):
            return batches.pop(0)

    plain.learn(1)
    plain.replay_buffer = Replayed()
    count = len(batches)
    plain.train(count, 32)
    torch.testing.assert_close(params_of(plain), params_of(model))
    assert count == 10


def test_a_draw_is_in_place():
    ours = sb3.PrioritizedReplayBuffer(1 << 16, VECTOR, ACTIONS["box"], n_steps=3)
    seed = np.uint32(0)
    check_in_place(
        lambda state: buffers._draw(ours._replay, state, seed, seed, 0.4, 8),
        (ours._state,),
        num_elements=1 << 16,
    )
