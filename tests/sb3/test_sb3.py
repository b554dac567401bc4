"""The drop-in buffers beside Stable-Baselines3's own: with equal seeds the same batches and the
same runs, in half the bytes."""

import copy
import importlib
import itertools
import pickle
import sys

import gymnasium
import jax
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from jaxreplay import datasets, sb3
from jaxreplay.sb3 import columns
from tests.conftest import ALL, SOAK, thorough
from tests.sb3 import test_sb3_hindsight as hindsight
from tests.support.compilations import count_programs
from tests.support.refusals import check_table, refused
from tests.support.replays import have_few_lengths
from tests.support.sb3_streams import (
    ACTIONS,
    BOX,
    DICT,
    NUMBER,
    OBSERVATIONS,
    VECTOR,
    added_to,
    check_same,
    kind_of,
    numbered,
    pair,
    params_of,
    stream,
)
from tests.support.steps import nth

N_STEPS = {"n_steps": 5, "gamma": 0.9}
CASES = [
    ("dict", "double", 3, {}),
    ("float64", "discrete", 1, {"handle_timeout_termination": False}),
    ("vector", "box", 2, N_STEPS),
    *(
        thorough(*one)
        for one in [
            ("dict", "double", 3, {"handle_timeout_termination": False}),
            *(("vector", "box", 2, N_STEPS | {"n_steps": n_steps}) for n_steps in (1, 2)),
            ("image", "wide", 1, {}),
            ("discrete", "wide", 3, {}),
            *((*one, {}) for one in itertools.product(OBSERVATIONS, ("box", "discrete"), (1, 3))),
        ]
    ),
]


def normalizer(observation_space, action_space, n_envs):
    class Env(gymnasium.Env):
        def __init__(self):
            self.observation_space, self.action_space = observation_space, action_space

        def reset(self, **_):
            return observation_space.sample(), {}

        def step(self, action):
            return observation_space.sample(), float(np.random.randn()), False, False, {}

    keys = ["vector"] if isinstance(observation_space, spaces.Dict) else None
    env = VecNormalize(DummyVecEnv([Env] * n_envs), norm_obs_keys=keys)
    env.reset()
    for _ in range(20):
        env.step([action_space.sample() for _ in range(n_envs)])
    env.training = False
    return env


@pytest.mark.parametrize(("observation", "action", "n_envs", "options"), CASES)
def test_random_calls_give_what_theirs_give(observation, action, n_envs, options, monkeypatch):
    """With equal seeds the same batches, before their ring goes round."""
    have_few_lengths(monkeypatch)
    spaces_, options = (OBSERVATIONS[observation], ACTIONS[action]), {"n_envs": n_envs, **options}
    kind = "NStepReplayBuffer" if "n_steps" in options else kind_of(spaces_[0])
    ours, other = pair(kind, *spaces_, **options)
    envs = [None, normalizer(*spaces_, n_envs)] if observation in ("dict", "vector") else [None]
    reset = 0 if "n_steps" in options else 0.05  # their windows know of no such resets
    steps = stream(*spaces_, n_envs, 500 if SOAK else 200, reset=reset)
    r = np.random.default_rng(0)
    for t, step in enumerate(steps):
        added_to([other], [step])
        if n_envs == 1 and t % 2:  # one env needs no axis
            step = *nth(step[:-1], 0), step[-1]
        memory = jax.tree.map(np.array, step[:-1])
        ours.add(*memory, step[-1])
        jax.tree.map(lambda leaf: leaf.fill(1), memory)  # an env may reuse its arrays
        assert (ours.size(), ours.pos, ours.full) == (other.size(), other.pos, other.full)
        if t == 100:
            ours = pickle.loads(pickle.dumps(ours))
        if t == 150:
            ours.reset()
            other.reset()
        elif r.random() < 0.2:
            rows, env = r.integers(0, other.size(), 5), envs[r.integers(len(envs))]
            by_number = r.random() < 0.3
            batches = []
            for buffer in (ours, other):
                np.random.seed(t)
                batches.append(
                    buffer._get_samples(rows, env) if by_number else buffer.sample(5, env)
                )
            check_same(*batches, 1e-5 if kind == "NStepReplayBuffer" else 1e-6 if env else 0)


