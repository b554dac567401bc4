"""No operation costs O(capacity): alone, in a scan, under vmap, and in the fused training loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreplay.samplers import ConsumingSampler, PrioritySampler
from tests.conftest import ALL
from tests.support.buffers import CATALOG, FEW
from tests.support.hlo import check_in_place, compiled, large_temporaries

CAPACITY = 1 << 17
SMALL = CAPACITY  # elements of a leaf with one number a row
STEPS = 5
POPULATION = 16

RECENT = [case for case in CATALOG if case.name == "transitions recent" and ALL]
kinds = pytest.mark.parametrize("case", [*FEW, *RECENT], ids=lambda case: case.name)


def operations(case, buffer, state):
    """Return name -> (function, changes).

    `function(state, key)` returns (state, anything); `changes` is True if it changes the state.
    """
    step, mask = case.step(), case.mask(buffer, 0)
    block = (case.step(3, time=STEPS), *case.mask(buffer, 3, STEPS))
    found = {
        "add": (lambda state, key: (buffer.add(state, step, *mask), None), True),
        "extend": (lambda state, key: (buffer.extend(state, *block), None), True),
        "reads": (lambda state, key: (state, reads(buffer, state, key)), False),
        "fused": (functools.partial(fused, buffer, step, mask), True),
    }
    if isinstance(buffer.sampler, ConsumingSampler):
        found["pop"] = (buffer.pop, True)
    # with a table, rows of one env alone must be removable
    if buffer.autoreset and not (
        buffer.has_table and (state.layout.lockstep or buffer.window.crosses_episodes)
    ):
        found["end"] = (lambda state, key: (buffer.end_streams(state), None), True)
    if isinstance(buffer.sampler, PrioritySampler):
        index = jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(buffer.sample, state, jax.random.key(0)).index,
        )
        new = lambda key: jax.random.uniform(key, (8,))
        twice = lambda state, key: buffer.update_priorities(
            buffer.update_priorities(state, index, new(key)), index, 2 * new(key)
        )
        found["update"] = (
            lambda state, key: (buffer.update_priorities(state, index, new(key)), None),
            True,
        )
        found["add twice, update twice"] = (
            lambda state, key: (
                twice(buffer.add(buffer.add(state, step, *mask), step, *mask), key),
                None,
            ),
            True,
        )
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
        got.append(look_up(buffer.episode_table(state)))
    return got


def fused(buffer, step, mask, state, key):
    """Add, sample or pop, and update priorities; the entire batch is used."""
    state = buffer.add(state, step, *mask)
    if isinstance(buffer.sampler, ConsumingSampler):
        state, batch = buffer.pop(state, key)
        return state, (batch, buffer.size(state))
    batch = buffer.sample(state, key)
    if isinstance(buffer.sampler, PrioritySampler):
        state = buffer.update_priorities(state, batch.index, jax.random.uniform(key, (8,)))
    return state, (batch, buffer.size(state))


def look_up(episodes):
    row = jnp.arange(8)
    return (
        episodes.steps_to_end(row),
        episodes.steps_from_start(row),
        episodes.kth_end(row, 2),
        episodes.is_complete(row),
    )


@kinds
def test_operations_are_in_place_alone(case):
    buffer = case.replay(CAPACITY)
    state = jax.eval_shape(buffer.init, case.example())
    for name, (function, changes) in operations(case, buffer, state).items():
        run = function if changes else lambda state, key, function=function: function(state, key)[1]
        donated = 0 if changes else None
        _check(name, run, (state, jax.random.key(0)), donated)


@kinds
def test_operations_are_in_place_in_a_scan(case):
    buffer = case.replay(CAPACITY)
    state = jax.eval_shape(buffer.init, case.example())
    keys = jax.random.split(jax.random.key(0), 3)
    for name, (function, _) in operations(case, buffer, state).items():
        _check(
            name,
            lambda state, keys, function=function: jax.lax.scan(function, state, keys),
            (state, keys),
            0,
        )


@kinds
def test_operations_are_in_place_for_a_population(case):
    buffer = case.replay(CAPACITY // POPULATION)
    one = jax.eval_shape(buffer.init, case.example())
    states = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((POPULATION, *leaf.shape), leaf.dtype), one
    )
    keys = jax.random.split(jax.random.key(0), POPULATION)
    for name, (function, changes) in operations(case, buffer, one).items():
        if changes:  # scanned as well: under vmap, a cond would become a select over the buffers
            run = lambda states, keys, function=function: jax.lax.scan(
                lambda s, _: (jax.vmap(function)(s, keys)[0], None), states, None, 3
            )
            if "update" in name and jax.__version_info__[:2] == (0, 6):
                with pytest.raises(AssertionError, match="u8"):  # copies the flags, a byte a row
                    _check(name, run, (states, keys), 0)
            else:
                _check(name, run, (states, keys), 0)
        else:
            _check(
                name,
                jax.vmap(lambda state, key, function=function: function(state, key)[1]),
                (states, keys),
                None,
            )


@kinds
def test_clear_never_touches_the_stored_steps(case):
    buffer = case.replay(CAPACITY)
    state = jax.eval_shape(buffer.init, case.example())
    text = compiled(buffer.clear, state, donated=0).as_text()
    largest = max(leaf.size for leaf in jax.tree.leaves(state.streams.steps))
    assert largest >= 2 * CAPACITY
    assert not large_temporaries(text, largest)


def test_the_judge_sees_a_copy():
    """Returning the steps from before an add makes a copy that the check must find."""
    case = CATALOG[2]
    buffer = case.replay(CAPACITY)
    state = jax.eval_shape(buffer.init, case.example())

    def both(state):
        return buffer.add(state, case.step()), state.streams.steps

    with pytest.raises(AssertionError, match="as large as the storage"):
        check_in_place(both, (state,), num_elements=SMALL, donated=0)


def _check(name, function, arguments, donated):
    try:
        check_in_place(function, arguments, num_elements=SMALL, donated=donated)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None
