"""Any history of a run, of its saves, and of what happens to them: a restore returns what was
saved, or refuses."""

import collections
import contextlib
import gc
import itertools
import os
import pathlib
import random
import shutil
import tempfile
import threading
import warnings

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import stateful, strategies

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer, CorruptCheckpointError, PathInUseError, planning
from jaxreplay.distributed.parts import Parts
from tests.checkpoint.disk import HOWS, KILL, Disk
from tests.checkpoint.runs import check_intact, check_no_other_files, files_of, groups_of, quiet
from tests.conftest import ALL, SOAK
from tests.support.buffers import bits, jitted
from tests.support.refusals import refused

NUM_ENVS, LENGTH, BATCH = 3, 24, 4
BUFFER = jr.prioritized(
    capacity=NUM_ENVS * LENGTH,
    num_envs=NUM_ENVS,
    batch_size=BATCH,
    autoreset="same_step_no_final_obs",
    allow_mask=True,
    allow_write=True,
)
ZERO, FALSE = np.float32(0), np.False_
EXAMPLE = jr.Step(np.zeros(3, np.uint8), ZERO, ZERO, terminated=FALSE, truncated=FALSE)
START = jitted(BUFFER, "init")(EXAMPLE)
LEAVES = ("action", "reward")  # of one dtype
DAMAGES = ("flip", "cut", "delete", "copy")
SMALL = strategies.integers(0, 10**6)
PARTS_OF = Parts.of


@jax.jit
def mapped(state, limit):
    """Change the rows that were added before a time."""

    def older(step, next_obs, limit):
        return {"action": jnp.where(step.action < limit, -1, step.action)}

    return BUFFER.map_rows(state, older, limit)


