"""The drop-in buffers beside Stable-Baselines3's own: with equal seeds the same batches and the
same runs, in half the bytes."""

import copy
import functools
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.conftest import SOAK
from tests.support.hlo import check_in_place

pytest.importorskip("stable_baselines3", reason="the sb3 extra is not installed")
import torch
from gymnasium import spaces
from scipy import stats
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from jaxreplay import sb3
from jaxreplay.buffers.jitted import options_here
from jaxreplay.sb3 import base
from tests.support.sb3_streams import (
    ACTIONS,
    DICT,
    OBSERVATIONS,
    VECTOR,
    kind_of,
    leaves_of,
    numbered,
    pair,
    params_of,
    same,
    stream,
)


@pytest.mark.parametrize(
    ("action", "n_envs"), [("box", 1), ("double", 1), ("discrete", 1), ("box", 3)]
)
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_equal_seeds_give_equal_batches(observation, action, n_envs):
    spaces_ = OBSERVATIONS[observation], ACTIONS[action]
    ours, other = pair(kind_of(spaces_[0]), *spaces_, n_envs=n_envs)
    for t, step in enumerate(stream(*spaces_, n_envs, 60)):
        ours.add(*step)
        other.add(*copy.deepcopy(step))  # it modifies its arguments
        assert (ours.size(), ours.pos, ours.full) == (other.size(), other.pos, other.full)
        if t % 7 == 0:
            np.random.seed(t)
            expected = other.sample(5)
            np.random.seed(t)
            same(ours.sample(5), expected)


def test_one_env_needs_no_axis():
    """Stable-Baselines3 accepts arrays with the right number of elements, and so does the
    drop-in."""
    ours, other = pair("ReplayBuffer", VECTOR, ACTIONS["box"])
    for obs, next_obs, action, reward, done, infos in stream(VECTOR, ACTIONS["box"], 1, 20):
        for buffer in (ours, other):
            buffer.add(obs[0], next_obs[0], action[0], reward[0], done[0], infos)
    assert ours.size() == 20
    same(ours._get_samples(np.arange(20)), other._get_samples(np.arange(20)))


def test_an_image_in_another_layout_is_refused():
    """Stable-Baselines3 cannot broadcast it; reshaping it would store another image."""
    ours = sb3.ReplayBuffer(10, spaces.Box(0, 255, (3, 4, 4), np.uint8), ACTIONS["box"])
    obs = np.zeros((1, 4, 4, 3), np.uint8)
    with pytest.raises(
        ValueError, match=r"obs: got the shape \[1, 4, 4, 3\], expected \[1, 3, 4, 4\]"
    ):
        ours.add(obs, obs, np.zeros((1, 2)), np.zeros(1), np.zeros(1, bool), [{}])


@pytest.mark.parametrize("n_envs", [1, 2])
def test_actions_of_several_axes_are_flat_as_theirs(n_envs):
    ours, other = pair("ReplayBuffer", VECTOR, spaces.Box(-1, 1, (2, 3)), n_envs=n_envs)
    for step in stream(VECTOR, spaces.Box(-1, 1, (2, 3)), n_envs, 10):
        ours.add(*step)
        other.add(*step)
    np.random.seed(0)
    expected = other.sample(20)
    np.random.seed(0)
    same(ours.sample(20), expected)


def test_numbers_beyond_what_is_held_are_refused():
    ours = sb3.ReplayBuffer(10, VECTOR, ACTIONS["box"])
    for obs, next_obs, action, reward, _, infos in stream(VECTOR, ACTIONS["box"], 1, 25):
        ours.add(obs, next_obs, action, reward, np.ones(1, bool), infos)
    assert len(ours._get_samples(np.arange(5)).rewards) == ours.size() == 5
    for number in (5, 9, -1):
        with pytest.raises(IndexError, match=rf"no transition {number}: the streams hold \[5\]"):
            ours._get_samples(np.array([0, number]))
    assert not hasattr(ours, "anything")


