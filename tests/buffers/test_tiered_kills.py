"""Rows in files after a kill at any moment: those from before a call, or from after it."""

import operator
import random
import shutil
import sys

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer
from jaxreplay.storage import array_files, file_rows
from tests.conftest import ALL, SOAK
from tests.support.row_writer import steps
from tests.support.steps import nth

NUM_ENVS, LENGTH = 3, 12
WATCHED = {module.__file__ for module in (file_rows, array_files)}  # they change the folder
EXAMPLE = nth(steps([0]), (0, 0))
BUFFER = jr.prioritized(
    capacity=NUM_ENVS * LENGTH,
    num_envs=NUM_ENVS,
    batch_size=8,
    autoreset="next_step",
    allow_mask=True,
    allow_write=True,
)
ON_DEVICE = jr.jit(BUFFER)


def opened(folder):
    tier = jr.tiered(BUFFER, rows=folder, continue_streams=True)
    return tier, tier.init(EXAMPLE)


def rows_of(tier):
    """Return the number of each env's oldest row and of its next one, and all leaves and flags of
    the rows between these, by env and number."""
    store = tier._store
    first, end, _ = store.progress.tolist()
    arrays = {name: values for (_, name), values in store._files.arrays.items()}
    return (
        first,
        end,
        {
            (env, number): {
                name: values[env * LENGTH + number % LENGTH].tobytes()
                for name, values in arrays.items()
            }
            for env in range(NUM_ENVS)
            for number in range(first[env], end[env])
        },
    )


def snapshots_of(folder, call, rng):
    """Return what a function returns, and copies of a folder as kills leave it at some of its
    lines, each as likely as another."""
    left, count = [folder.with_name(f"left{which}") for which in range(3)], 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            count += 1
            for copy in left:
                if rng.random() < 1 / count:
                    sys.settrace(None)
                    shutil.rmtree(copy, ignore_errors=True)
                    shutil.copytree(folder, copy)
                    sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        return call(), [copy for copy in left if copy.exists()]
    finally:
        sys.settrace(None)


class History:
    """Calls of a tiered buffer, drawn at random."""

    def __init__(self, folder, seed):
        self.folder, self.rng = folder, random.Random(seed)
        self.tier, self.state = opened(folder / "rows")
        self.time, self.saved, self.others = 0, {}, {}

    def block(self, length):
        """Return steps that no call had, and whether each env took each of them."""
        self.time += length
        mask = [[self.rng.random() < 0.8 for _ in range(NUM_ENVS)] for _ in range(length)]
        return steps(range(self.time - length, self.time)), np.array(mask)

    def other(self):
        """Return a state of a buffer on a device, with new rows."""
        state = ON_DEVICE.init(EXAMPLE)
        return ON_DEVICE.extend(state, *self.block(self.rng.choice((3, 7))))

    def extend(self):
        return self.tier.extend(self.state, *self.block(self.rng.choice((1, 4))))

    def over(self):
        return self.tier.extend(self.state, *self.block(LENGTH + 3))

    def write(self):
        index = self.tier.sample(self.state, jax.random.key(self.time)).index
        obs = jax.tree.map(lambda leaf: np.full((8, *leaf.shape), -7, leaf.dtype), EXAMPLE.obs)
        return self.tier.write(self.state, index, {"obs": obs, "reward": np.full(8, -7.0, "f")})

    def map_rows(self):
        return self.tier.map_rows(self.state, negated, block=10)

    def drop(self):
        return self.tier.drop(self.state, np.array([True, False, True]))

    def clear(self):
        return self.tier.clear(self.state)

    def end_streams(self):
        return self.tier.end_streams(self.state)

    def adopt(self):
        return self.tier.adopt(self.other())

    def merge(self):
        return self.tier.merge(self.state, self.other())

    def save(self):
        """Save the index, or a copy."""
        step, has_copy = len(self.saved) + 1, self.rng.random() < 0.5
        saver = Checkpointer(self.folder / "saved", self.tier, max_to_keep=99, overwrite=True)
        saver.save(self.state, step, copy=has_copy)
        self.saved[step] = rows_of(self.tier)
        return self.state

    def load(self):
        if not self.saved:
            return self.state
        step = self.rng.choice([*self.saved])
        try:
            return Checkpointer(self.folder / "saved", self.tier).restore(EXAMPLE, step)
        except ValueError as error:
            assert "the rows of this checkpoint are not in" in str(error)  # noqa: PT017
            return self.state


ADDS, ROW_BY_ROW = {"extend", "over", "merge"}, {"write", "map_rows"}
NAMES = [
    *("extend", "extend", "extend", "over", "write", "map_rows", "drop", "clear", "end_streams"),
    *("adopt", "merge", "save", "load", "load"),
]


def negated(step, _):
    """Return other leaves of a step."""
    return {"obs": jax.tree.map(lambda leaf: -leaf, step.obs), "reward": -step.reward}


def check_left(name, before, after, found):
    """Check the rows that a kill in a call left."""
    if name not in ADDS | ROW_BY_ROW:
        assert found in (before, after)
        return
    first, end, rows = found
    assert end in (before[1], after[1]) or name == "over"  # which is divided
    for which, found_there in enumerate((first, end)):
        assert all(map(operator.le, before[which], found_there))
        assert all(map(operator.le, found_there, after[which]))
    for (env, number), row in rows.items():  # none is missing: `rows_of` reads all of them
        if name != "over" or not before[1][env] <= number < after[0][env]:
            place = env, number
            assert row in [one[2][place] for one in (before, after) if place in one[2]], place
    if name in ROW_BY_ROW:
        assert len(rows) == len(before[2])


def check_pairs(tier, state):
    """Check that no transition joins steps of which one does not follow the other."""
    batch = jax.device_get(tier.sample(state, jax.random.key(0), batch_size=64))
    item = batch.experience
    is_step = batch.is_valid & (item.discount > 0)
    first, following = (np.abs(obs["x"][is_step]) for obs in (item.obs, item.next_obs))
    is_changed = (first == 7) | (following == 7)  # by a write
    # a mask leaves out steps, which another env took
    assert ((following > first) & ((following - first) % NUM_ENVS == 0) | is_changed).all()


@pytest.mark.parametrize("seed", range(10 if SOAK else 5 if ALL else 1))
def test_a_kill_leaves_the_rows_from_before_a_call_or_from_after_it(seed, tmp_path, monkeypatch):
    """Each is read from a copy of the folder that was made at a random line of the call. Values
    wait in parts, as those of many rows do."""
    monkeypatch.setattr(file_rows, "_MOST_WAITING", 20)
    history = History(tmp_path, seed)
    history.state = history.extend()
    for turn in range(20):
        name = NAMES[turn] if turn < len(NAMES) else history.rng.choice(NAMES)
        before = rows_of(history.tier)
        call = getattr(history, name)
        history.state, copies = snapshots_of(tmp_path / "rows", call, history.rng)
        after = rows_of(history.tier)
        for left in copies:
            tier, state = opened(left)
            check_left(name, before, after, rows_of(tier))
            state = tier.extend(state, *history.block(2))
            check_pairs(tier, state)
            tier.close()
            shutil.rmtree(left)
