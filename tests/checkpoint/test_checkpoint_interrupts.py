"""Tests of Ctrl-C at any line of a save, a restore or a close: checkpoints stay intact, no thread
or memory is left over, and the run can continue."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import pathlib
import queue
import random
import re
import signal
import sys
import threading
import time
import warnings

import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer
from tests.checkpoint.runs import (
    BUFFER,
    EXAMPLE,
    check_intact,
    check_restored,
    replay_of,
    save_run,
    state_of,
)
from tests.conftest import ALL, SOAK
from tests.support.interrupting import interrupted_at

# An interrupt between `open` and its block leaves the file to the garbage collector, which warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SIMPLE_QUEUE, MAIN = queue.SimpleQueue, threading.main_thread().ident
LIBRARY = str(pathlib.Path(jr.__file__).parent)


def is_ours(frame):
    """Return whether a frame is of this library: interrupts in other libraries are not tested."""
    return frame.f_code.co_filename.startswith(LIBRARY) and frame.f_code.co_name != "__del__"


def lines_of(call):
    """Return the file and the function of each line of this library that a call executes."""
    found = []

    def trace(frame, event, _):
        if is_ours(frame):
            if event == "line":
                found.append((pathlib.Path(frame.f_code.co_filename).stem, frame.f_code.co_name))
            return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return found


def moments(call, seed, most, always=()):
    """Return numbers of executed lines at which to interrupt a call: a sample of `most`, in
    `make test-all` of twice as many, or in the soak of 400; and those of the functions `always`."""
    lines = lines_of(call)
    assert len(lines) > 400
    count = 400 if SOAK else 2 * most if ALL else most
    chosen = random.Random(seed).sample(range(1, len(lines) + 1), count)
    return sorted({*chosen, *(nth for nth, line in enumerate(lines, 1) if line in always)})


def check_goes_on(checkpointer, end, among, num_threads):
    """Check that the newest checkpoint is intact and in `among`, and that the next save works."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for _ in range(100):
        if threading.active_count() <= num_threads:
            break
        time.sleep(0.01)
    assert threading.active_count() <= num_threads
    if steps := checkpointer.all_steps():
        assert steps[-1] in among
        check_restored(checkpointer, steps[-1])
    else:
        assert not among - {end}
    save_run(checkpointer, end)
    check_restored(checkpointer, end)


@pytest.mark.parametrize("kind", ["first", "second"])
def test_an_interrupt_at_any_line_of_a_save_leaves_what_there_was(kind, tmp_path):
    count, state = itertools.count(), state_of(37)

    def begun():
        checkpointer = Checkpointer(tmp_path / str(next(count)), BUFFER, chunk_bytes=4000)
        if kind == "second":
            save_run(checkpointer, 30)
        return checkpointer

    save = lambda checkpointer: checkpointer.save(state, 37)
    save(begun())
    num_threads = threading.active_count()  # includes the progress bars' thread
    one = begun()
    # also between the manifest and the end
    always = [("checkpointer", "_write")] * (kind == "second")
    for nth in moments(lambda: save(one), kind, 4, always):
        checkpointer = begun()
        with warnings.catch_warnings(action="error"):
            interrupted_at(functools.partial(save, checkpointer), nth, counts=is_ours)
        check_goes_on(checkpointer, 37, {37} if kind == "first" else {30, 37}, num_threads)


def test_an_interrupt_of_a_save_while_jax_compares_layouts_is_no_error_of_these(tmp_path):
    """JAX would raise a ValueError for it. It compares layouts that are equal, but not the same."""
    first = state_of(37)
    counters = dataclasses.replace(first.counters, layout=dataclasses.replace(first.layout))
    state, count = first.replace(counters=counters), itertools.count()

    def save(own=state):
        Checkpointer(tmp_path / str(next(count)), BUFFER, chunk_bytes=4000).save(own, 37)

    save(first)
    compares = [nth for nth, (file, _) in enumerate(lines_of(save), 1) if file == "struct"]
    for nth in random.Random(0).sample(compares, 40 if ALL else 8):
        assert interrupted_at(save, nth, counts=is_ours)


def raising(monkeypatch, nth):
    """Let the main thread get a signal in the `nth` call from now on that waits for other threads
    or takes their locks: after a lock is taken, as a handler may run there. Return a function that
    counts these calls."""
    count = itertools.count(1)

    def noted():
        if threading.get_ident() == MAIN and next(count) == nth:
            signal.raise_signal(signal.SIGINT)

    def after(real):
        def call(*given, **options):
            found = real(*given, **options)
            noted()
            return found

        return call

    class Queue:
        """A queue of Python: that of C has no methods to replace."""

        def __init__(self):
            self._real = SIMPLE_QUEUE()

        def put(self, item):
            noted()
            self._real.put(item)

        def get(self):
            noted()
            return self._real.get()

    for name in ("__enter__", "wait"):
        monkeypatch.setattr(threading.Condition, name, after(getattr(threading.Condition, name)))
    for name in ("join", "start"):
        monkeypatch.setattr(threading.Thread, name, after(getattr(threading.Thread, name)))
    monkeypatch.setattr(queue, "SimpleQueue", Queue)
    return lambda: next(count) - 1


