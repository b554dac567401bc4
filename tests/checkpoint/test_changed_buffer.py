"""A run is resumed after its buffer was changed: each change of a public report of a user."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer
from tests.conftest import ALL
from tests.support.buffers import bits, jitted
from tests.support.steps import nth

NUM_ENVS, TIME = 2, 70
KEY = jax.random.key(0)


def steps_of(num_envs=NUM_ENVS):
    time = np.arange(TIME, dtype=np.float32)[:, None] + 100 * np.arange(num_envs, dtype=np.float32)
    done = np.random.default_rng(0).random(time.shape)
    obs = {"at": time[..., None] % 5, "goal": -time[..., None], "time": time}
    return jr.Step(
        obs=obs,
        action=time,
        reward=time,
        terminated=done < 0.08,
        truncated=done > 0.95,
        final_obs=jax.tree.map(lambda leaf: leaf + 0.5, obs),
    )


STEPS = steps_of()
EXAMPLE = nth(STEPS, (0, 0))


def begun(buffer):
    """Return a state after the steps."""
    return jr.jit(buffer).extend(buffer.init(EXAMPLE), STEPS)


def uniform(**changes):
    options = {"capacity": 60, "num_envs": NUM_ENVS, "batch_size": 16, "autoreset": "same_step"}
    return jr.uniform(**options | changes)


def prioritized(**changes):
    return jr.transitions(
        capacity=60,
        num_envs=NUM_ENVS,
        batch_size=16,
        autoreset="same_step",
        sampler=jr.Prioritized(**changes),
    )


def near(achieved, goal, step):
    return -jnp.abs(achieved - goal).sum()


def renamed(achieved, goal, step):
    return -jnp.abs(achieved - goal).sum()


def hindsight(buffer=None, reward_fn=near, **changes):
    keys = {"achieved_key": "at", "desired_key": "goal"}
    return jr.hindsight(uniform() if buffer is None else buffer, reward_fn, **keys | changes)


def halved(item, key):
    return item.replace(reward=item.reward / 2)


CHANGES = {
    "gamma": (uniform(gamma=0.99), uniform(gamma=0.9)),
    "n_step": (uniform(), uniform(n_step=3)),
    "fewer n_step": (uniform(n_step=3), uniform()),
    "allow_mask": (uniform(), uniform(allow_mask=True)),
    "no mask": (uniform(allow_mask=True), uniform()),
    "track_episodes": (uniform(), uniform(track_episodes=True)),
    "min_size": (uniform(), uniform(min_size=9)),
    "capacity": (uniform(), uniform(capacity=40)),
    "autoreset": (uniform(), uniform(autoreset="next_step")),
    "alpha": (prioritized(), prioritized(alpha=0.9)),
    "stratified": (prioritized(), prioritized(stratified=False)),
    "with priorities": (uniform(), prioritized()),
    "without priorities": (prioritized(), uniform()),
    "relabel_fraction": (hindsight(), hindsight(relabel_fraction=0.5)),
    "strategy": (hindsight(), hindsight(strategy="episode")),
    "reward function": (hindsight(), hindsight(reward_fn=renamed)),
    "hindsight": (uniform(), hindsight()),
    "transform": (uniform(), jr.transform(uniform(), halved)),
}


OFTEN = {"gamma", "n_step", "allow_mask", "alpha", "with priorities", "strategy", "transform"}


@pytest.mark.parametrize(
    "change",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name not in OFTEN)) for name in CHANGES],
)
def test_a_changed_buffer_restores_the_rows(change, tmp_path):
    """The result is that of a buffer that was so from the start."""
    old, new = CHANGES[change]
    checkpoint.save(tmp_path, old, begun(old))
    example = EXAMPLE if new.autoreset == "same_step" else EXAMPLE.replace(final_obs=None)
    state = checkpoint.restore(tmp_path, new, example)
    if new.autoreset == old.autoreset:
        wanted = begun(new)
        assert jax.tree.structure(state) == jax.tree.structure(wanted)
        size = int(jitted(new, "size")(wanted))
        assert int(jitted(new, "size")(state)) == size
        batches = [jr.jit(new).sample(one, KEY) for one in (state, wanted)]
        assert bits(batches[0].replace(index=None)) == bits(batches[1].replace(index=None))
    assert jr.jit(new).sample(state, KEY).is_valid.all()


def test_the_run_goes_on_under_its_path(tmp_path):
    """Restored rows are not written again."""
    old, new = uniform(gamma=0.99), uniform(gamma=0.9, n_step=2)
    checkpoint.save(tmp_path, old, begun(old), step=1)
    with Checkpointer(tmp_path, new) as checkpointer:
        state = checkpointer.restore(EXAMPLE)
        groups = [*tmp_path.glob("rows/*")]
        checkpointer.save(jr.jit(new).add(state, nth(STEPS, 0)), step=2)
        assert set(groups) < {*tmp_path.glob("rows/*")}
        assert checkpointer.all_steps() == [1, 2]
    assert int(jitted(old, "size")(checkpoint.restore(tmp_path, old, EXAMPLE))) > 0


@pytest.mark.parametrize("num_envs", [1, *[4] * ALL])
def test_another_number_of_envs(num_envs, tmp_path):
    """A run of two envs goes on with one or four. No transition of either env is lost but the
    newest, which has no next observation any more."""
    old = uniform(capacity=200)
    checkpoint.save(tmp_path, old, begun(old))
    new = uniform(capacity=400, num_envs=num_envs)
    state = checkpoint.restore(tmp_path, new, EXAMPLE)
    ended = jr.jit(old).end_streams(begun(old))
    assert int(jitted(new, "size")(state)) == int(jitted(old, "size")(ended))
    state = jr.jit(new).extend(state, steps_of(num_envs))
    item = jr.jit(new).sample(state, KEY, 512).experience
    pairs = item.obs["time"], item.next_obs["time"]
    assert bool((pairs[1] - pairs[0] <= 1).all())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_envs": 1},
        pytest.param({"num_envs": 3, "track_episodes": False}, marks=pytest.mark.thorough),
        pytest.param({"autoreset": "same_step"}, marks=pytest.mark.thorough),
        {"autoreset": "same_step", "n_step": 2},
    ],
    ids=str,
)
def test_tracked_episodes_come_along(changes, tmp_path):
    """As by an adopt. A final row that env 1 owes does not come with another autoreset."""
    last = np.arange(TIME)[:, None] == TIME - 1
    steps = STEPS.replace(
        terminated=(STEPS.terminated & ~last) | (last & np.array([False, True])),
        truncated=STEPS.truncated & ~last,
        final_obs=None,
    )
    given = {"autoreset": "next_step", "track_episodes": True}
    old, new = uniform(**given), uniform(**given | changes)
    example = nth(steps, (0, 0))
    state = jr.jit(old).extend(old.init(example), steps)
    checkpoint.save(tmp_path, old, state)
    found = checkpoint.restore(tmp_path, new, EXAMPLE if new.autoreset == "same_step" else example)
    adopted = jax.jit(new.adopt)(state)
    assert bits(told(new, found)) == bits(told(new, adopted))
    plain = [one.replace(rows=one.rows.replace(table=None)) for one in (found, adopted)]
    assert bits(plain[0]) == bits(plain[1])


@functools.partial(jax.jit, static_argnums=0)
def told(buffer, state):
    """Return what an episode table tells of each row."""
    if not buffer.has_table:
        return ()
    table, row = buffer.episode_table(state), jnp.arange(buffer.capacity, dtype=jnp.int32)
    return table.steps_to_end(row), table.steps_from_start(row), table.is_complete(row)


def test_tracked_episodes_of_a_smaller_ring_stay_those_of_their_env(tmp_path):
    """22 episodes of env 1 have begun, and its new ring has 20 rows."""
    old, new = (uniform(capacity=capacity, track_episodes=True) for capacity in (60, 40))
    state = begun(old)
    while int(state.counters.ordinal.max()) < 20:
        state = jr.jit(old).extend(state, STEPS)
    checkpoint.save(tmp_path, old, state)
    states = checkpoint.restore(tmp_path, new, EXAMPLE), jax.jit(new.adopt)(state)
    assert int(states[0].counters.ordinal.max()) < 20  # else its entries are those of the next env
    for steps in (nth(STEPS, slice(9)), nth(STEPS, slice(9, 18))):
        states = [jr.jit(new).extend(one, steps) for one in states]
        assert bits(told(new, states[0])) == bits(told(new, states[1]))


@pytest.mark.parametrize("change", ["n_step", *["gamma", "with priorities", "capacity"] * ALL])
def test_a_replay_loads_rows_of_another_buffer(change, tmp_path):
    old, new = CHANGES[change]
    before, after = (jr.Replay(buffer, example=EXAMPLE, seed=1) for buffer in (old, new))
    for time in range(20):
        before.add(nth(STEPS, time))
    before.save(tmp_path)
    after.load(tmp_path)
    assert len(before) > len(after) - 2 > 10
    assert np.isfinite(after.sample(8).experience.reward).all()


def test_what_differs_in_the_steps_is_named(tmp_path):
    checkpoint.save(tmp_path, uniform(), begun(uniform()))
    for buffer, example, text in (
        (uniform(), EXAMPLE.replace(action=np.zeros(2, np.float32)), "steps.action: stored float"),
        (uniform(autoreset="same_step_no_final_obs"), EXAMPLE.replace(final_obs=None), "autoreset"),
    ):
        with pytest.raises(ValueError, match=text):
            checkpoint.restore(tmp_path, buffer, example)
