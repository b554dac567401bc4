"""Hindsight replay for Stable-Baselines3: goals achieved later in the episode, and the env's
rewards for them."""

import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces

from jaxreplay import sb3
from jaxreplay.sb3 import hindsight
from jaxreplay.stateful import places
from tests.conftest import thorough
from tests.support.hlo import check_in_place
from tests.support.refusals import refused, warned
from tests.support.replays import have_one_length

ONE = spaces.Box(-np.inf, np.inf, (1,), np.float64)
SPACE = spaces.Dict(observation=ONE, achieved_goal=ONE, desired_goal=ONE)
ACTION = spaces.Box(-1, 1, (2,))


_one_length = pytest.fixture(autouse=True)(have_one_length)


class Env:
    """Return the negative distance as a reward, and record the infos of each call."""

    def __init__(self):
        self.infos = []

    def env_method(self, name, achieved, goal, infos, indices):
        assert (name, indices) == ("compute_reward", [0])
        assert achieved.dtype == goal.dtype == np.float64
        self.infos += list(infos)
        return [-np.abs(achieved - goal)[:, 0]]


SIZE = 180  # 60 rows of each of three envs: tests share programs
BATCH, NUM_REAL = 1000, 200  # one of five goals is the step's own


def make(size=SIZE, kind=sb3.HerReplayBuffer, n_envs=3, **options):
    return kind(size, SPACE, ACTION, env=Env(), n_envs=n_envs, **options)


def fill(buffer, steps, length=10, timeout=False, start=0, given=lambda infos: infos):
    """Add `steps` steps in episodes of `length`.

    Achieved goals count up, env i's from 1000 * i; every desired goal is -1.
    """
    n = buffer.n_envs
    for t in range(start, start + steps):
        achieved = (1000.0 * np.arange(n) + t)[:, None]
        obs = {
            "observation": achieved,
            "achieved_goal": achieved,
            "desired_goal": np.full((n, 1), -1.0),
        }
        # An episode's last achieved goal is 0.5 beyond its last step: the next episode begins
        # elsewhere.
        done = np.full(n, (t + 1) % length == 0)
        next_achieved = achieved + np.where(done, 0.5, 1.0)[:, None]
        next_obs = obs | {"observation": next_achieved, "achieved_goal": next_achieved}
        infos = [{"number": t, "TimeLimit.truncated": bool(timeout and done[0])} for _ in range(n)]
        buffer.add(obs, next_obs, np.zeros((n, 2)), np.full(n, t), done, given(infos))


def drawn(buffer, size=BATCH):
    """Return a batch, and its steps' own and desired goals."""
    batch = buffer.sample(size)
    return batch, *(batch.observations[key][:, 0] for key in ("achieved_goal", "desired_goal"))


def numbers_with_their_infos(buffer):
    """Check that the env gets each step's own infos, and return the numbers of the steps."""
    buffer.env.infos.clear()
    _, obs, _ = drawn(buffer)
    assert [info["number"] for info in buffer.env.infos] == (obs[NUM_REAL:] % 1000).tolist()
    return set((obs % 1000).int().tolist())


def test_the_buffer_goes_round_and_knows_its_steps_infos():
    buffer = make(copy_info_dict=True)
    fill(buffer, 200, timeout=True)
    numbers = numbers_with_their_infos(buffer)
    assert min(numbers) >= 200 - 60
    assert max(numbers) == 199
    batch, obs, goal = drawn(buffer)
    assert torch.equal((goal / 10).floor()[NUM_REAL:], (obs / 10).floor()[NUM_REAL:])
    assert not batch.dones.any()  # timeouts are bootstrapped


