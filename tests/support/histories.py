"""Random histories of steps, masks, clears and priorities. One program runs a whole history on a
buffer, and an oracle of lists goes through it afterwards.

A configuration is hashable, and has `replay`, `prioritized` (whether priorities are given),
`oracle()`, `step(fields)`, which makes the buffer's step, `observe(state, key)`, which the program
returns after each operation, and `check(oracle, observed, is_asked)`.
"""

import functools
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay.types import Index
from tests.support.steps import nth

LENGTH = 64  # operations of a history; the rest are "nothing"
BLOCK = 3  # steps of an `extend`
RECENT = 8  # samples whose priorities may be updated
PRIORITIES = (0.0, 0.3, 1.0, 2.5, 7.0, float("nan"), float("inf"), -1.0)
_ADDS = ("add", "add to some", "add with priorities", "extend")
KINDS = ("nothing", *_ADDS, "update", "write", "map rows", "drop", "clear")
OF_SAMPLE = ("update", "write")  # of the rows of an earlier sample


@st.composite
def histories(draw, config):
    """Draw a list of operations, each a kind and its arguments; "check" asks for all checks."""
    envs = {"min_size": config.num_envs, "max_size": config.num_envs}
    codes = st.lists(st.integers(0, 15), **envs)
    add = st.tuples(st.just("add"), codes)
    operations = [add, add, add, st.just(("check",))]
    operations += [st.tuples(st.just("extend"), st.lists(codes, min_size=BLOCK, max_size=BLOCK))]
    if config.prioritized:
        priority = st.sampled_from(PRIORITIES)
        given = st.lists(priority, **envs)
        operations[1] = st.tuples(st.just("add with priorities"), codes, given)
        some = st.lists(priority, min_size=1, max_size=5)
        operations += [st.tuples(st.just("update"), st.integers(0, RECENT - 1), some)]
    if not config.replay.layout().lockstep:
        some = (codes, given) if config.prioritized else (codes,)
        operations[2] = st.tuples(st.just("add to some"), *some)
    if config.replay.allow_write:
        some = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=5)
        operations += [st.tuples(st.just("write"), st.integers(0, RECENT - 1), some)]
    most = min(6 * config.length, LENGTH - 1)
    history = draw(st.lists(st.one_of(*operations), min_size=1, max_size=most))
    rare = {"clear": (), "drop": (draw(codes),)} | (
        {"map rows": ()} if config.replay.allow_write else {}
    )
    for kind, arguments in rare.items():
        if draw(st.integers(0, 7 if kind == "clear" else 1)) == 0:
            history.insert(draw(st.integers(0, len(history))), (kind, *arguments))
    return history[:LENGTH]


def long_episodes(config):
    """Return a history of plain steps, several times around short rings, with an end at each ninth.

    Random histories have short episodes, in which few rows look back to an overwritten one.
    """
    return [
        ("drop", [1] * config.num_envs)
        if time % 17 == 16
        else ("check",)
        if time % 5 == 4
        else ("add", [2 * (time % 9 == 8)] * config.num_envs)
        for time in range(LENGTH - 1)
    ]


def go_through(config, history):
    """Run a history on the buffer and on the oracle, and check after each operation."""
    blocks, arrays = _arrays_of(config, history)
    observed = jax.device_get(_program(config)(arrays))
    oracle, drawn = config.oracle(), []
    for at, (kind, *arguments) in enumerate(history):
        for step, mask in blocks[at]:
            given = {"priority": arguments[1]} if len(arguments) > 1 else {}
            oracle.add(**step, mask=mask, **given)
        if kind in OF_SAMPLE and arguments[0] < at:
            change = {"update": oracle.update, "write": oracle.write}[kind]
            change(drawn[at - 1 - arguments[0]], _cycled(config, arguments[1]))
        _change(oracle, kind, arguments)
        is_asked = kind == "check" or at == len(history) - 1
        drawn.append(config.check(oracle, nth(observed, at), is_asked))


def _change(oracle, kind, arguments):
    """Change the oracle by an operation without steps."""
    if kind == "drop":
        oracle.drop(_dropped(arguments[0]))
    if kind == "map rows":
        oracle.map_rows(_opposite)
    if kind == "clear":
        oracle.clear()


def _dropped(codes):
    return [code & 1 == 1 for code in codes]


def _opposite(reward):
    return 1 - reward


def _cycled(config, priorities):
    return list(itertools.islice(itertools.cycle(priorities), config.replay.batch_size))


def step_of(clock, codes):
    """Return a step of every env from four-bit codes of mask, terminated and truncated; all
    observations differ."""
    envs = range(len(codes))
    return {
        "obs": [float(clock * 16 + env) for env in envs],
        "action": [clock * 16 + env for env in envs],
        "reward": [float((clock * 7 + env * 3) % 5 - 2) for env in envs],
        "terminated": [code & 6 == 2 for code in codes],
        "truncated": [code & 6 == 4 or code & 15 == 6 for code in codes],
        "final_obs": [clock * 16 + env + 0.5 for env in envs],
    }