@pytest.mark.parametrize("kind", ["save", "restore"])
def test_an_interrupt_while_threads_wait_for_each_other_leaves_no_lock(kind, tmp_path):
    """A lock that is left in a `Condition` would block a thread of the save for ever. Interrupt at
    every fifth call that waits, in `make test-all` at each."""
    state, threads = state_of(37), threading.active_count() + 1
    numbers = itertools.count()

    def begun():
        checkpointer = Checkpointer(tmp_path / str(next(numbers)), BUFFER, chunk_bytes=4000)
        if kind == "restore":
            checkpointer.save(state, 37)
        return checkpointer

    def call(checkpointer):
        if kind == "restore":
            checkpointer.restore(EXAMPLE)
        else:
            checkpointer.save(state, 37)

    with pytest.MonkeyPatch.context() as patch:
        num_calls = raising(patch, 0)
        call(begun())
        num_calls = num_calls()
    assert num_calls > 5
    every = 1 if ALL else 5
    for nth in range(1 + random.Random(kind).randrange(every), num_calls + 1, every):
        checkpointer = begun()
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            raising(patch, nth)
            call(checkpointer)
        check_goes_on(checkpointer, 37, {37}, threads)


def test_an_interrupt_at_a_random_moment_of_a_save_leaves_what_there_was(tmp_path):
    """Interrupt by a timer, so also while a call waits, and in other libraries."""
    r, states = random.Random(0), {end: state_of(end) for end in (37, 30)}
    checkpointer = Checkpointer(tmp_path, BUFFER, chunk_bytes=1000)
    checkpointer.save(states[30], 30)
    begin = time.monotonic()
    checkpointer.save(states[37], 37)
    seconds, num_threads = time.monotonic() - begin, threading.active_count() + 1
    num_trials = num_interrupted = 0
    while num_interrupted < (200 if SOAK else 20 if ALL else 4):
        timer = threading.Timer(r.random() * seconds, lambda: signal.raise_signal(signal.SIGINT))
        end = 30 + 7 * (num_trials % 2)
        num_trials += 1
        assert num_trials < 1000
        try:
            timer.start()
            checkpointer.save(states[end], end)
            timer.join()
        except KeyboardInterrupt:
            num_interrupted += 1
        check_goes_on(checkpointer, 30, {30, 37}, num_threads)


def test_an_interrupt_at_any_line_of_a_restore_leaves_no_thread(tmp_path):
    checkpointer = Checkpointer(tmp_path, BUFFER, chunk_bytes=4000)
    save_run(checkpointer, 30)
    restore = lambda: checkpointer.restore(EXAMPLE)
    restore()
    num_threads = threading.active_count()
    ends = [("threads", "end")]
    for nth in moments(restore, 0, 3, ends):
        interrupted_at(restore, nth, counts=is_ours)
        check_goes_on(checkpointer, 30, {30}, num_threads)


def test_an_interrupt_at_any_line_of_a_replay_s_load_leaves_its_rows(tmp_path):
    replay_of(9).save(tmp_path)
    for nth in moments(functools.partial(replay_of(4).load, tmp_path), 0, 6):
        other = replay_of(4)
        interrupted_at(functools.partial(other.load, tmp_path), nth, counts=is_ours)
        assert len(other) in (16, 36)
        assert len(other.sample().is_valid) == 8


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(),
    reason="needs Linux, whose kernel says how much memory there is",
)
def test_interrupted_saves_hold_no_memory(tmp_path):
    """Interrupt saves while their threads start: each once kept a copy of the buffer."""
    run = jr.jit(jr.items(capacity=1024, batch_size=8))
    state = run.extend(run.init(np.zeros(2**13)), np.ones((1024, 1, 2**13), np.float32))
    checkpointer = Checkpointer(tmp_path, run.buffer, chunk_bytes=2**20, compression_level=None)

    save = functools.partial(checkpointer.save, state)

    def resident():
        gc.collect()
        status = pathlib.Path("/proc/self/status").read_text()
        return 2**10 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])

    save()
    lines = lines_of(save)
    start, stop = (lines.index(line) for line in (("threads", "in_turn"), ("threads", "end")))
    before, num_threads = resident(), threading.active_count()
    for nth in range(start + 1, stop + 1, 1 if SOAK else 16 if ALL else 40):
        interrupted_at(save, nth, counts=is_ours)
    assert threading.active_count() <= num_threads
    assert resident() - before < 2**24  # the buffer has 32 MiB
    save()
    check_intact(checkpointer.verify())
