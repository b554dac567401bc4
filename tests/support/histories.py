"""Random histories of all operations. One program runs a whole history on a buffer, alone or beside
others under `vmap`, and an oracle of lists goes through it afterwards. At its end, all that is
known of the rows is derived from them again, and must be the same. In `make test-all` the sampler's
state is made of its numbers again, too, and must say the same.

A configuration is hashable, and has the fields and methods of `Config` in
`storage/test_oracle_streams.py`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay.buffers.adopt import numbers_of
from jaxreplay.storage import relayout, row_flags
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.types import Index
from tests.conftest import ALL
from tests.support.sampling import assert_same
from tests.support.steps import nth, stacked

LENGTH = 64  # operations of a history
BLOCK = 3  # steps of an `extend`
RECENT = 8  # samples whose rows may be changed
PRIORITIES = (0.0, 0.3, 1.0, 2.5, 7.0, float("nan"), float("inf"), -1.0)
ADDS = ("add", "add with priorities", "add to some", "extend")
OF_SAMPLE = ("update", "write")  # of the rows of an earlier sample
OF_ENVS = ("drop", "end")
# how often each comes beside adds, of which the history has a share
KINDS = {"pop": 6, "update": 4, "write": 3, "nothing": 2, "map rows": 1, "drop": 1, "end": 2}
KINDS |= {"clear": 0.4, "reset": 1} | dict.fromkeys(ADDS, 0)


def has_priorities(config, kind):
    """Return whether an operation gives priorities of the new rows."""
    to_some = kind == "add to some" and config.buffer.sampler.has_priorities
    return kind == "add with priorities" or to_some


def history_of(config, seed):
    """Return a list of (kind, steps with their masks, further arguments)."""
    r, oracle, history, clock = np.random.default_rng(seed), config.oracle(), [], 0
    num_envs, num_agents = config.num_envs, config.agents or 1
    has_episodes = config.buffer.autoreset is not None
    adds = [kind for kind in config.operations if kind in ADDS]
    others = [kind for kind in config.operations if kind not in ADDS]
    share, often = r.choice([0.4, 0.6, 0.8, 0.93]), np.array([KINDS[kind] for kind in others])
    masked, ending = r.choice([0.1, 0.4]), has_episodes * r.choice([0.03, 0.12, 0.4])
    flags = np.zeros((2, num_envs, num_agents), bool)  # of the envs' agents so far
    for at in range(LENGTH):
        kind = r.choice(adds) if r.random() < share else r.choice(others, p=often / often.sum())
        kind = "nothing" if kind in (*OF_SAMPLE, "pop") and not at else kind
        steps, given = [], None
        for _ in range(BLOCK if kind == "extend" else 1 if kind in ADDS else 0):
            clock, owes = clock + 1, np.array([oracle.owes_final_row(e) for e in range(num_envs)])
            new, later = flags_of(r, flags, owes, ending)
            mask = None
            if config.mask or kind == "add to some":
                # With next-step autoreset, the row after a done is never masked.
                mask = (r.random(num_envs) >= masked) | owes
            step = step_of(clock, *(new if config.agents else new[..., 0]))
            oracle.add(**step, mask=mask)
            steps.append((step, mask))
            flags = later if mask is None else np.where(mask[:, None], later, flags)
        if has_priorities(config, kind):
            given = r.choice(PRIORITIES, num_envs)
        if kind in OF_ENVS:
            given = r.random(num_envs) < 0.5
            flags[:, given] = False
        if kind in OF_SAMPLE:
            values = PRIORITIES if kind == "update" else range(-4, 5)
            new = itertools.cycle(r.choice(values, r.integers(1, 6)).astype(float).tolist())
            given = (
                r.integers(min(RECENT, at)),
                list(itertools.islice(new, config.buffer.batch_size)),
            )
        change(oracle, kind, given)
        history.append((kind, steps, given))
    return history


def flags_of(r, flags, owes, ending):
    """Return flags [2, E, A] of a step of the envs' agents, which end one by one, and the flags of
    their episodes after it. `owes` are envs whose step is a final row."""
    ends, is_cut = r.random(flags[0].shape) < ending, r.random(flags[0].shape) < 0.4
    new = flags | (np.stack([ends & ~is_cut, ends & is_cut]) & ~flags.any(axis=0))
    new[:, owes] = r.random(new[:, owes].shape) < 0.5  # nobody reads them
    goes_on = ~new.any(axis=0).all(axis=-1, keepdims=True) & ~owes[:, None]
    return new, new & goes_on


def change(oracle, kind, given):
    """Change the oracle by an operation without steps, and without rows of a sample."""
    if kind in OF_ENVS:
        getattr(oracle, kind)(given)
    if kind == "map rows":
        oracle.map_rows(mapped)
    if kind == "clear":
        oracle.clear()


def mapped(reward):
    return -2 * reward


def step_of(clock, terminated, truncated):
    """Return a step of every env, whose observation differs from all others."""
    envs = np.arange(len(terminated))
    return {
        "obs": np.float32(clock * 16 + envs),
        "action": np.int32(clock * 16 + envs),
        "reward": np.float32((clock * 7 + envs * 3) % 5 - 2),
        "terminated": terminated,
        "truncated": truncated,
        "final_obs": np.float32(clock * 16 + envs + 0.5),
    }


def go_through(config, seeds):
    """Run a history for each seed, from counters at 0 or short of their wrap-around. Check after
    each operation, and return the models."""
    starts = [(0, 2**32 - 5)[seed % 2] for seed in seeds]
    histories = [history_of(config, seed) for seed in seeds]
    given = [
        (np.uint32(start), arrays_of(config, history))
        for start, history in zip(starts, histories, strict=True)
    ]
    if config.is_population:
        found = jax.device_get(_program(config)(*stacked(given)))
        found = [nth(found, which) for which in range(len(seeds))]
    else:
        found = [jax.device_get(_program(config)(*one)) for one in given]
    models = [config.model(config.oracle(), start) for start in starts]
    for seed, model, history, one in zip(seeds, models, histories, found, strict=True):
        observed, *both = one
        _compare(config, model, history, observed, f"history {seed}")
        assert_same(*both)
    return models


def _compare(config, model, history, observed, name):
    oracle, drawn, r = model.oracle, [], np.random.default_rng(0)
    for at, (kind, steps, given) in enumerate(history):
        where = f"{name}, operation {at}: {kind} {str(given)[:40]}"  # pytest shows it
        if kind == "pop":
            model.take(nth(observed, at - 1))
        model.before(kind, len(steps))
        for step, mask in steps:
            more = {"priority": given} if has_priorities(config, kind) else {}
            oracle.add(**step, mask=mask, **more)
        if kind in OF_SAMPLE:
            of_rows = {"update": oracle.update, "write": oracle.write}[kind]
            of_rows(drawn[at - 1 - given[0]], given[1])
        change(oracle, kind, given)
        model.after(kind)
        is_asked = at == len(history) - 1 or r.random() < 0.12
        drawn.append(config.check(model, nth(observed, at), is_asked, where))


def known(state):
    """Return what is known of a state's rows, all of which follows from them: its counters; of
    stored rows their flags, candidate numbers and episodes; and the places of the ends that have
    come, and of starts that are stored. Table entries of other episodes are never read."""
    layout, rows, table = state.layout, state.rows, state.rows.table
    of_rows, row = {}, jnp.arange(layout.capacity)
    if rows.flags is not None:
        of_rows = {"flags": rows.flags, "number": rows.candidate_number}
    if table is not None:
        entry = row // layout.length * layout.length + table.ordinal
        has_ended = table.ordinal != jnp.repeat(state.counters.ordinal, layout.length)
        opens = rows.flags & row_flags.NO_STEP == row_flags.FIRST
        of_rows |= {
            "episode": table.ordinal,
            "end": jnp.where(has_ended, table.end_position[entry], 0),
            "start": jnp.where(opens, table.start_position[entry], 0),
        }
    is_stored = state.is_written(row)
    of_rows = {name: jnp.where(is_stored, values, 0) for name, values in of_rows.items()}
    return of_rows | {name: getattr(state.counters, name) for name in layout.counter_names}


def sampled(buffer, state):
    """Return what a state's sampler says of each sampleable row, and of all."""
    rows, row = Sampleable.of(state), jnp.arange(buffer.capacity)
    probability = buffer.sampler.probability(state.sampler, rows, row)
    return {
        "probability": jnp.where(rows.contains(row), probability, 0),
        "size": buffer.sampler.size(state.sampler, rows),
        "metrics": buffer.sampler.metrics(state.sampler, rows),
    }


