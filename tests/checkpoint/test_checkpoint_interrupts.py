"""Tests of Ctrl-C at any line of a save, a restore or a close: checkpoints stay intact, no thread
or memory is left over, and the run can continue."""

import gc
import pathlib
import random
import signal
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import SOAK
from tests.support.checkpointed_run import EXAMPLE, added, expected, items, numbers
from tests.support.interrupting import interrupted_at

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer

# An interrupt between `open` and its block leaves the file to the garbage collector, which warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

REPLAY = items(capacity=64)
LIBRARY = str(pathlib.Path(jr.__file__).parent)


def is_ours(frame):
    """Return whether a frame is of this library: interrupts in other libraries are not tested."""
    return frame.f_code.co_filename.startswith(LIBRARY) and frame.f_code.co_name != "__del__"


def moments(call, r, most):
    """Return numbers of executed lines at which to interrupt a call: all, or a sample of `most`."""
    low, high = 0, 1
    while interrupted_at(call, high, counts=is_ours):
        low, high = high, 4 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if interrupted_at(call, middle, counts=is_ours) else (low, middle)
        )
    every = range(1, low + 1)
    assert low > 100
    return every if most is None else sorted(r.sample(every, min(most, low)))


def check_goes_on(checkpointer, state, end, among, num_threads):
    """Check that the newest checkpoint is intact and in `among`, and that the next save works."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for _ in range(100):
        if threading.active_count() <= num_threads:
            break
        threading.Event().wait(0.01)
    assert threading.active_count() <= num_threads
    if steps := checkpointer.all_steps():
        assert set(steps[-1:]) <= among
        assert numbers(REPLAY, checkpointer.restore(EXAMPLE)) == expected(REPLAY, steps[-1])
    else:
        assert not among - {end}
    checkpointer.save(state, end)
    assert numbers(REPLAY, checkpointer.restore(EXAMPLE)) == expected(REPLAY, end)


@pytest.mark.parametrize("kind", ["first", "second", "does not wait", "advance", "in a block"])
def test_an_interrupt_at_any_line_of_a_save_leaves_what_there_was(kind, tmp_path):
    r, count = random.Random(kind), 0
    first = added(REPLAY, REPLAY.init(EXAMPLE), 0, 30)
    second = added(REPLAY, jax.tree.map(jnp.copy, first), 30, 7)
    checkpointer = None

    def begin():
        nonlocal checkpointer, count
        if checkpointer is not None:
            checkpointer.close()
        count += 1
        checkpointer = Checkpointer(tmp_path / str(count), REPLAY, chunk_bytes=4000)
        if kind != "first":
            checkpointer.save(first, 30)

    def save():
        assert checkpointer is not None
        if kind in ("first", "second"):
            checkpointer.save(second, 37)
        elif kind == "in a block":
            with checkpointer:
                checkpointer.save(second, 37, blocking=False)
                checkpointer.wait_until_finished(second)
        else:
            checkpointer.save(second, 37, blocking=False)
            if kind == "advance":
                checkpointer.advance(second, 0)
            checkpointer.wait_until_finished(second)

    def fresh():
        begin()
        save()

    fresh()
    num_threads = threading.active_count()  # includes the progress bars' thread
    for nth in moments(fresh, r, None if SOAK else 12):
        begin()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            interrupted_at(save, nth, counts=is_ours)
        assert checkpointer is not None
        # a save is still running if the interrupt came before or after the work of a call
        if checkpointer.is_saving:
            assert kind in ("does not wait", "advance")
            checkpointer.wait_until_finished(second)
            assert checkpointer.all_steps() == [30, 37]
        check_goes_on(checkpointer, second, 37, {37} if kind == "first" else {30, 37}, num_threads)


def test_an_interrupt_before_what_a_call_does_leaves_a_save_under_way(tmp_path):
    first = added(REPLAY, REPLAY.init(EXAMPLE), 0, 30)
    checkpointer = Checkpointer(tmp_path, REPLAY, chunk_bytes=4000)
    checkpointer.save(first, 30)
    second = added(REPLAY, jax.tree.map(jnp.copy, first), 30, 7)
    for end, call in enumerate((checkpointer.advance, checkpointer.wait_until_finished), 37):
        checkpointer.save(second, end, blocking=False)
        assert interrupted_at(lambda call=call: call(second), 1, counts=is_ours)
        assert checkpointer.is_saving
        checkpointer.wait_until_finished(second)
        assert not checkpointer.is_saving
        assert checkpointer.all_steps()[-1] == end
        assert numbers(REPLAY, checkpointer.restore(EXAMPLE)) == expected(REPLAY, 37)


def test_an_interrupt_at_a_random_moment_of_a_save_leaves_what_there_was(tmp_path):
    """Interrupt by a timer, so also while a call waits, and in other libraries."""
    r, states = random.Random(0), [added(REPLAY, REPLAY.init(EXAMPLE), 0, 30)]
    states.append(added(REPLAY, jax.tree.map(jnp.copy, states[0]), 30, 7))
    checkpointer = Checkpointer(tmp_path, REPLAY, chunk_bytes=1000)
    checkpointer.save(states[0], 30)
    num_threads, num_interrupted = threading.active_count() + 1, 0
    for trial in range(300 if SOAK else 15):
        timer = threading.Timer(r.random() * 0.03, lambda: signal.raise_signal(signal.SIGINT))
        try:
            timer.start()
            end = 37 - 7 * (trial % 2)
            checkpointer.save(states[1 - trial % 2], end, blocking=trial % 3 > 0)
            checkpointer.wait_until_finished(states[1 - trial % 2])
            timer.join()
        except KeyboardInterrupt:
            num_interrupted += 1
        check_goes_on(checkpointer, states[0], 30, {30, 37}, num_threads)
    assert num_interrupted > 5


@pytest.mark.parametrize("salvage", [False, True])
def test_an_interrupt_at_any_line_of_a_restore_leaves_no_thread(salvage, tmp_path):
    state = added(REPLAY, REPLAY.init(EXAMPLE), 0, 30)
    checkpointer = Checkpointer(tmp_path, REPLAY, chunk_bytes=4000)
    checkpointer.save(state, 30)
    num_threads = threading.active_count()
    restore = lambda: checkpointer.restore(EXAMPLE, allow_partial=salvage)
    restore()
    for nth in moments(restore, random.Random(0), None if SOAK else 25):
        interrupted_at(restore, nth, counts=is_ours)
        check_goes_on(checkpointer, state, 30, {30}, num_threads)


def test_an_interrupt_at_any_line_of_a_replay_s_load_leaves_its_rows(tmp_path):
    def made(num_steps):
        replay = jr.Replay(
            REPLAY, example=jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), EXAMPLE)
        )
        for t in range(num_steps):
            replay.add({"number": np.full(4, t, np.int32), "bytes": np.zeros((4, 100), np.uint8)})
        return replay

    saved, other = made(9), made(4)
    saved.save(tmp_path)

    def load():
        other.load(tmp_path)

    load()
    for nth in moments(load, random.Random(0), None if SOAK else 25):
        other.clear()
        for t in range(4):
            other.add({"number": np.full(4, t, np.int32), "bytes": np.zeros((4, 100), np.uint8)})
        interrupted_at(load, nth, counts=is_ours)
        assert len(other) in (16, 36)
        assert len(other.sample().is_valid) == 8


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(),
    reason="needs Linux, whose kernel says how much memory there is",
)
@pytest.mark.parametrize("wait", [True, False])
def test_interrupted_saves_hold_no_memory(wait, tmp_path):
    """Interrupt saves while their threads start: each once kept a copy of the buffer."""
    replay = jr.items(capacity=1024, batch_size=8)
    state = jr.jit(replay).extend(replay.init(jnp.zeros(2**14)), jnp.ones((1024, 1, 2**14)))
    checkpointer = Checkpointer(tmp_path, replay, chunk_bytes=2**21, compression_level=None)

    def save():
        checkpointer.save(state, blocking=wait)
        checkpointer.wait_until_finished(state)

    def resident():
        gc.collect()
        return (
            int(
                next(
                    line
                    for line in pathlib.Path("/proc/self/status").read_text().splitlines()
                    if "VmRSS" in line
                ).split()[1]
            )
            * 1024
        )

    save()
    lines = moments_of_starts(save)[:: 1 if SOAK else 16]
    before, num_threads = resident(), threading.active_count()
    for nth in lines:
        interrupted_at(save, nth, counts=is_ours)
    assert threading.active_count() <= num_threads
    assert resident() - before < 2**25  # the buffer has 64 MiB
    save()
    assert checkpointer.verify()[0].problems == []


def moments_of_starts(call):
    """Return the numbers of the lines that a call executes while its threads start."""
    found, count, inside = [], 0, False

    def trace(frame, event, _):
        nonlocal count, inside
        if not is_ours(frame):
            return None
        if (
            event == "call"
            and frame.f_code.co_name == "__init__"
            and frame.f_code.co_filename.endswith("saving.py")
        ):
            inside = True
        if event == "line":
            count += 1
            if frame.f_code.co_name in ("finish", "advance") and frame.f_code.co_filename.endswith(
                "saving.py"
            ):
                inside = False
            if inside:
                found.append(count)
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return found