@pytest.mark.parametrize(
    ("observation", "n_envs"), [("vector", 1), ("discrete", 3), ("dict", 1), ("float64", 3)]
)
def test_their_arrays_are_there(observation, n_envs):
    """Row by row as theirs, through a wrap; final rows take the place of the oldest transitions."""
    spaces_ = OBSERVATIONS[observation], ACTIONS["double"]
    kind = kind_of(spaces_[0])
    ours, other = pair(kind, *spaces_, n_envs=n_envs, size=20 * n_envs)
    names = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
    for name in names:
        same_rows(getattr(ours, name), getattr(other, name), np.ones((20, n_envs), bool))
    for t, step in enumerate(stream(*spaces_, n_envs, 50, reset=0)):
        ours.add(*step)
        other.add(*copy.deepcopy(step))
        if t not in (0, 7, 18, 19, 20, 33, 49):
            continue
        ago = (t - np.arange(20)) % 20
        is_stored = (ago[:, None] < ours._num_transitions) & (ago <= t)[:, None]
        assert is_stored.sum() == ours._num_transitions.sum()
        for name in names:
            got, expected = getattr(ours, name), getattr(other, name)
            assert got is getattr(ours, name)  # made once
            same_rows(got, expected, is_stored)
            for leaf in jax.tree.leaves(got):
                assert not leaf.flags.writeable
                assert not leaf[~is_stored].any()
    again = copy.deepcopy(ours)
    np.testing.assert_array_equal(again.rewards, ours.rewards)
    ours.reset()
    assert not ours.rewards.any()


def same_rows(got, expected, chosen):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a[chosen], b[chosen])


@pytest.mark.parametrize("handle_timeout_termination", [True, False])
@pytest.mark.parametrize("kind", ["ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer"])
def test_every_transition_is_the_same(kind, handle_timeout_termination):
    steps, space = 10_000 if SOAK else 1_000, DICT if kind == "DictReplayBuffer" else VECTOR
    ours, other = pair(
        kind,
        space,
        ACTIONS["box"],
        2 * steps,
        handle_timeout_termination=handle_timeout_termination,
    )
    for step in stream(space, ACTIONS["box"], 1, steps, reset=0):
        ours.add(*step)
        other.add(*step)
    everything = np.arange(steps)
    got, expected = ours._get_samples(everything), other._get_samples(everything)
    if kind == "NStepReplayBuffer":  # it sums in another order
        torch.testing.assert_close(got.rewards, expected.rewards, rtol=1e-6, atol=1e-6)
        got = got._replace(rewards=expected.rewards)
    same(got, expected)


@pytest.mark.parametrize("n_steps", [1, 2, 5])
def test_n_steps_end_as_theirs(n_steps):
    """N-step windows end at terminations, timeouts and the newest step; each reward is
    normalized."""
    ours, other = pair(
        "NStepReplayBuffer", VECTOR, ACTIONS["box"], n_envs=2, n_steps=n_steps, gamma=0.9
    )
    env = normalizer(VECTOR, 2)
    for t, step in enumerate(stream(VECTOR, ACTIONS["box"], 2, 80, reset=0)):
        ours.add(*step)
        other.add(*step)
        if t % 5 == 0:
            for given in (None, env):
                np.random.seed(t)
                expected = other.sample(16, given)
                np.random.seed(t)
                got = ours.sample(16, given)
                for name in expected._fields:
                    torch.testing.assert_close(
                        getattr(got, name), getattr(expected, name), rtol=1e-5, atol=1e-6
                    )


def normalizer(observation_space, n_envs):
    import gymnasium

    class Env(gymnasium.Env):
        def __init__(self):
            self.observation_space, self.action_space = observation_space, ACTIONS["box"]

        def reset(self, **_):
            return observation_space.sample(), {}

        def step(self, action):
            return observation_space.sample(), float(np.random.randn()), False, False, {}

    env = VecNormalize(
        DummyVecEnv([Env] * n_envs),
        norm_obs_keys=["vector"] if isinstance(observation_space, spaces.Dict) else None,
    )
    env.reset()
    for _ in range(20):
        env.step([ACTIONS["box"].sample() for _ in range(n_envs)])
    env.training = False
    return env