def test_demonstrations_are_added():
    """Eleven transitions, of which 3 envs get the first once more."""
    lengths, episodes = (4, 5, 2), []
    for number, length in enumerate(lengths):
        obs = 10 * number + np.arange(length + 1, dtype=np.float32)[:, None]
        last = np.arange(length) == length - 1
        is_end = number == 0
        flags = last & is_end, last & (not is_end)
        episodes.append(datasets.Episode(obs, np.tile(obs[:-1] / 100, 2), obs[:-1, 0], *flags))
    ours = sb3.ReplayBuffer(60, NUMBER, BOX, n_envs=3)
    ours.add_episodes(episodes)
    found = ours.sample(500)
    obs, after, done = (
        np.asarray(x)[:, 0] for x in (found.observations, found.next_observations, found.dones)
    )
    starts = [10 * number + t for number, length in enumerate(lengths) for t in range(length)]
    assert sorted({*obs.tolist()}) == starts
    assert (after == obs + 1).all()
    assert (done == (obs == 3)).all()
    assert ours.size() == 4
    with refused("the episodes have no transitions"):
        ours.add_episodes([])


def test_a_long_run_compiles_and_copies_nothing_after_its_first_steps():
    """Also where the buffer looks at its rows for wrong resets, and where its ring went round."""
    ours = sb3.ReplayBuffer(1_000, VECTOR, BOX)

    def loop(steps):
        for t, step in enumerate(steps):
            ours.add(*step[:4], np.zeros(1, bool), [{}])
            if t % 10 == 9:
                ours.sample(128)

    steps = stream(VECTOR, BOX, 1, 10_000 if ALL else 2_500)
    loop(itertools.islice(steps, 300))
    place = lambda: ours._owner._state.rows.steps.obs.unsafe_buffer_pointer()
    before = place()
    with count_programs() as compiled:
        loop(steps)
    assert compiled() == 0
    assert place() == before


def test_the_empty_buffer_and_numbers_beyond_what_is_held(monkeypatch):
    have_few_lengths(monkeypatch)
    ours, steps = sb3.ReplayBuffer(10, VECTOR, BOX), list(stream(VECTOR, BOX, 1, 25))
    for _ in range(2):
        with refused(r"nothing to sample yet.*learning_starts"):
            ours.sample(5)
        ours.extend(*zip(*steps[:6], strict=True))
        assert (ours.size(), ours.pos) == (6, 6)
        assert repr(ours) == "ReplayBuffer(6 of 10 rows, n_envs=1, device='cpu')"
        ours.reset()
        assert (ours.size(), ours.pos, ours.full) == (0, 0, False)
    ours.add(*steps[3])
    assert torch.equal(ours.sample(5).observations[0], torch.as_tensor(steps[3][0][0]))
    ours.reset()
    for *step, _, infos in steps:
        ours.add(*step, np.ones(1, bool), infos)
    assert len(ours._get_samples(np.arange(5))[0]) == ours.size() == 5
    for number in (5, 9, -1):
        with refused(rf"no transition {number}: the streams hold \[5\]", IndexError):
            ours._get_samples(np.array([0, number]))
    assert not hasattr(ours, "anything")
    ours = sb3.ReplayBuffer(3, NUMBER, BOX, n_envs=3)  # a row of each env
    for t, step in enumerate(numbered(3, 9)):
        ours.add(*step)
        batch = ours.sample(50)
        obs = batch.observations
        assert torch.equal(batch.next_observations, obs + 1)
        assert {1000 * env + t for env in range(3)} <= {*obs[:, 0].int().tolist()}
        assert (obs % 1000 > t - 2).all()