def arrays_of(config, history):
    """Return a history as arrays."""
    num_envs, shape = config.num_envs, (LENGTH, BLOCK, config.num_envs)
    flags = np.zeros((num_envs, *([config.agents] * bool(config.agents))), bool)
    blank = step_of(0, flags, flags)
    fields = {name: np.zeros(shape[:2] + x.shape, x.dtype) for name, x in blank.items()}
    arrays = {
        "kind": np.zeros(LENGTH, np.int32),
        "time": np.arange(LENGTH, dtype=np.int32),
        "mask": np.ones(shape, bool),
        # of "add to some": one more than there are, so that there is always padding
        "envs": np.full((LENGTH, num_envs + 1), num_envs, np.int32),
        "priority": np.zeros((LENGTH, num_envs), np.float32),
        "which": np.zeros(LENGTH, np.int32),
        "new": np.zeros((LENGTH, config.buffer.batch_size), np.float32),
    }
    for at, (kind, steps, given) in enumerate(history):
        arrays["kind"][at] = config.operations.index(kind)
        for place, (step, mask) in enumerate(steps):
            for name, value in step.items():
                fields[name][at, place] = value
            if mask is not None:
                arrays["mask"][at, place] = mask
        if kind == "add to some":
            own = np.random.default_rng(at).permutation(np.flatnonzero(steps[0][1]))
            arrays["envs"][at, : len(own)] = own
            arrays["envs"][at, -1] = -1 - at  # padding, too
        if has_priorities(config, kind):
            arrays["priority"][at] = given
        if kind in OF_ENVS:
            arrays["mask"][at, 0] = given
        if kind in OF_SAMPLE:
            arrays["which"][at], arrays["new"][at] = given
    return arrays | {"steps": config.step(fields)}