class Runs(stateful.RuleBasedStateMachine):
    """One run after another under a path.

    `saved` is what must be restored: of each step the arrays of the state and of the agent.
    """

    outcomes = collections.Counter()  # noqa: RUF012, of all runs

    def __init__(self):
        super().__init__()
        self.path = (
            pathlib.Path(tempfile.mkdtemp(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))) / "run"
        )
        self.patch = pytest.MonkeyPatch()
        self.disk = Disk(self.patch)
        self.saved, self.time = {}, 0
        self.state, self.past, self.replaced = START, [START], None

    @stateful.initialize(
        chunk_bytes=strategies.sampled_from([400, 3000]),
        compared=strategies.sampled_from([1, 2**23]),
        bounds=strategies.sampled_from([[0, NUM_ENVS], [0, 1, NUM_ENVS]]),
    )
    def begin(self, chunk_bytes, compared, bounds):
        """As if devices had parts of the envs, and comparing few rows or all."""
        self.patch.setattr(planning, "_COMPARED", compared)
        self.patch.setattr(Parts, "of", lambda state: PARTS_OF(state)._replace(bounds=bounds))
        self.bounds, self.chunk_bytes = bounds, chunk_bytes
        self.open(3, None)
        for _ in range(2):
            self.extend(0, 9)
            self.save(True)

    def open(self, keep, level):
        self.keep = keep
        options = {"max_to_keep": keep, "compression_level": level}
        self.checkpointer = Checkpointer(self.path, BUFFER, chunk_bytes=self.chunk_bytes, **options)

    # What a run does.

    def block(self, seed, num_steps):
        """Return steps whose action is a number that no other step has, and a mask."""
        r, shape = np.random.default_rng(seed), (num_steps, NUM_ENVS)
        name = np.arange(self.time, self.time + num_steps * NUM_ENVS, dtype=np.float32)
        self.time += num_steps * NUM_ENVS
        done = r.random((2, *shape)) < 0.1
        obs = r.integers(0, 2, (*shape, 3), np.uint8)
        name, reward = name.reshape(shape), done[0].astype(np.float32)
        step = jr.Step(obs, name, reward, terminated=done[0], truncated=done[1])
        return step, r.random(shape) < r.choice([0.0, 0.3, 1.0], NUM_ENVS)

    def go_on(self, state):
        self.state = state
        self.past = [*self.past[-4:], state]

    @stateful.rule(seed=SMALL, num_steps=strategies.sampled_from([1, 9]))
    def extend(self, seed, num_steps):
        self.go_on(jitted(BUFFER, "extend")(self.state, *self.block(seed, num_steps)))

    @stateful.rule(seed=SMALL, leaf=strategies.sampled_from([*LEAVES, "obs"]))
    def write(self, seed, leaf):
        r = np.random.default_rng(seed)
        batch = jitted(BUFFER, "get")(self.state, r.integers(0, BUFFER.capacity, BATCH))
        values = np.uint8(r.integers(0, 2, (BATCH, 3)))
        values = {leaf: values if leaf == "obs" else np.float32(np.arange(BATCH))}
        self.go_on(jitted(BUFFER, "write")(self.state, batch.index, values))

    @stateful.rule(seed=SMALL)
    def update_priorities(self, seed):
        priority = np.random.default_rng(seed).random(BATCH, np.float32)
        batch = jitted(BUFFER, "get")(self.state, np.arange(BATCH))
        self.go_on(jitted(BUFFER, "update_priorities")(self.state, batch.index, priority))

    @stateful.rule(age=strategies.integers(0, 60))
    def map_rows(self, age):
        self.go_on(mapped(self.state, np.float32(self.time - age)))

    @stateful.rule(mask=strategies.tuples(*[strategies.booleans()] * NUM_ENVS))
    def drop(self, mask):
        self.go_on(jitted(BUFFER, "drop")(self.state, np.array(mask)))

    @stateful.rule(seed=SMALL)
    def merge(self, seed):
        other = jitted(BUFFER, "extend")(START, *self.block(seed, 9))
        self.go_on(jitted(BUFFER, "merge")(self.state, other))

    @stateful.rule(which=SMALL)
    def rewind(self, which):
        self.state = self.past[which % len(self.past)]

    # What happens to its checkpoints.

    @stateful.rule(is_new=strategies.booleans())
    def save(self, is_new):
        step = max(self.saved, default=0) + (is_new or not self.saved)
        self.checkpointer.save(self.state, step, extras={"step": step}, metadata={"step": step})
        self.is_saved(step)
        self.replaced = None if self.replaced is None else (self.replaced[0], True)
        for group in groups_of(self.checkpointer):
            assert group.env_stop <= min(stop for stop in self.bounds if group.env < stop)

    def is_saved(self, step):
        self.saved.pop(step, None)
        self.saved[step] = bits(self.state)
        for old in [*self.saved][: -self.keep]:
            del self.saved[old]
        assert self.checkpointer.all_steps() == [*self.saved]
        self.check(step)

    def check(self, step=None, checkpointer=None):
        """Check what is restored of a step, or of the newest one."""
        reader = checkpointer or Checkpointer(self.path, BUFFER)
        state, extras = reader.restore(EXAMPLE, step, extras={"step": 0})
        assert step in (None, reader.step)
        assert bits(state) == self.saved[reader.step]
        assert (extras, reader.metadata) == ({"step": reader.step},) * 2
        return reader.step, state

    @stateful.rule(number=strategies.integers(0, 90), how=strategies.sampled_from([*HOWS, KILL]))
    def save_fails(self, number, how):
        """Any one operation of the disk fails, or the run is killed there."""
        step = max(self.saved, default=0) + 1
        before = dict(self.saved)
        try:
            with self.disk.failing(number, how):
                self.checkpointer.save(
                    self.state, step, extras={"step": step}, metadata={"step": step}
                )
        except (OSError, CorruptCheckpointError):
            assert how != HOWS[2] or self.disk.failed not in ("write", "read")
            self.outcomes["killed" if how == KILL else "failed"] += 1
        steps = self.checkpointer.all_steps()
        if step in steps:
            self.saved[step] = bits(self.state)
        assert steps[-1:] in ([*before][-1:], [step])
        self.saved = {one: self.saved[one] for one in steps}
        for one in steps:
            self.check(one)
        if how == KILL:
            self.reopen(0, self.keep, None)

    @stateful.rule(
        which=SMALL,
        keep=strategies.sampled_from([1, 3]),
        level=strategies.sampled_from([None, 1]),
    )
    def reopen(self, which, keep, level):
        """Another run goes on from a checkpoint."""
        self.replaced = self.checkpointer, False
        self.open(keep, level)
        steps = [*self.saved]
        if steps:
            step = steps[-1 - which % len(steps)]
            _, self.state = self.check(step, self.checkpointer)
        elif self.path.exists():  # a manifest that nobody can read was never written
            self.state = START

    @stateful.rule()
    def a_run_that_was_replaced_is_refused(self):
        if self.replaced is not None and self.replaced[1]:
            with refused("has a newer checkpoint, by this process", PathInUseError):
                self.replaced[0].save(self.state, 99)

    @stateful.rule(seed=SMALL, how=strategies.sampled_from(DAMAGES))
    def damage(self, seed, how):
        """Damage a file, and repair it after a restore."""
        if not self.saved:  # rules that depend on it would depend on threads
            return
        r, files = random.Random(seed), files_of(self.path)
        file = r.choice(files)
        content = file.read_bytes()
        new = bytearray(content)
        if how == "flip":
            new[r.randrange(len(new))] ^= 1 << r.randrange(8)
        elif how == "cut":
            new = new[: r.randrange(len(new))]
        elif how == "copy":
            new = r.choice([one for one in files if one.parent == file.parent]).read_bytes()
        file.unlink()
        if how != "delete":
            file.write_bytes(new)
        newest, name = max(self.saved), str(file.relative_to(self.path))
        # a checkpoint without its manifest looks like a save that was killed; one whose manifest is
        # damaged is told of, also where a newer one is restored
        is_damaged = how == "delete" or new != content
        is_manifest = file.parent.name == "manifests" and is_damaged
        is_unseen = how == "delete" and is_manifest
        with warnings.catch_warnings(record=True, action="always") as caught:
            try:
                step, _ = self.check()
            except (CorruptCheckpointError, FileNotFoundError) as error:
                is_told = name in str(error) or (is_unseen and len(self.saved) == 1)
                assert is_told, error  # noqa: PT017
                self.outcomes["refused"] += 1
            else:
                is_told = any(name in str(one.message) for one in caught)
                assert is_told == ((step != newest or is_manifest) and not is_unseen)
                self.outcomes["older" if step != newest else "newest"] += 1
        file.write_bytes(content)

    @stateful.rule(number=strategies.integers(0, 60), how=strategies.sampled_from(HOWS))
    def restore_fails(self, number, how):
        if not self.saved:
            return
        try:
            with self.disk.failing(number, how):
                self.check()
        except (OSError, CorruptCheckpointError):
            self.outcomes["not read"] += 1
        self.check(max(self.saved))

    def teardown(self):
        try:
            with contextlib.suppress(PathInUseError), quiet():
                for one in self.saved:
                    self.check(one)
                check_intact(self.checkpointer.verify())
                self.checkpointer.save(self.state)  # deletes what failed saves have left
                check_no_other_files(self.checkpointer, self.path)
            assert not [one for one in threading.enumerate() if one.name.startswith("jaxreplay")]
        finally:
            self.patch.undo()
            shutil.rmtree(self.path.parent)