@pytest.mark.parametrize("space", [VECTOR, DICT], ids=["vector", "dict"])
def test_batches_are_normalized_as_theirs(space):
    ours, other = pair(kind_of(space), space, ACTIONS["box"])
    env = normalizer(space, 1)
    for step in stream(space, ACTIONS["box"], 1, 30):
        ours.add(*step)
        other.add(*step)
    np.random.seed(0)
    expected = other.sample(50, env)
    np.random.seed(0)
    got = ours.sample(50, env)
    for name in expected._fields:
        for x, y in zip(
            leaves_of(getattr(got, name)), leaves_of(getattr(expected, name)), strict=True
        ):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("buffer_size", [3, 20, 64])
def test_after_the_ring_went_round_each_transition_is_drawn_alike(buffer_size):
    space = spaces.Box(-np.inf, np.inf, (1,))
    ours = sb3.ReplayBuffer(buffer_size, space, ACTIONS["box"], n_envs=3)
    dones = {}
    for t, step in enumerate(numbered(3, 200)):
        ours.add(*step)
        dones.update({float(x): bool(d) for x, d in zip(step[0][:, 0], step[4], strict=True)})
        if t % 40 == 39:
            batch = ours.sample(4000)
            obs = batch.observations[:, 0]
            assert torch.equal(batch.next_observations[:, 0], obs + 1)
            assert torch.equal(batch.rewards[:, 0], obs)
            assert batch.dones[:, 0].bool().tolist() == [dones[float(x)] for x in obs]
            assert ours.full == (t + 1 >= ours.buffer_size)
            values, counts = np.unique(obs.numpy(), return_counts=True)
            assert len(values) == int(ours._num_transitions.sum())  # all stored steps
            for env in range(3):  # the newest ones of each env
                of_env = values[(values >= 1000 * env) & (values < 1000 * (env + 1))]
                assert of_env.tolist() == list(
                    range(1000 * env + t + 1 - len(of_env), 1000 * env + t + 1)
                )
                assert len(of_env) >= max(1, ours.buffer_size // 3)
            assert stats.chisquare(counts).pvalue > 1e-4


def test_bytes_of_a_transition():
    """The allocated bytes of both buffers: image uint8[84, 84, 3], vector float32[31], action
    float32[8]."""
    space = spaces.Dict(
        image=spaces.Box(0, 255, (84, 84, 3), np.uint8), vector=spaces.Box(-1, 1, (31,))
    )
    ours, other = pair("DictReplayBuffer", space, spaces.Box(-1, 1, (8,)), 1000)
    held = [
        *other.observations.values(),
        *other.next_observations.values(),
        other.actions,
        other.rewards,
        other.dones,
        other.timeouts,
    ]
    bytes_ours = sum(leaf.nbytes for leaf in jax.tree.leaves(ours._state))
    assert ours.nbytes == bytes_ours
    assert bytes_ours / 1000 <= 21_500
    assert sum(leaf.nbytes for leaf in held) / 1000 >= 42_600
    assert "streams.steps.obs.image" in ours.memory()


@pytest.mark.parametrize("num_bytes", [1024, 96 * 1024, 100 * 1024, 10 * 2**20])
def test_an_env_may_reuse_its_array(num_bytes):
    space = spaces.Box(0, 255, (num_bytes,), np.uint8)
    ours = sb3.ReplayBuffer(12, space, ACTIONS["box"])
    memory = np.empty(2 * num_bytes + 1, np.uint8)
    for offset in (0, 1):  # one of the two addresses at most is a multiple of 64
        obs, next_obs = (
            memory[offset + i * num_bytes :][:num_bytes].reshape(1, -1) for i in (0, 1)
        )
        for t in range(10):
            obs[:], next_obs[:] = t, t + 1
            ours.add(obs, next_obs, np.zeros((1, 2)), np.full(1, t), np.array([False]), [{}])
            memory[:] = 255
        batch = ours.sample(16)
        for name, plus in (("observations", 0), ("next_observations", 1)):
            got = getattr(batch, name)
            assert torch.equal(got, (batch.rewards + plus).to(torch.uint8).expand(-1, num_bytes))
        ours.reset()


@pytest.mark.parametrize("algorithm", ["SAC", "TD3", "DQN", "DQN, 3 steps"])
def test_whole_runs_are_the_same(algorithm):
    """Unmodified algorithms: the losses of all updates are the same, and the parameters are
    bit-identical."""
    updates = 1000 if SOAK else 60
    make, env_id = {"SAC": (SAC, "Pendulum-v1"), "TD3": (TD3, "Pendulum-v1")}.get(
        algorithm, (DQN, "CartPole-v1")
    )
    runs = []
    for ours in (False, True):
        options = {
            "learning_starts": 20,
            "train_freq": 1,
            "batch_size": 32,
            "policy_kwargs": {"net_arch": [16]},
            "seed": 1,
        }
        if algorithm == "DQN, 3 steps":
            kwargs = {"n_steps": 3, "gamma": 0.99}
            options |= (
                {"replay_buffer_class": sb3.NStepReplayBuffer, "replay_buffer_kwargs": kwargs}
                if ours
                else {"n_steps": 3}
            )
        elif ours:
            options["replay_buffer_class"] = sb3.ReplayBuffer
        model = make("MlpPolicy", env_id, buffer_size=5000, device="cpu", **options)
        losses = []
        record = model.train

        def train(*args, model=model, record=record, losses=losses, **kwargs):
            record(*args, **kwargs)
            losses.append(
                {key: value for key, value in model.logger.name_to_value.items() if "loss" in key}
            )

        model.train = train
        runs.append((losses, params_of(model.learn(updates + 20))))
    assert runs[0][0] == runs[1][0]
    assert len(runs[0][0]) == updates
    assert runs[0][0][-1]
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize(
    "kind", ["ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer", "PrioritizedReplayBuffer"]
)
def test_a_buffer_is_saved_and_goes_on(kind, tmp_path):
    import pickle

    space = DICT if kind == "DictReplayBuffer" else VECTOR
    ours = getattr(sb3, kind)(500, space, ACTIONS["box"], n_envs=2)
    steps = list(stream(space, ACTIONS["box"], 2, 40))
    for step in steps[:20]:
        ours.add(*step)
    path = tmp_path / "buffer.pkl"
    path.write_bytes(pickle.dumps(ours))
    loaded = pickle.loads(path.read_bytes())
    for step in steps[20:]:
        ours.add(*step)
        loaded.add(*step)
    assert ours.size() == loaded.size() == 40
    for leaf, other in zip(
        jax.tree.leaves(ours._state), jax.tree.leaves(loaded._state), strict=True
    ):
        np.testing.assert_array_equal(leaf, other)
    np.random.seed(3)
    expected = ours.sample(30)
    np.random.seed(3)
    got = loaded.sample(30)
    assert torch.equal(got.rewards, expected.rewards)


@pytest.mark.parametrize(
    ("kind", "n_envs"),
    [("NStepReplayBuffer", 1), ("DictReplayBuffer", 3), ("PrioritizedReplayBuffer", 3)],
)
def test_steps_that_wait_are_as_if_added_at_once(kind, n_envs):
    import pickle

    space = DICT if kind == "DictReplayBuffer" else VECTOR
    waits, at_once = (
        getattr(sb3, kind)(60 * n_envs, space, ACTIONS["box"], n_envs=n_envs) for _ in range(2)
    )
    r = np.random.default_rng(0)
    for number, step in enumerate(stream(space, ACTIONS["box"], n_envs, 230)):
        waits.add(*step)
        at_once.add(*step)
        at_once._flush()
        assert len(waits._waiting) <= 64
        if number == 150:
            assert waits._waiting
            waits = pickle.loads(pickle.dumps(waits))
        if number < 70 or r.random() < 0.8:
            continue
        batches = []
        for buffer in (waits, at_once):
            np.random.seed(number)
            batches.append(buffer.sample(8))
            if kind == "PrioritizedReplayBuffer":
                buffer.update_priorities(batches[-1].indices, batches[-1].rewards.abs())
        jax.tree.map(np.testing.assert_array_equal, *batches)
        assert waits.size() == at_once.size()
    for x, y in zip(jax.tree.leaves(waits._state), jax.tree.leaves(at_once._state), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_model_saves_its_buffer(tmp_path):
    model = SAC(
        "MlpPolicy",
        "Pendulum-v1",
        replay_buffer_class=sb3.ReplayBuffer,
        learning_starts=10,
        buffer_size=200,
        device="cpu",
    )
    model.learn(30)
    model.save_replay_buffer(tmp_path / "buffer")
    model.save(tmp_path / "model")
    other = SAC.load(tmp_path / "model", env=model.env)
    other.load_replay_buffer(tmp_path / "buffer")
    assert other.replay_buffer.size() == 30
    other.learn(30)
    assert other.replay_buffer.size() == 60


def test_reset_extend_and_the_empty_buffer():
    ours = sb3.ReplayBuffer(50, VECTOR, ACTIONS["box"])
    with pytest.raises(ValueError, match=r"nothing to sample yet.*learning_starts"):
        ours.sample(4)
    steps = list(stream(VECTOR, ACTIONS["box"], 1, 6))
    ours.extend(*zip(*steps, strict=True))
    assert (ours.size(), ours.pos) == (6, 6)
    ours.reset()
    assert (ours.size(), ours.pos, ours.full) == (0, 0, False)
    with pytest.raises(ValueError, match="nothing to sample yet"):
        ours.sample(4)
    ours.add(*steps[3])
    assert torch.equal(ours.sample(2).observations[0], torch.as_tensor(steps[3][0][0]))


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="stored once here; leave out optimize_memory_usage"):
        sb3.ReplayBuffer(50, VECTOR, ACTIONS["box"], optimize_memory_usage=True)
    with pytest.raises(ValueError, match="not a Dict; use ReplayBuffer"):
        sb3.DictReplayBuffer(50, VECTOR, ACTIONS["box"])
    wide = sb3.ReplayBuffer(50, spaces.Box(-(2**40), 2**40, (1,), np.int64), ACTIONS["box"])
    big, step = np.full((1, 1), 2**33), [np.zeros((1, 2)), np.zeros(1), np.array([False]), [{}]]
    with pytest.raises(ValueError, match=f"next_obs: {2**33} cannot be stored as int32"):
        wide.add(big * 0, big, *step)
    wide.add(big * 0 - 5, big * 0, *step)
    assert wide.sample(1).observations.tolist() == [[-5]]
    assert wide.size() == 1
    with pytest.raises(ValueError, match="needs a PrioritizedReplayBuffer, got ReplayBuffer"):
        sb3.PrioritizedDQN("MlpPolicy", "CartPole-v1", replay_buffer_class=sb3.ReplayBuffer)


def test_what_does_not_fit_is_named_and_changes_nothing():
    ours = sb3.DictReplayBuffer(50, DICT, ACTIONS["box"], n_envs=2)
    good = next(iter(stream(DICT, ACTIONS["box"], 2, 1)))
    ours.add(*good)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(ours._state)]
    obs, next_obs, action, reward, done, infos = good
    no_image = {key: value for key, value in obs.items() if key != "image"}
    for bad, text in (
        (
            ({**obs, "vector": np.zeros((2, 4))}, next_obs, action, reward, done, infos),
            r"obs.vector: got the shape \[2, 4\], expected",
        ),
        ((obs, no_image, action, reward, done, infos), "next_obs: missing image"),
        (
            (obs, next_obs, action[:1], reward, done, infos),
            r"action: got the shape \[1, 2\], expected \[2, 2\]",
        ),
        (
            (obs, next_obs, action, reward[:1], done, infos),
            r"reward: got the shape \[1\], expected \[2\]",
        ),
        (
            (obs, next_obs, action, reward, done[:1], infos),
            r"done: got the shape \[1\], expected \[2\]",
        ),
        (
            (obs, next_obs, action, reward, done, infos[:1]),
            r"infos: got the shape \[1\], expected \[2\]",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            ours.add(*bad)
    for x, y in zip(before, jax.tree.leaves(ours._state), strict=True):
        np.testing.assert_array_equal(x, y)
    assert ours.size() == 1


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_an_interrupted_add_leaves_the_rows_or_says_that_they_are_not_known(when, monkeypatch):
    ours = sb3.ReplayBuffer(50, VECTOR, ACTIONS["box"])
    steps = list(stream(VECTOR, ACTIONS["box"], 1, 4))
    ours.add(*steps[0])

    def fails(replay, state, *arguments):
        if when == "during":
            jax.tree.map(lambda leaf: leaf.delete(), state)
        raise KeyboardInterrupt

    ours.size()
    with monkeypatch.context() as patch:
        if when == "after":
            record = property(lambda self: vars(self)["_added_newest"], fails)
            patch.setattr(sb3.ReplayBuffer, "_added_newest", record, raising=False)
        else:
            patch.setattr(base, "_add", fails)
        ours.add(*steps[1])  # waits
        with pytest.raises(KeyboardInterrupt):
            ours.sample(2)
    if when == "before":
        assert ours.size() == 2
        return
    for call in (lambda: ours.add(*steps[2]), lambda: ours.sample(2)):
        with pytest.raises(
            RuntimeError,
            match=r"an earlier call was interrupted while it changed the rows.*reset",
        ):
            call()
    ours.reset()
    ours.add(*steps[3])
    assert torch.equal(ours.sample(2).observations[0], torch.as_tensor(steps[3][0][0]))


def test_rows_may_lie_on_a_named_platform():
    ours = sb3.ReplayBuffer(50, VECTOR, ACTIONS["box"], storage_device="cpu")
    for step in stream(VECTOR, ACTIONS["box"], 1, 5):
        ours.add(*step)
    assert {
        device.platform for leaf in jax.tree.leaves(ours._state) for device in leaf.devices()
    } == {"cpu"}
    assert ours.sample(3).observations.device == ours.device
    with pytest.raises(RuntimeError, match="abacus"):
        sb3.ReplayBuffer(50, VECTOR, ACTIONS["box"], storage_device="abacus")


# The missing extra, and calls in place.


def test_without_stable_baselines3_the_error_names_the_extra():
    code = "import sys; sys.modules['stable_baselines3'] = None; import jaxreplay, jaxreplay.sb3"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "jaxreplay.sb3 needs Stable-Baselines3: pip install 'jaxreplay[sb3]'" in result.stderr


def test_an_add_and_a_sample_are_in_place():
    ours = sb3.NStepReplayBuffer(1 << 16, VECTOR, ACTIONS["box"], n_envs=2)
    steps = jax.tree.map(lambda leaf: np.zeros((4, 2, *leaf.shape), leaf.dtype), ours._example())
    flags, rows, size = np.zeros((4, 2), bool), np.zeros(8, np.int32), {"num_elements": 1 << 16}
    check_in_place(
        functools.partial(base._add.__wrapped__, ours._replay),
        (ours._state, steps, flags, flags[0], (rows, rows)),
        donated=0,
        **options_here(),
        **size,
    )
    check_in_place(
        functools.partial(base._items, ours._replay),
        (ours._state, rows, rows),
        **options_here(),
        **size,
    )
