"""Prioritized replay for Stable-Baselines3: sampled rows, weights and priorities, and the DQN that
uses them."""

import functools
import itertools

import numpy as np
import pytest
import torch
from stable_baselines3 import DQN

from jaxreplay import sb3
from tests.support.refusals import refused
from tests.support.replays import have_one_length
from tests.support.sb3_streams import BOX, NUMBER, added_to, numbered, params_of

_one_length = pytest.fixture(autouse=True)(have_one_length)
OPTIONS = {
    "learning_starts": 0,
    "train_freq": 1,
    "buffer_size": 500,
    "seed": 0,
    "device": "cpu",
    "policy_kwargs": {"net_arch": [8]},
}
prioritized_dqn = functools.partial(sb3.PrioritizedDQN, "MlpPolicy", "CartPole-v1", **OPTIONS)


def masses_of(buffer):
    return np.asarray(buffer._state.sampler.tree.sums[0])


def filled():
    """Return a buffer of four steps, and steps to go on with."""
    steps = numbered(1, 200)
    ours = sb3.PrioritizedReplayBuffer(
        100, NUMBER, BOX, alpha=0.5, beta=0.7, epsilon=0.0, gamma=0.9
    )
    added_to([ours], itertools.islice(steps, 4))
    return ours, steps


def test_all_priorities_may_be_zero_and_then_nothing_is_drawn():
    ours, _ = filled()
    ours.update_priorities(ours.sample(8000).indices, np.zeros(8000))
    with refused("every priority is 0, so nothing can be sampled; use a positive epsilon"):
        ours.sample(8000)


def test_a_late_update_changes_nothing():
    ours, steps = filled()
    old = ours.sample(8000)
    added_to([ours], itertools.islice(steps, 128))
    before = masses_of(ours)
    ours.update_priorities(old.indices, np.full(8000, 100.0))
    np.testing.assert_array_equal(masses_of(ours), before)
    assert int(ours._state.sampler.num_stale_updates) == 8000


def test_prioritized_dqn_learns_is_saved_and_goes_on(tmp_path):
    model = prioritized_dqn(n_steps=2, gamma=0.9)
    buffer, before = model.replay_buffer, params_of(model)
    model.learn(40)
    assert not torch.equal(before, params_of(model))
    assert buffer.beta == pytest.approx(1.0, abs=0.03)  # annealed
    masses = masses_of(buffer)
    assert len(np.unique(masses[masses > 0])) > 10
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    other = sb3.PrioritizedDQN.load(tmp_path / "model", env=model.get_env())
    assert torch.equal(params_of(model), params_of(other))
    other.load_replay_buffer(tmp_path / "buffer")
    loaded = other.replay_buffer
    assert (other.n_steps, loaded.n_steps, loaded.gamma, loaded.size()) == (2, 2, 0.9, 40)
    np.testing.assert_array_equal(masses_of(loaded), masses)
    other.learn(10, reset_num_timesteps=False)
    assert loaded.size() == 50
    assert not torch.equal(params_of(model), params_of(other))


def test_prioritized_dqn_hands_its_targets_to_a_class_that_is_given():
    class Own(sb3.PrioritizedReplayBuffer):
        pass

    for kwargs, expected in (({"alpha": 0.3}, (3, 0.9, 0.3)), ({"n_steps": 2}, (2, 0.9, 0.6))):
        buffer = prioritized_dqn(
            n_steps=3, gamma=0.9, replay_buffer_class=Own, replay_buffer_kwargs=kwargs
        ).replay_buffer
        assert type(buffer) is Own
        assert (buffer.n_steps, buffer.gamma, buffer.alpha) == expected
    with refused("needs a PrioritizedReplayBuffer, got ReplayBuffer"):
        prioritized_dqn(replay_buffer_class=sb3.ReplayBuffer)


def test_prioritized_dqn_with_alpha_0_and_beta_0_is_dqn():
    """Sampling is uniform and weights are 1: each loss is that of DQN on the same batch."""
    batches = []

    class Recorded(sb3.PrioritizedReplayBuffer):
        def sample(self, batch_size, env=None):
            batches.append(super().sample(batch_size, env))
            return batches[-1]

    class Replayed:
        def sample(self, batch_size, env=None):
            return batches.pop(0)

    kwargs = {"alpha": 0.0, "gamma": 0.99}
    model = prioritized_dqn(beta=0.0, replay_buffer_class=Recorded, replay_buffer_kwargs=kwargs)
    plain = DQN("MlpPolicy", "CartPole-v1", **OPTIONS | {"learning_starts": 10})
    plain.policy.load_state_dict(model.policy.state_dict())
    model.learn(20)
    assert len(batches) == 20
    assert all(batch.weights.eq(1).all() for batch in batches)
    plain.learn(1)
    plain.replay_buffer = Replayed()
    plain.train(20, 32)
    torch.testing.assert_close(params_of(plain), params_of(model))


def test_a_buffer_of_one_step_leaves_the_discounts_to_the_algorithm():
    """It is told no gamma, and the algorithm's holds."""
    ours = sb3.PrioritizedReplayBuffer(100, NUMBER, BOX)
    added_to([ours], itertools.islice(numbered(1, 200), 4))
    assert ours.sample(8000).discounts is None


@pytest.mark.thorough
def test_an_algorithm_that_updates_no_priorities_is_told():
    ours, _ = filled()
    for _ in range(999):
        ours.sample(8)
    with pytest.warns(UserWarning, match="1,000 samples and no update .* use PrioritizedDQN"):
        ours.sample(8)
    for _ in range(1_000):  # once
        ours.sample(8)
    other, _ = filled()
    other.update_priorities(other.sample(8).indices, np.ones(8))
    for _ in range(1_000):
        other.sample(8)