def test_a_save_is_written_again_of_which_one_env_has_no_row_any_more():
    """Rows of the other envs were written since. Files of its checkpoints are then damaged in each
    way, with every outcome."""
    run = Runs()
    run.outcomes = collections.Counter()
    run.begin(chunk_bytes=400, compared=1, bounds=[0, NUM_ENVS])
    run.merge(0)
    run.extend(0, 1)
    run.merge(0)
    run.merge(0)
    run.map_rows(0)
    run.save(False)
    for keep in (3, 1):
        run.reopen(0, keep, None)
        run.extend(0, 1)
        run.save(True)
        for seed, how in itertools.product(range(6), DAMAGES):
            run.damage(seed, how)
    run.teardown()
    assert {*run.outcomes} == {"refused", "older", "newest"}


def test_a_restore_returns_what_was_saved_or_refuses():
    count_files = lambda: len([*pathlib.Path("/proc/self").glob("fd/*")])  # open ones, on Linux
    before = count_files()
    most = 1000 if SOAK else 60 if ALL else 8
    settings = hypothesis.settings(max_examples=most, stateful_step_count=30)

    stateful.run_state_machine_as_test(Runs, settings=settings)
    gc.collect()
    assert count_files() <= before + 1
    expected = {"failed", "killed", "not read"}
    assert {*Runs.outcomes} >= expected | ({"refused", "older", "newest"} if ALL else set())
