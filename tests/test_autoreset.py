"""The autoreset modes of Gymnasium and other libraries, and the warnings about a wrong
`autoreset`."""

import dataclasses
import functools
import warnings
from typing import Any

import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.inspection.contents import resets_of
from jaxreplay.inspection.resets import wrong_autoreset
from tests.conftest import ALL, SOAK
from tests.support.refusals import refused
from tests.support.steps import begun, nth, plain_step

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")
Mode = gymnasium.vector.AutoresetMode
SIZES = {"capacity": 64, "num_envs": 2, "batch_size": 4}


def cart_poles(mode, num_envs=2, **options):
    return gymnasium.make_vec(
        "CartPole-v1",
        num_envs=num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
        **options,
    )


def test_gymnasiums_modes_are_taken_as_they_are():
    for mode, form in (
        (Mode.NEXT_STEP, "next_step"),
        (Mode.SAME_STEP, "same_step"),
        (Mode.DISABLED, "same_step"),
    ):
        assert jr.uniform(**SIZES, autoreset=mode) == jr.uniform(**SIZES, autoreset=form)
        assert jr.rollout(length=4, num_envs=2, autoreset=mode).autoreset == form
        assert jr.autoreset.of(cart_poles(mode)) == form
    # A stream must hold a window and the final row of its last step.
    with refused("one window needs 5; the smallest capacity is 10"):
        jr.uniform(**SIZES | {"capacity": 8}, n_step=3, autoreset=Mode.SAME_STEP)


def test_gymnasium_1_0_resets_in_the_next_step_and_does_not_say_so(monkeypatch):
    """Its own vector envs do; others, and those of 0.29, which reset in the same step, may not."""
    named = lambda name, *bases: type(name.split(".")[-1], bases, {"__module__": name})
    base = type("VectorEnv", (), {"__module__": "gymnasium.vector.vector_env", "metadata": {}})
    sync = named("gymnasium.vector.sync_vector_env", base)
    other = named("other", base)
    wrapped, wrapped_other = (named("gymnasium.wrappers.vector.common", base)() for _ in range(2))
    wrapped.unwrapped, wrapped_other.unwrapped = sync(), other()
    monkeypatch.setattr(gymnasium, "__version__", "1.0.0")
    for envs in (sync(), named("mine", sync)(), wrapped):
        assert jr.autoreset.of(envs) == "next_step"
    for version, unknown in (
        ("1.0.0", (other(), wrapped_other)),
        ("0.29.1", (sync(), wrapped)),
        ("1.1.0", (sync(), wrapped)),
    ):
        monkeypatch.setattr(gymnasium, "__version__", version)
        for envs in unknown:
            with refused(r"has no metadata.'autoreset_mode'."):
                jr.autoreset.of(envs)


def test_each_library_has_one_of_the_values():
    names = {name for name in dir(jr.autoreset) if name.isupper() and name[0] != "_"}
    libraries = "GYMNASIUM ENVPOOL GYMNAX JUMANJI GYMNAX_BEFORE_1 BRAX CRAFTAX JAXMARL PETTINGZOO "
    libraries += "MANISKILL ISAAC_LAB MJLAB PLAYGROUND"
    assert names == {*libraries.split(), "FORMS"}
    values = {getattr(jr.autoreset, name) for name in libraries.split()}
    assert values == set(jr.autoreset.FORMS)


NUM_ENVS, NUM_STEPS = 4, 400


