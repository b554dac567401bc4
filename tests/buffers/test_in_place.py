"""No operation costs O(capacity): alone, in a scan, under vmap, and in the fused training loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.samplers import ConsumingSampler, PrioritySampler
from tests.conftest import ALL
from tests.support.buffers import CATALOG, FEW, each
from tests.support.hlo import check_in_place, compiled, large_temporaries
from tests.support.steps import nth

CAPACITY = 1 << 17

STEPS = 5
POPULATION = 16

_OTHERS = ("transitions recent", "transitions blend", "transitions online queue")
OTHERS = [case for case in CATALOG if case.name in _OTHERS and ALL]
kinds = each([*FEW, *OTHERS])


def operations(case, buffer, state):
    """Return functions by name: `function(state, key)` returns (state, anything). "reads" alone
    leaves the state as it is."""
    step = case.step(), *case.mask(buffer, 0)
    block = case.step(3, time=STEPS), *case.mask(buffer, 3, STEPS)
    found = {
        "add": lambda state, key: (buffer.add(state, *step), None),
        "extend": lambda state, key: (buffer.extend(state, *block), None),
        "reads": lambda state, key: (state, reads(buffer, state, key)),
        "fused": functools.partial(fused, buffer, step),
    }
    if not buffer.layout().lockstep:
        some, envs = nth(case.step(), [2, 0]), np.int32([2, 0])
        found["add to some"] = lambda state, key: (buffer.add(state, some, envs=envs), None)
    if buffer.allow_write:

        def write(state, key):
            batch = buffer.sample(state, key)
            reward = jax.random.normal(key, (8,)) + batch.experience.reward
            state = buffer.write(state, batch.index, {"reward": reward})
            return state, batch

        found["write"] = write
    if isinstance(buffer.sampler, ConsumingSampler):
        found["pop"] = buffer.pop
    if buffer.autoreset:
        found["end"] = lambda state, key: (buffer.end_streams(state), None)
    if isinstance(buffer.sampler, PrioritySampler):
        index = jr.types.Index(row=np.zeros(8, np.int32), lap=np.zeros(8, np.uint32))

        def update(state, key, factor=1):
            new = factor * jax.random.uniform(key, (8,))
            return buffer.update_priorities(state, index, new), None

        def twice(state, key):
            state = buffer.add(buffer.add(state, *step), *step)
            return update(update(state, key)[0], key, 2)

        found |= {"update": update, "add twice, update twice": twice}
    return found


def reads(buffer, state, key):
    """Return the results of all methods that leave the state unchanged."""
    rows = jnp.arange(8) + jax.random.randint(key, (8,), 0, 9)
    got = [buffer.get(state, rows, key), buffer.metrics(state), buffer.can_sample(state)]
    got.append(
        buffer.can_add(state)
        if isinstance(buffer.sampler, ConsumingSampler)
        else buffer.sample(state, key)
    )
    if buffer.track_episodes:
        table, row = buffer.episode_table(state), jnp.arange(8)
        got += [table.steps_to_end(row), table.steps_from_start(row)]
        got += [table.kth_end(row, 2), table.is_complete(row)]
    return got


def fused(buffer, step, state, key):
    """Add, sample or pop, and update priorities; the entire batch is used."""
    state = buffer.add(state, *step)
    if isinstance(buffer.sampler, ConsumingSampler):
        state, batch = buffer.pop(state, key)
        return state, (batch, buffer.size(state))
    batch = buffer.sample(state, key)
    if isinstance(buffer.sampler, PrioritySampler):
        state = buffer.update_priorities(state, batch.index, jax.random.uniform(key, (8,)))
    return state, (batch, buffer.size(state))


@kinds
def test_operations_are_in_place_alone(case):
    buffer, state = case.shapes(CAPACITY)
    for name, function in operations(case, buffer, state).items():
        changes = name != "reads"
        run = function if changes else functools.partial(reads, buffer)
        _check(name, run, (state, jax.random.key(0)), 0 if changes else None)


@kinds
def test_operations_are_in_place_in_a_scan(case):
    buffer, state = case.shapes(CAPACITY)
    keys = jax.random.split(jax.random.key(0), 3)
    for name, function in operations(case, buffer, state).items():
        _check(name, functools.partial(jax.lax.scan, function), (state, keys), 0)


@kinds
def test_operations_are_in_place_for_a_population(case):
    buffer, one = case.shapes(CAPACITY // POPULATION)
    many = lambda leaf: jax.ShapeDtypeStruct((POPULATION, *leaf.shape), leaf.dtype)
    given = jax.tree.map(many, one), jax.random.split(jax.random.key(0), POPULATION)
    _check("reads", jax.vmap(functools.partial(reads, buffer)), given, None)
    for name, function in operations(case, buffer, one).items():
        if name == "reads":
            continue
        # scanned as well: under vmap, a cond would become a select over the buffers
        run = lambda states, keys, function=function: jax.lax.scan(
            lambda s, _: (jax.vmap(function)(s, keys)[0], None), states, None, 3
        )
        if "update" in name and jax.__version_info__[:2] == (0, 6):
            with pytest.raises(AssertionError, match="u8"):  # copies the flags, a byte a row
                _check(name, run, given, 0)
        else:
            _check(name, run, given, 0)


@kinds
def test_clear_never_touches_the_stored_steps(case):
    buffer, state = case.shapes(CAPACITY)
    text = compiled(buffer.clear, state, donated=0).as_text()
    largest = max(leaf.size for leaf in jax.tree.leaves(state.rows.steps))
    assert largest >= 2 * CAPACITY
    assert not large_temporaries(text, largest)


def test_the_judge_sees_a_copy():
    """Returning the steps from before an add makes a copy that the check must find."""
    case = CATALOG[2]
    buffer, state = case.shapes(CAPACITY)

    def both(state):
        return buffer.add(state, case.step()), state.rows.steps

    with pytest.raises(AssertionError, match="as large as the storage"):
        check_in_place(both, (state,), num_elements=CAPACITY, donated=0)


def _check(name, function, arguments, donated):
    try:
        # a leaf with one number a row is too large
        check_in_place(function, arguments, num_elements=CAPACITY, donated=donated)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None
