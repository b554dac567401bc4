"""`examples/one_file.py` agrees with the package row by row and writes in place, and a property of
`benchmarks/conformance` finds each of some faults in it."""

import functools
import importlib.util
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import thorough
from tests.support import hlo
from tests.support.conformance import FOLDER, PROPERTIES, adapters_of

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / "examples" / "one_file.py"
LENGTH, TURNS, LAG, UPDATED = 9, 60, 5, 4
KEY = jax.eval_shape(jax.random.key, 0)
PRIORITIES = [0.0, 0.5, 1.0, 3.0, 7.0, 20.0, np.nan, np.inf, -1.0]


def loaded(path, source=None):
    """Return the module of a file, or of a changed text of it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    exec(compile(source or path.read_text(), str(path), "exec"), module.__dict__)
    return module


one_file = loaded(SOURCE)
(ADAPTER,) = adapters_of(FOLDER / "adapters" / "one_file.py").values()


def history(seed, num_envs):
    """Return random turns of a loop, leaves [TURNS, E, ...]. Each observation has its own number,
    so that none passes for another. With seed 0 all envs take every step."""
    random = np.random.default_rng(seed)
    shape = (TURNS, num_envs)
    number = np.arange(2 * TURNS * num_envs, dtype=np.float32).reshape(2, *shape)
    obs, final_obs = ({"x": n[..., None], "n": n.astype(np.uint16)} for n in number)
    return {
        "obs": obs,
        "action": random.integers(0, 5, shape).astype(np.int32),
        "reward": random.normal(size=shape).astype(np.float32),
        "terminated": random.random(shape) < 0.15,
        "truncated": random.random(shape) < 0.15,
        "final_obs": final_obs,
        "mask": random.random(shape) < (0.7 if seed else 1.1),
        # an update of priorities after each turn, of rows as they are and as they were before
        "row": random.integers(0, LENGTH * num_envs, (TURNS, UPDATED)).astype(np.int32),
        "priority": random.choice(PRIORITIES, (TURNS, 2 * UPDATED)).astype(np.float32),
    }


def step_of(turn, autoreset):
    names = ["obs", "action", "reward", "terminated", "truncated"]
    return {name: turn[name] for name in names + ["final_obs"] * (autoreset == "same_step")}


@functools.partial(jax.jit, static_argnums=(0, 1))
@functools.partial(jax.vmap, in_axes=(None, None, 0))
def both(config, buffer, turns):
    """Return what the file and the package say of every row after each turn of a history."""
    every = jnp.arange(config.capacity)

    def turn_of(carry, turn):
        mine, its, late = carry
        mine = one_file.add(mine, **step_of(turn, config.autoreset), mask=turn["mask"])
        its = buffer.add(its, jr.Step(**step_of(turn, config.autoreset)), turn["mask"])
        now = index_of(mine, turn["row"]), buffer.get(its, turn["row"]).index
        if config.prioritized:  # the newest indices, and those of LAG turns ago
            some = jax.tree.map(lambda new, old: jnp.append(new, old[0]), now, late)
            mine = one_file.update_priorities(mine, some[0], turn["priority"])
            its = buffer.update_priorities(its, some[1], turn["priority"])
        late = jax.tree.map(lambda old, new: jnp.append(old[1:], new[None], axis=0), late, now)
        sampled = one_file.sample(mine, jax.random.key(0), 32)
        got = {
            **one_file.get(mine, every)._asdict(),
            "is_valid": one_file.is_sampleable(mine, every),
            "size": one_file.size(mine),
            "probability": probabilities(mine),
        }
        item = buffer.get(its, every)
        expected = {name: getattr(item.experience, name) for name in one_file.Transition._fields}
        expected |= {"is_valid": item.is_valid, "size": buffer.size(its)}
        return (mine, its, late), (got, expected | {"probability": item.probability}, sampled)

    turn = jax.tree.map(lambda leaf: leaf[0], turns)
    first = jax.tree.map(lambda leaf: leaf[0], step_of(turn, config.autoreset))
    mine, its = empty(config, turn), buffer.init(jr.Step(**first))
    now = index_of(mine, turns["row"][0]), buffer.get(its, turns["row"][0]).index
    late = jax.tree.map(lambda leaf: jnp.stack([leaf] * LAG), now)
    return jax.lax.scan(turn_of, (mine, its, late), turns)[1]


def empty(config, turn):
    """Return an empty state for the steps of a turn."""
    return one_file.init(config, *jax.tree.map(lambda x: x[0], (turn["obs"], turn["action"])))


def index_of(state, row):
    """Return the index that a sample of these rows would have."""
    is_valid = one_file.is_sampleable(state, row)
    return one_file.Index(
        jnp.where(is_valid, row, state.config.capacity), one_file._lap_of(state, row)
    )


def probabilities(state):
    """Return the probability of every row, by enumeration."""
    if state.config.prioritized:
        mass = state.tree[0].reshape(-1)[: state.config.capacity]
    else:
        row = jnp.arange(state.config.capacity)
        mass = one_file.is_sampleable(state, row).astype(jnp.float32)
    return mass / jnp.maximum(mass.sum(), 1e-9)


CASES = [*itertools.product(one_file.AUTORESETS, (1, 3), (1, 3), (False, True))]


def is_quick(autoreset, n_step, num_envs, prioritized):
    return n_step == num_envs == 3 and prioritized and autoreset == "same_step"


@pytest.mark.parametrize(
    ("autoreset", "n_step", "num_envs", "prioritized"),
    [case if is_quick(*case) else thorough(*case) for case in CASES],
)
def test_every_row_is_that_of_the_package(autoreset, n_step, num_envs, prioritized):
    shared = {"capacity": LENGTH * num_envs, "num_envs": num_envs, "autoreset": autoreset}
    shared |= {"n_step": n_step, "gamma": 0.5}
    config = one_file.Config(**shared, prioritized=prioritized, alpha=0.7)
    make = functools.partial(jr.prioritized, alpha=0.7) if prioritized else jr.uniform
    buffer = make(**shared, batch_size=1, allow_mask=True)
    turns = jax.tree.map(lambda *leaf: np.stack(leaf), *[history(s, num_envs) for s in range(4)])
    got, expected, sampled = jax.device_get(both(config, buffer, turns))
    is_valid = expected["is_valid"]  # bool[seeds, TURNS, capacity]
    assert 0.2 < is_valid[:, LENGTH * 2 :].mean() < 0.95
    for name in ("is_valid", "size"):
        np.testing.assert_array_equal(got[name], expected[name], name)
    np.testing.assert_allclose(got["probability"], expected["probability"], rtol=1e-4)
    for name in one_file.Transition._fields:
        for mine, its in zip(*map(jax.tree.leaves, (got[name], expected[name])), strict=True):
            assert mine.dtype == its.dtype
            np.testing.assert_allclose(mine[is_valid], its[is_valid], rtol=1e-5, err_msg=name)

    # Samples are rows that have a probability, and invalid while there is none.
    law = expected["probability"]
    has_some = law.sum(axis=2) > 0
    assert has_some.any()
    assert not has_some.all()
    np.testing.assert_array_equal(
        sampled.is_valid, np.broadcast_to(has_some[..., None], sampled.is_valid.shape)
    )
    assert (sampled.weight[~has_some] == 0).all()
    assert np.isfinite(sampled.weight).all()
    row = np.minimum(sampled.index.row, config.capacity - 1)
    of_row = np.take_along_axis(law, row, axis=2)
    assert (of_row[has_some] > 0).all()
    np.testing.assert_allclose(sampled.probability[has_some], of_row[has_some], rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_a_training_loop_is_in_place(prioritized, num_envs):
    """Temporary memory does not depend on the capacity, not even for one byte a row."""
    config = one_file.Config(
        capacity=2**20, num_envs=num_envs, autoreset="same_step", n_step=3, prioritized=prioritized
    )
    turn = jax.tree.map(lambda leaf: leaf[0], history(1, num_envs))
    state = jax.eval_shape(lambda: empty(config, turn))

    def train(state, keys):
        def step(state, key):
            done = jax.random.bernoulli(key, shape=(num_envs,))
            ends = dict.fromkeys(["terminated", "truncated"], done)
            state = one_file.add(state, **step_of(turn | ends, "same_step"), mask=turn["mask"])
            batch = one_file.sample(state, key, 32)
            if prioritized:
                td_error = batch.transition.reward
                state = one_file.update_priorities(state, batch.index, jnp.abs(td_error))
            return state, batch.weight.sum()

        return jax.lax.scan(step, state, keys)

    program = hlo.compiled(train, state, jax.random.split(jax.random.key(0), 8), donated=0)
    assert program.memory_analysis().temp_size_in_bytes < 2**16


def test_dtypes_stay_with_64_bits():
    """Shapes and dtypes of the new state are those of the old one: it can be carried by a scan."""
    with jax.enable_x64(True):
        for autoreset, prioritized in itertools.product(one_file.AUTORESETS, (False, True)):
            config = one_file.Config(
                capacity=18, num_envs=2, autoreset=autoreset, prioritized=prioritized
            )
            turn = dict.fromkeys(["obs", "final_obs"], np.zeros((2, 3)))
            turn |= {"action": np.zeros(2, np.int64), "reward": np.zeros(2)}
            turn |= dict.fromkeys(["terminated", "truncated"], np.zeros(2, bool))
            state = jax.eval_shape(functools.partial(empty, config, turn))
            assert state.obs.dtype == np.float64
            after = jax.eval_shape(one_file.add, state, **step_of(turn, autoreset))
            batch = jax.eval_shape(functools.partial(one_file.sample, batch_size=4), after, KEY)
            assert batch.transition.action.dtype == np.int64
            assert batch.weight.dtype == batch.transition.reward.dtype == np.float32
            if prioritized:
                after = jax.eval_shape(one_file.update_priorities, after, batch.index, batch.weight)
            assert after == state


@pytest.mark.parametrize(
    "wrong", [{"autoreset": "same"}, {"n_step": 4}, {"n_step": 0}, {"num_envs": 3}]
)
def test_a_wrong_config_is_refused(wrong):
    with pytest.raises(ValueError, match=r"autoreset must|capacity must"):
        one_file.Config(**{"capacity": 8, "num_envs": 2, "autoreset": "same_step"} | wrong)


# A fault, the text that becomes another one, and the property that finds it.
FAULTS = {
    "the head is off by one": (
        "jnp.where(state.lap > 0, state.head, 0)",
        "jnp.where(state.lap > 0, state.head - 1, 0)",
        "keeps_the_newest_steps",
    ),
    "candidates are off by one": (
        "next_number].set(state.head)",
        "next_number].set((state.head + 1) % length)",
        "keeps_the_newest_steps",
    ),
    "windows cross the ends of episodes": (
        " & (kind[1:] != FINAL)",
        "",
        "n_step_windows_stop_at_ends",
    ),
    "the final observation is dropped": (
        "_append(state, final_obs, action",
        "_append(state, obs, action",
        "true_final_observation_with_same_step",
    ),
    "the step that resets is a step": (
        "jnp.where(is_final, FINAL, kind)",
        "jnp.where(is_final, STEP, kind)",
        "true_final_observation_with_next_step",
    ),
    "a lost final observation is the next one": (
        "jnp.where(truncated & ~terminated, FINAL, kind)",
        "jnp.where(truncated & ~terminated, STEP, kind)",
        "no_false_target_without_final_observation",
    ),
    "a termination bootstraps": (
        "jnp.where(terminates, 0, jnp.asarray(powers)[num_steps])",
        "jnp.asarray(powers)[num_steps]",
        "terminations_do_not_bootstrap",
    ),
    "the discount is always of n steps": (
        "jnp.asarray(powers)[num_steps]",
        "jnp.asarray(powers)[n_step]",
        "n_step_windows_stop_at_ends",
    ),
    "rewards are not discounted": (
        " * powers[:-1, None]",
        "",
        "n_step_windows_stop_at_ends",
    ),
    "the mask is ignored": (
        "jnp.ones(num_envs, bool) if mask is None else jnp.asarray(mask, bool)",
        "jnp.ones(num_envs, bool)",
        "masked_turns_are_no_steps",
    ),
    "incomplete windows are sampled": (
        " % (length + 1) - state.pending",
        " % (length + 1)",
        "n_step_windows_stop_at_the_newest_step",
    ),
    "final rows are sampled": (
        "(where & (kind != FINAL))",
        "where",
        "true_final_observation_with_same_step",
    ),
    "the lap is ignored": (
        " & (_lap_of(state, row) == index.lap)",
        "",
        "late_updates_change_no_other_step",
    ),
    "a NaN is accepted": (
        "is_live & jnp.isfinite(priority) & (priority >= 0)",
        "is_live",
        "bad_priorities_do_no_lasting_harm",
    ),
    "a new row has priority 1": (
        "_mass(config, state.max_priority)",
        "_mass(config, jnp.float32(1))",
        "new_steps_get_the_largest_priority",
    ),
    "alpha is ignored": (
        "priority**config.alpha",
        "priority",
        "priorities_are_proportional",
    ),
    "weights have no beta": (
        "(smallest / probability) ** beta",
        "smallest / probability",
        "importance_weights",
    ),
}


@pytest.mark.parametrize("fault", [thorough(fault) for fault in FAULTS])
def test_a_property_finds_each_fault(fault):
    old, new, name = FAULTS[fault]
    source = SOURCE.read_text()
    assert source.count(old) == 1
    PROPERTIES[name](ADAPTER)
    faulty = type("Faulty", (ADAPTER,), {"code": loaded(SOURCE, source.replace(old, new))})
    with pytest.raises(AssertionError):
        PROPERTIES[name](faulty)