def test_priorities_decide_what_is_drawn():
    options = {"alpha": 1.0, "beta": 0.7, "epsilon": 0.0, "gamma": 0.9}
    buffer = make(100, sb3.PrioritizedHerReplayBuffer, 1, **options)
    fill(buffer, 24)  # the last episode goes on
    batch, obs, _ = drawn(buffer, 4000)
    assert set(obs.tolist()) == set(range(24))
    assert batch.weights.unique().tolist() == [1]
    assert batch.discounts.unique().tolist() == [np.float32(0.9)]
    # priorities as an algorithm has them: of few bits, with a gradient, in a column
    priorities = torch.where(obs < 12, 0.0, obs)[:, None].bfloat16().requires_grad_()
    buffer.update_priorities(batch.indices, priorities)
    assert float(buffer._state.sampler.max_priority) == 23
    batch, obs, goal = drawn(buffer, 4000)
    assert (goal != -1).tolist() == [False] * 800 + [True] * 3200
    for part in (obs[:800], obs[800:]):
        counts = np.bincount(part.long(), minlength=24)
        expected = np.where(np.arange(24) < 12, 0, np.arange(24)) / np.arange(12, 24).sum()
        assert np.abs(counts - len(part) * expected).max() < 2  # stratified
    torch.testing.assert_close(batch.weights[:, 0], ((12 / obs) ** 0.7).float())
    assert torch.equal(batch.next_observations["desired_goal"][:, 0], goal)
    assert torch.equal(batch.dones[:, 0].bool(), obs % 10 == 9)
    assert torch.equal(batch.rewards[:800, 0].double(), obs[:800])
    achieved = batch.next_observations["achieved_goal"][:, 0]
    assert torch.equal(batch.rewards[800:, 0], -(achieved - goal).abs()[800:].float())
    buffer.update_priorities(batch.indices, np.zeros(4000))
    with refused("every priority is 0, so nothing can be sampled; use a positive epsilon"):
        buffer.sample(4000)


def test_after_a_failed_add_each_step_has_its_infos(monkeypatch):
    buffer = make(copy_info_dict=True)
    fill(buffer, 20)
    drawn(buffer)

    def fails(*arguments):
        raise MemoryError("no room for a program")

    with monkeypatch.context() as patch:
        patch.setattr(places, "_reading", lambda _: ([fails] * 2, [fails] * 2))
        fill(buffer, 1, start=20)
        with pytest.raises(MemoryError):
            buffer.sample(4)
    fill(buffer, 9, start=21)
    assert buffer.size() == 30
    assert numbers_with_their_infos(buffer) == {*range(30)}


@pytest.mark.parametrize(
    "options", [{}, {"copy_info_dict": True, "handle_timeout_termination": False}], ids=str
)
def test_of_an_episode_that_goes_on_what_was_achieved_so_far_is_drawn(options):
    buffer = make(**options)
    fill(buffer, 3)
    with refused(r"infos: got the shape \[1\], expected \[3\]"):
        fill(buffer, 1, start=3, given=lambda infos: infos[:1])
    _, _, goal = drawn(buffer)
    assert set(goal[200:].tolist()) == {1000 * env + t for env in range(3) for t in (1, 2, 3)}
    fill(buffer, 7, start=3)
    assert buffer.size() == 10
    assert 9.5 in drawn(buffer)[2]
    assert len(buffer.env.infos) == 1600
    assert options or buffer.env.infos == [{}] * 1600


@pytest.mark.parametrize(
    ("num_goals", "size", "num_new"),
    [(4, 1, 0), thorough(0, 7, 0), thorough(4, 7, 5)],
)
def test_a_batch_of_any_size(num_goals, size, num_new):
    buffer = make(n_sampled_goal=num_goals)
    fill(buffer, 20)
    batch, _, goal = drawn(buffer, np.int64(size))
    assert int((goal != -1).sum()) == num_new
    assert batch.observations["observation"].dtype == torch.float64
    assert batch.rewards.shape == batch.dones.shape == (size, 1)
    with refused("batch_size must be an int of at least 1, got 0"):
        buffer.sample(0)


def test_an_episode_may_end_where_the_buffer_was_saved():
    buffer = make()
    fill(buffer, 15)
    buffer = pickle.loads(pickle.dumps(buffer))
    with refused("no env to compute rewards; call set_env"):
        buffer.sample(BATCH)
    buffer.set_env(Env())
    with refused("already"):
        buffer.set_env(Env())
    goes_on = pickle.loads(pickle.dumps(buffer))
    goes_on.set_env(Env())
    with warned("end with the buffer's last step"):
        buffer.truncate_last_trajectory()
    buffer.truncate_last_trajectory()  # no episode is left to truncate: there is no warning
    for each, crosses in ((buffer, False), (goes_on, True)):
        fill(each, 5, start=15)
        _, obs, goal = drawn(each)
        obs, goal = (x[NUM_REAL:] % 1000 for x in (obs, goal))
        assert bool(((obs >= 10) & (obs < 15) & (goal > 15)).any()) == crosses
        assert goal.max() == 19.5


@pytest.mark.thorough
def test_a_draw_is_in_place():
    buffer, seed = make(1 << 16, n_envs=1), np.uint32(0)
    check_in_place(
        lambda state: hindsight._draw(2, 6)(buffer._replay, state, (seed, seed)),
        (buffer._state,),
        num_elements=1 << 16,
    )