@pytest.mark.parametrize(
    ("observation", "n_envs"), [("dict", 3), thorough("vector", 1), thorough("discrete", 3)]
)
def test_their_arrays_are_there(observation, n_envs, monkeypatch):
    """Row by row as theirs, through a wrap; final rows take the place of the oldest transitions."""
    have_few_lengths(monkeypatch)
    spaces_ = OBSERVATIONS[observation], ACTIONS["double"]
    ours, other = pair(kind_of(spaces_[0]), *spaces_, n_envs=n_envs, size=20 * n_envs)

    def check_rows(chosen):
        for name in columns.NAMES:
            got, expected = getattr(ours, name), getattr(other, name)
            assert got is getattr(ours, name)  # made once
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
                np.testing.assert_array_equal(a[chosen], b[chosen])
                assert not a.flags.writeable
                assert not a[~chosen].any()

    check_rows(np.ones((20, n_envs), bool))
    for t, step in enumerate(stream(*spaces_, n_envs, 50, reset=0)):
        added_to([ours, other], [step])
        assert (ours.pos, ours.full) == (other.pos, other.full)
        if t not in (0, 7, 18, 19, 20, 33, 49):
            continue
        ago = (t - np.arange(20)) % 20
        is_stored = (ago[:, None] < ours._recorded().num_transitions) & (ago <= t)[:, None]
        assert is_stored.sum() == ours._recorded().num_transitions.sum()
        check_rows(is_stored)
    np.testing.assert_array_equal(copy.deepcopy(ours).rewards, ours.rewards)
    ours.reset()
    assert not ours.rewards.any()


def test_bytes_of_a_transition():
    """The allocated bytes of both buffers: image uint8[84, 84, 3], vector float32[31], action
    float32[8]."""
    space = spaces.Dict(
        image=spaces.Box(0, 255, (84, 84, 3), np.uint8), vector=spaces.Box(-1, 1, (31,))
    )
    ours, other = pair("DictReplayBuffer", space, spaces.Box(-1, 1, (8,)), 1000)
    total = lambda arrays: sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    assert ours.nbytes == total(ours._state)
    assert ours.nbytes / 1000 <= 21_500
    assert total([getattr(other, name) for name in columns.NAMES]) / 1000 >= 42_600
    assert "rows.steps.obs.image" in ours.memory()


@pytest.mark.parametrize(
    ("algorithm", "env_id", "n_steps"),
    [
        (SAC, "Pendulum-v1", None),
        thorough(TD3, "Pendulum-v1", None),
        thorough(DQN, "CartPole-v1", None),
        thorough(DQN, "CartPole-v1", 3),
    ],
)
def test_whole_runs_are_the_same(algorithm, env_id, n_steps):
    """Unmodified algorithms: the losses of all updates are the same, and the parameters are
    bit-identical."""
    updates = 1000 if SOAK else 60 if ALL else 30
    theirs = {"n_steps": n_steps} if n_steps else {}
    drop_in = {"replay_buffer_class": sb3.NStepReplayBuffer if n_steps else sb3.ReplayBuffer}
    if n_steps:
        drop_in["replay_buffer_kwargs"] = {"n_steps": n_steps, "gamma": 0.99}
    runs = []
    for own in (theirs, drop_in):
        model = algorithm(
            "MlpPolicy",
            env_id,
            buffer_size=5000,
            device="cpu",
            learning_starts=20,
            train_freq=1,
            batch_size=32,
            policy_kwargs={"net_arch": [16]},
            seed=1,
            **own,
        )
        losses, train = [], model.train

        def record(*arguments, model=model, train=train, losses=losses, **options):
            train(*arguments, **options)
            values = model.logger.name_to_value.items()
            losses.append({name: value for name, value in values if "loss" in name})

        model.train = record
        runs.append((losses, params_of(model.learn(updates + 20))))
    (losses, params), (others, other_params) = runs
    assert losses == others
    assert len(losses) == updates
    assert losses[-1]
    assert torch.equal(params, other_params)


