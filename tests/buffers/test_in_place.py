"""No call costs O(capacity): a table of buffers and their calls, in a scan for a population."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import ALL, thorough
from tests.support.buffers import CATALOG, FEW, each
from tests.support.hlo import check_in_place, compiled, large_temporaries
from tests.support.refusals import refused
from tests.support.steps import nth

CAPACITY, POPULATION, STEPS = 1 << 17, 16, 5

_OTHERS = ("transitions recent", "transitions blend", "transitions online queue")
OTHERS = [case for case in CATALOG if case.name in _OTHERS and ALL]


def of_case(case, capacity):
    """Return the shapes of a state, and functions by name: `function(state, key)` returns (state,
    anything). Together they are all methods but those that cost O(capacity)."""
    buffer, shapes = case.shapes(capacity)
    step, some = (case.step(), *case.mask(buffer, 0)), nth(case.step(), [2, 0])
    block, envs = (case.step(3, time=STEPS), *case.mask(buffer, 3, STEPS)), np.int32([2, 0])
    index = jr.types.Index(row=np.zeros(8, np.int32), lap=np.zeros(8, np.uint32))
    consumes = buffer.sampler.consumes
    has_priorities = buffer.sampler.has_priorities
    is_lockstep = buffer.layout().lockstep

    def fused(state, key):
        state = buffer.add(state, *step)
        if consumes:
            state, batch = buffer.pop(state, key)
        else:
            batch = buffer.sample(state, key)
        if has_priorities:
            state = buffer.update_priorities(state, batch.index, jax.random.uniform(key, (8,)))
        rows = jnp.arange(8) + jax.random.randint(key, (8,), 0, 9)
        got = [batch, buffer.get(state, rows, key), buffer.metrics(state), buffer.size(state)]
        got += [buffer.can_sample(state)] + ([buffer.can_add(state)] if consumes else [])
        if buffer.track_episodes:
            table, row = buffer.episode_table(state), jnp.arange(8)
            got += [table.steps_to_end(row), table.steps_from_start(row)]
            got += [table.kth_end(row, 2), table.is_complete(row)]
        return state, (got, buffer.age(state, batch.index))

    def adds(state, key):
        state = buffer.extend(state, *block)
        state = buffer.end_streams(state) if buffer.autoreset else state
        return (state if is_lockstep else buffer.add(state, some, envs=envs)), None

    def update_twice(state, key):
        state = buffer.add(buffer.add(state, *step), *step)
        for priority in (jax.random.uniform(key, (8,)), jax.random.normal(key, (8,))):
            state = buffer.update_priorities(state, index, priority)
        return state, None

    def write(state, key):
        state = buffer.write(state, index, {"reward": jax.random.normal(key, (8,))})
        change = lambda step, after: {"reward": step.reward + after["vector"][0]}
        return buffer.map_rows(state, change, block=256), None

    found = {"add, sample, read": fused, "extend, end, add to some": adds}
    found |= {"write": write} if buffer.allow_write else {}
    found |= {"update twice": update_twice} if has_priorities else {}
    return shapes, found


def of_rollout(form, capacity):
    rollout = jr.rollout(length=capacity // 4, num_envs=4, autoreset=form)
    case = next(case for case in CATALOG if case.replay().autoreset == form)
    add = lambda state, key: rollout.add(state, case.step())
    extend = lambda state, key: (rollout.extend(add(state, key), case.step(3, STEPS)), None)
    return jax.eval_shape(rollout.init, case.example()), {"add, extend": extend}


def of_groups(capacity):
    groups = jr.Groups(group_size=16, capacity=capacity // 16, batch_size=2, strategy="variance")
    items = {"reward": np.zeros(16, np.float32), "tokens": np.zeros((16, 4), np.int32)}
    group = np.arange(16, dtype=np.int32)

    def calls(state, key):
        state = groups.add(state, items, group, 0)
        state = groups.close(state, group, min_items=2)
        return groups.pop(state, key, version=1, max_staleness=2)

    return jax.eval_shape(lambda: groups.init(nth(items, 0))), {"add, close, pop": calls}


TABLE = {case.name: functools.partial(of_case, case) for case in (*FEW, *OTHERS)}
TABLE |= {
    f"rollout {form}": functools.partial(of_rollout, form) for form in ("same_step", "next_step")
}
TABLE["groups"] = of_groups


def check(form, row):
    """Check the calls of a row of the table: "alone", in a "scan", or for a "population" in one."""
    members = POPULATION if form == "population" else 1
    state, calls = row(CAPACITY // members)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), members))
    if form == "population":
        many = lambda leaf: jax.ShapeDtypeStruct((members, *leaf.shape), leaf.dtype)
        state = jax.tree.map(many, state)
    for name, call in calls.items():
        each = jax.vmap(call) if form == "population" else lambda s, k, call=call: call(s, k[0])
        scanned = lambda s, k, each=each: jax.lax.scan(lambda s, _: each(s, k), s, None, 3)
        run = functools.partial(
            check_in_place,
            each if form == "alone" else scanned,
            (state, keys),
            num_elements=CAPACITY,  # a leaf with one number a row is too large
            donated=0,
        )
        if form == "population" and "update" in name and jax.__version_info__[:2] == (0, 6):
            with refused("u8", AssertionError):  # copies the flags, a byte a row
                run()
            continue
        try:
            run()
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


# A population in a scan has the most ways to copy: selects over buffers, and what a loop carries.
FORMS = "population", thorough("alone"), thorough("scan")


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_in_place(form, name):
    check(form, TABLE[name])


@each([*FEW, *OTHERS] if ALL else FEW[:1])
def test_clear_and_drop_never_touch_the_stored_steps(case):
    buffer, state = case.shapes(CAPACITY)

    def both(state, mask):
        return buffer.clear(buffer.drop(state, mask) if buffer.autoreset else state)

    text = compiled(both, state, np.ones(4, bool), donated=0).as_text()
    largest = max(leaf.size for leaf in jax.tree.leaves(state.rows.steps))
    assert largest >= 2 * CAPACITY
    assert not large_temporaries(text, largest)


@each(FEW[1:])
def test_adopt_takes_little_memory_for_each_row(case):
    """Beside arguments and results."""
    old, state = case.shapes(CAPACITY)
    new = dataclasses.replace(old, allow_mask=True, track_episodes=not case.is_items)
    memory = compiled(new.adopt, state).memory_analysis()
    assert memory.temp_size_in_bytes < 64 * CAPACITY


def test_the_judge_sees_a_copy():
    """Returning the steps from before an add makes a copy that the check must find."""
    case = CATALOG[2]
    buffer, state = case.shapes(CAPACITY)

    def both(state):
        return buffer.add(state, case.step()), state.rows.steps

    with refused("as large as the storage", AssertionError):
        check_in_place(both, (state,), num_elements=CAPACITY, donated=0)