@functools.cache
def _program(config):
    buffer = config.buffer

    def go(carry, given):
        state, taken, indices = carry
        step, mask = nth(given["steps"], 0), given["mask"]
        index = nth(indices, given["which"])
        masks = (mask,) if config.mask else ()
        some = nth(step, given["envs"])
        reward = lambda item: item["reward"] if isinstance(item, dict) else item.reward
        ways = {
            "nothing": lambda: state,
            "pop": lambda: state.replace(sampler=taken),
            "add": lambda: buffer.add(state, step, *nth(masks, 0)),
            "add with priorities": lambda: buffer.add(
                state, step, *nth(masks, 0), priority=given["priority"]
            ),
            # padding has a priority, too
            "add to some": lambda: buffer.add(
                state,
                some,
                priority=nth(given["priority"], given["envs"])
                if has_priorities(config, "add to some")
                else None,
                envs=given["envs"],
            ),
            "extend": lambda: buffer.extend(state, given["steps"], *masks),
            "update": lambda: buffer.update_priorities(state, index, given["new"]),
            "reset": lambda: buffer.reset_max_priority(state),
            "write": lambda: buffer.write(state, index, {"reward": config.rewards(given["new"])}),
            "map rows": lambda: buffer.map_rows(
                state,
                lambda item, *_: {"reward": jax.tree.map(mapped, reward(item))},
                block=7,
            ),
            "drop": lambda: buffer.drop(state, mask[0]),
            "end": lambda: buffer.end_streams(state, mask[0]),
            "clear": lambda: buffer.clear(state),
        }
        state = jax.lax.switch(given["kind"], [ways[kind] for kind in config.operations])
        key, after = jax.random.key(given["time"]), state
        if buffer.sampler.consumes:
            after, batch = buffer.pop(state, key)
        else:
            batch = buffer.sample(state, key)
        newest = lambda one, all_: jnp.concatenate([one[None], all_[:-1]])
        indices = jax.tree.map(newest, batch.index, indices)
        observed = config.observe(state, batch, after.sampler, key)
        return (state, after.sampler, indices), observed

    def run(start, arrays):
        state = buffer.init(nth(arrays["steps"], (0, 0, 0)))
        # Lap 0 of agents says that no flag can be of an earlier step.
        lap = jnp.zeros_like(start) if config.agents else start
        state = state.replace(counters=state.counters.set(num_candidates=start, lap=lap))
        if hasattr(state.sampler, "next"):  # a queue
            first = Sampleable.of(state).first_candidate_number()
            first = jnp.broadcast_to(first, state.sampler.next.shape)
            state = state.replace(sampler=state.sampler.replace(next=first, lost=start))
        shape = RECENT, buffer.batch_size
        indices = Index(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.uint32))
        (state, *_), observed = jax.lax.scan(go, (state, state.sampler, indices), arrays)
        again = relayout.derived(state.replace(sampler=None), state.layout)
        if not ALL:
            return observed, known(state), known(again)
        sampler = buffer.sampler._from_labelled(Sampleable.of(again), numbers_of(state))
        again = again.replace(sampler=sampler)
        return observed, *(known(one) | sampled(buffer, one) for one in (state, again))

    return jax.jit(jax.vmap(run) if config.is_population else run)