@functools.cache
def cart_pole(mode, seed, limit):
    """Steps of a random policy, `[T, E, ...]`, in a given autoreset mode.

    `after` is the observation that the next action is chosen from, `final` the true next
    observation. `limit` is the maximal number of steps of an episode.
    """
    envs = cart_poles(mode, NUM_ENVS, max_episode_steps=limit)
    envs.action_space.seed(seed)
    (obs, _), rows = envs.reset(seed=seed), []
    was_done = np.zeros(NUM_ENVS, bool)
    for _ in range(NUM_STEPS):
        action = envs.action_space.sample()
        after, reward, terminated, truncated, info = envs.step(action)
        done, final = terminated | truncated, after.copy()
        if mode == Mode.SAME_STEP:
            for env in np.flatnonzero(done):
                final[env] = info["final_obs"][env]
        if mode == Mode.DISABLED and done.any():
            after, _ = envs.reset(options={"reset_mask": done})
        step = (obs, action, reward.astype(np.float32), terminated, truncated, final, after)
        rows.append([np.array(part) for part in (*step, was_done)])
        obs, was_done = after.copy(), done
    names = ("obs", "action", "reward", "terminated", "truncated", "final", "after", "was_done")
    return dict(zip(names, map(np.stack, zip(*rows, strict=True)), strict=True))


@dataclasses.dataclass(frozen=True)
class Fed:
    """How the steps of an env are passed to the buffer."""

    mode: Any
    autoreset: str
    final_obs: str | None = None  # key of `cart_pole`'s result
    is_masked: bool = False  # the step after a done is masked out

    def steps(self, seed, limit):
        rows = cart_pole(self.mode, seed, limit)
        step = {name: rows[name] for name in ("obs", "action", "reward", "terminated", "truncated")}
        if self.final_obs is not None:
            step["final_obs"] = rows[self.final_obs]
        return step, ~rows["was_done"] if self.is_masked else None

    def buffer(self, make=jr.uniform, **options):
        return make(
            capacity=800 * NUM_ENVS,
            num_envs=NUM_ENVS,
            batch_size=32,
            autoreset=self.autoreset,
            **{"allow_mask": self.is_masked} | options,
        )


NEXT, SAME, DISABLED = Mode.NEXT_STEP, Mode.SAME_STEP, Mode.DISABLED
WRONG = {
    "next step as same_step_no_final_obs": Fed(NEXT, "same_step_no_final_obs"),
    "next step as same_step": Fed(NEXT, "same_step", "final"),
    "the final observation masked out": Fed(NEXT, "next_step", is_masked=True),
    "same step as next_step": Fed(SAME, "next_step"),
    "reset by hand as next_step": Fed(DISABLED, "next_step"),
    "final_obs of the reset": Fed(SAME, "same_step", "after"),
    "final_obs of the reset by hand": Fed(DISABLED, "same_step", "after"),
}
RIGHT = {
    "next step": Fed(NEXT, "next_step"),
    "same step": Fed(SAME, "same_step", "final"),
    "same step, final_obs not taken": Fed(SAME, "same_step_no_final_obs"),
    "reset by hand": Fed(DISABLED, "same_step", "final"),
    "reset by hand, final_obs not taken": Fed(DISABLED, "same_step_no_final_obs"),
    "next step without its resets": Fed(NEXT, "same_step", "final", is_masked=True),
    "next step without its resets, nor final_obs": Fed(NEXT, "same_step_no_final_obs", None, True),
}
LIMITS = (12, *[None, 5] * ALL)
SEEDS = range(100 if SOAK else 2 if ALL else 1)


def doubt(fed, seed, limit, **options):
    """Return the warning that `inspect` gives for these steps, or None. All have a mask, so that a
    form is one program."""
    steps, mask = fed.steps(seed, limit)
    mask = np.ones((NUM_STEPS, NUM_ENVS), bool) if mask is None else mask
    return wrong_autoreset(resets_of(state_of(fed.buffer(allow_mask=True, **options), steps, mask)))


def state_of(buffer, steps, mask=None):
    return begun(jr.jit(buffer), steps, mask)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_seen_in_the_rows(name, limit):
    expected = "final_obs" if "final_obs of" in name else f'autoreset="{WRONG[name].autoreset}"'
    for seed in SEEDS:
        assert str(doubt(WRONG[name], seed, limit)).startswith(f"{expected} looks wrong")