BAD = {
    "sb3.ReplayBuffer(50, VECTOR, BOX, optimize_memory_usage=True)": """
        stored once here; leave out optimize_memory_usage""",
    **{
        f"sb3.{kind}(50, VECTOR, BOX, n_steps=3)": """
            n_steps=3 needs the model's gamma,
            kwargs={'n_steps': 3, 'gamma': 0.99}"""
        for kind in ("NStepReplayBuffer", "PrioritizedReplayBuffer")
    },
    "sb3.DictReplayBuffer(50, VECTOR, BOX)": "not a Dict; use ReplayBuffer",
    "sb3.ReplayBuffer(50, VECTOR, BOX, storage_device='cpu', rows='host')": """
        rows='host' takes no storage_device""",
    "sb3.ReplayBuffer(50, VECTOR, BOX, rows='disk')": """
        rows must be "host", or the path of a folder""",
    "hindsight.make(goal_selection_strategy='past')": """
        goal_selection_strategy must be one of future, final, episode, got 'past'""",
    "hindsight.make(kind=sb3.PrioritizedHerReplayBuffer, n_steps=2)": """
        the env computes the rewards of single steps; leave out n_steps=2""",
}


def test_bad_options_are_refused():
    check_table(BAD, {**globals(), "hindsight": hindsight})
    with refused("abacus", RuntimeError):
        sb3.ReplayBuffer(50, VECTOR, BOX, storage_device="abacus")


def test_what_does_not_fit_is_named_and_changes_nothing():
    wide = spaces.Box(-(2**40), 2**40, (1,), np.int64)
    ours = sb3.ReplayBuffer(50, wide, BOX, storage_device="cpu")
    big, step = np.full((1, 1), 2**33), [np.zeros((1, 2)), np.zeros(1), np.array([False]), [{}]]
    with refused(f"next_obs: {2**33} cannot be stored as int32"):
        ours.add(big * 0, big, *step)
    ours.add(big * 0 - 5, big * 0, *step)
    batch = ours.sample(1)
    assert batch.observations.tolist() == [[-5]]
    assert batch.observations.device == ours.device
    assert ours.size() == 1
    assert {device.platform for device in ours._state.rows.steps.reward.devices()} == {"cpu"}

    ours = sb3.DictReplayBuffer(50, DICT, BOX, n_envs=2)
    (step,) = stream(DICT, BOX, 2, 1)
    names = "obs", "next_obs", "action", "reward", "done", "infos"
    good = dict(zip(names, step, strict=True))
    wrong = {
        "add(obs=obs | {'vector': np.zeros((2, 4))})": "obs.vector: got the shape [2, 4], expected",
        # Stable-Baselines3 cannot broadcast it; reshaping it would store another image.
        "add(obs=obs | {'image': obs['image'].transpose(0, 3, 1, 2)})": """
            obs.image: got the shape [2, 3, 5, 4], expected [2, 5, 4, 3]""",
        "add(next_obs={'vector': obs['vector']})": "next_obs: missing\nimage",
        **{
            f"add({name}={name}[:1])": f"{name}: got the shape [1\nexpected [2"
            for name in names[2:]
        },
    }
    check_table(wrong, {"np": np, "add": lambda **bad: ours.add(**good | bad), **good})
    assert ours.size() == 0
    assert not len(ours._record)


def test_without_stable_baselines3_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    monkeypatch.delitem(sys.modules, "jaxreplay.sb3")
    with refused(
        r"jaxreplay.sb3 needs Stable-Baselines3: pip install 'jaxreplay\[sb3\]'", ImportError
    ):
        importlib.import_module("jaxreplay.sb3")