def _arrays_of(config, history):
    """Return the (step, mask) of each operation as lists, and the history as arrays."""
    num_envs, oracle, clock, blocks = config.num_envs, config.oracle(), 0, []
    blank = step_of(0, [0] * num_envs)
    fields = {
        name: np.zeros((LENGTH, BLOCK, num_envs), np.asarray(value).dtype)
        for name, value in blank.items()
    }
    arrays = {
        "kind": np.zeros(LENGTH, np.int32),
        "mask": np.ones((LENGTH, BLOCK, num_envs), bool),
        # of "add to some": one more than there are, so that there is always padding
        "envs": np.full((LENGTH, num_envs + 1), num_envs, np.int32),
        "priority": np.zeros((LENGTH, num_envs), np.float32),
        "which": np.zeros(LENGTH, np.int32),
        "new": np.zeros((LENGTH, config.replay.batch_size), np.float32),
    }
    for at, (kind, *arguments) in enumerate(history):
        codes = {"extend": list}.get(kind, lambda one: [one])(arguments[0]) if arguments else []
        blocks.append([])
        if kind == "drop":
            arrays["mask"][at, 0] = _dropped(arguments[0])
        for place, one in enumerate(codes if kind in _ADDS else []):
            clock += 1
            step, mask = step_of(clock, one), None
            if config.allow_mask or kind == "add to some":
                # With next-step autoreset, the row after a done is never masked.
                mask = [code & 1 == 0 or oracle.owes_final_row(e) for e, code in enumerate(one)]
                arrays["mask"][at, place] = mask
            if kind == "add to some":
                own = np.random.default_rng(clock).permutation(np.flatnonzero(mask))
                arrays["envs"][at, : len(own)] = own
                arrays["envs"][at, -1] = -clock  # padding, too
            oracle.add(**step, mask=mask)
            blocks[at].append((step, mask))
            for name, value in step.items():
                fields[name][at, place] = value
        _change(oracle, kind, arguments)
        if kind in _ADDS and len(arguments) > 1:
            arrays["priority"][at] = arguments[1]
        if kind in OF_SAMPLE and arguments[0] < at:
            arrays["which"][at], arrays["new"][at] = arguments[0], _cycled(config, arguments[1])
        is_known = kind in KINDS and not (kind in OF_SAMPLE and arguments[0] >= at)
        arrays["kind"][at] = KINDS.index(kind) if is_known else 0
    return blocks, arrays | {"steps": config.step(fields)}


@functools.cache
def _program(config):
    buffer = config.replay

    def once(carry, given):
        state, indices, key = carry
        block = given["steps"], given["mask"] if config.allow_mask else None
        step, mask = nth(block, 0)
        some = [nth(step, given["envs"])]
        if config.prioritized:
            some += [None, nth(given["priority"], given["envs"])]
        branches = {
            "nothing": lambda state: state,
            "add": lambda state: buffer.add(state, step, mask),
            "add to some": lambda state: buffer.add(state, *some, envs=given["envs"]),
            "extend": lambda state: buffer.extend(state, *block),
            "drop": lambda state: buffer.drop(state, given["mask"][0]),
            "clear": buffer.clear,
        }
        index = nth(indices, given["which"])
        if buffer.allow_write:
            branches["write"] = lambda state: buffer.write(state, index, {"reward": given["new"]})
            opposite = lambda step, next_obs: {"reward": _opposite(step.reward)}
            branches["map rows"] = lambda state: buffer.map_rows(state, opposite, block=7)
        if config.prioritized:
            branches |= {
                "add with priorities": lambda state: buffer.add(
                    state, step, mask, given["priority"]
                ),
                "update": lambda state: buffer.update_priorities(state, index, given["new"]),
            }
        if buffer.layout().lockstep:
            del branches["add to some"]
        every = [branches.get(kind, branches["nothing"]) for kind in KINDS]
        state = jax.lax.switch(given["kind"], every, state)
        key, own = jax.random.split(key)
        observed = config.observe(state, own)
        newest = observed["batch"].index
        indices = jax.tree.map(
            lambda one, all_: jnp.concatenate([one[None], all_[:-1]]), newest, indices
        )
        return (state, indices, key), observed

    def run(arrays):
        state = buffer.init(nth(arrays["steps"], (0, 0, 0)))
        shape = RECENT, buffer.batch_size
        indices = Index(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.uint32))
        return jax.lax.scan(once, (state, indices, jax.random.key(0)), arrays)[1]

    return jax.jit(run)