@pytest.mark.parametrize("limit", [*LIMITS, 1])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_is_never_doubted(name, limit):
    for seed in SEEDS:
        assert doubt(RIGHT[name], seed, limit) is None


SOME = ["next step as same_step", "same step"]  # wrong and right
SOME += ["same step as next_step", "next step"] * ALL


@pytest.mark.parametrize("name", SOME)
def test_rows_with_further_flags_are_read_alike(name):
    """With a period, the first row of an episode is a candidate and the others are marked."""
    fed = (RIGHT | WRONG)[name]
    found = doubt(fed, 0, 12, make=jr.sequences, length=4, period=3)
    assert (found is not None) == (name in WRONG)


@pytest.mark.parametrize("name", [*WRONG, *RIGHT] if ALL else SOME)
def test_a_replay_warns_once(name):
    fed = (RIGHT | WRONG)[name]
    given = fed.steps(0, 12)
    replay = jr.Replay(fed.buffer())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(NUM_STEPS):
            step, mask = nth(given, t)
            replay.add(step, mask=mask)
    assert ["looks wrong" in str(one.message) for one in caught] == [True] * (name in WRONG)
    assert all(one.filename == __file__ for one in caught)


def test_a_checkpoint_is_looked_at_alike(tmp_path):
    checkpoint = pytest.importorskip("jaxreplay.checkpoint")
    for name in SOME:
        fed = (RIGHT | WRONG)[name]
        steps, mask = fed.steps(0, 12)
        replay = jr.Replay(fed.buffer(), seed=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replay.add(steps, mask=mask)
        replay.save(tmp_path / name)
        doubted = [
            [line for line in found.suspicious if "looks wrong" in line]
            for found in (replay.inspect(), checkpoint.inspect(tmp_path / name))
        ]
        assert doubted[0] == doubted[1]
        assert len(doubted[0]) == (name in WRONG)


@pytest.mark.parametrize("mode", [NEXT, SAME, *[DISABLED] * ALL])
@pytest.mark.parametrize("next_obs", ["final", "after"])
def test_the_buffers_of_stable_baselines3_warn_once(mode, next_obs):
    sb3 = pytest.importorskip("jaxreplay.sb3")
    spaces = gymnasium.spaces
    buffer = sb3.ReplayBuffer(
        2000, spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(2), n_envs=NUM_ENVS
    )
    rows = cart_pole(mode, 0, 12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(NUM_STEPS):
            now = nth(rows, t)
            buffer.add(
                now["obs"],
                now[next_obs],
                now["action"],
                now["reward"],
                now["terminated"] | now["truncated"],
                [{"TimeLimit.truncated": bool(flag)} for flag in now["truncated"]],
            )
    is_right = next_obs == "final" and mode != Mode.NEXT_STEP
    assert ["looks wrong" in str(one.message) for one in caught] == [True] * (not is_right)


def test_observations_without_leaves_are_no_evidence():
    number, flag = np.zeros((500, 1), np.float32), np.arange(500)[:, None] % 5 == 0
    steps = plain_step(number, obs={}, terminated=flag)
    buffer = jr.uniform(capacity=600, batch_size=4, autoreset="next_step")
    assert wrong_autoreset(resets_of(state_of(buffer, steps))) is None


def test_resets_are_looked_for_in_the_newest_rows(monkeypatch):
    """Inspecting a large restored buffer takes no longer than inspecting a small one."""
    monkeypatch.setattr("jaxreplay.inspection.contents._MOST_ROWS", 200)
    fed = RIGHT["next step"]
    steps, _ = fed.steps(0, 12)
    every = np.ones((NUM_STEPS, NUM_ENVS), bool)
    found = resets_of(state_of(fed.buffer(allow_mask=True), steps, every))
    assert 8 <= len(found.flags) <= 200 / 5
    newest = steps["obs"][-50:, 0]  # of the first env
    assert np.isin(found.obs[0][:3], newest).all()
