"""Ctrl-C at any moment: it is raised, no row is lost or stored twice, and no later call hangs."""

import _thread
import dataclasses
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.checkpoint import Checkpointer
from tests.support.interrupting import (
    check_comparisons,
    check_each_moment,
    num_calls_until_interrupt,
    waits_before_interrupts,
)
from tests.support.replays import make, step

LENGTH, COUNT = 64, 8


def items(sampler=None):
    """Return a replay whose items are single numbers, so that each row can be told apart."""
    buffer = jr.items(capacity=LENGTH, batch_size=4, sampler=sampler or jr.Prioritized())
    replay = jr.Replay(buffer, example=np.float32(0), framework="numpy")
    for number in range(COUNT):
        add(replay, number)
    return replay


def add(replay, number):
    replay.add(np.full(1, number, np.float32))


@jax.jit
def ordered(state):
    return jnp.roll(state.rows.steps, -state.head), state.filled


def numbers_of(state):
    """Return the stored numbers, the oldest first."""
    numbers, count = jax.device_get(ordered(state))
    return numbers[LENGTH - count :].tolist()


def check_handler_is_back():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def check_whole(state, num_added):
    """Check that the row of the next number is stored intact or not at all."""
    check_handler_is_back()
    numbers = [*map(float, range(num_added + 1))]
    assert numbers_of(state) in (numbers[-LENGTH:], numbers[:-1][-LENGTH:])


def check_goes_on(replay, num_added=COUNT):
    """Check the replay after an interrupt: its rows are intact, and all calls still work."""
    check_whole(replay._owner.state, num_added)
    assert len(replay) == len(numbers_of(replay._owner.state))
    add(replay, 1000)
    assert numbers_of(replay._owner.state)[-1] == 1000
    batch = replay.sample()
    assert batch.is_valid.all()
    replay.update_priorities(batch.index, np.ones(4))
    leaves, *_, root = jax.device_get(replay._owner.state.sampler.tree.sums)
    assert root.sum() == pytest.approx(leaves.sum())


@pytest.mark.parametrize(
    "what",
    ["add", "add of a block", "update_priorities", "sample", "add and sample", "clear", "pop"],
)
def test_an_interrupt_at_any_line_of_a_call_loses_nothing(what):
    replay, taken = items(jr.Queue() if what == "pop" else None), set()
    state = jax.tree.map(np.array, replay._owner.state)
    index = replay.sample().index

    def check_cleared():
        assert len(replay) in (0, COUNT)
        check_whole(replay._owner.state, len(replay))
        add(replay, 1)
        assert numbers_of(replay._owner.state)[-1] == 1

    def pop():
        batch = replay.sample()
        taken.update(batch.experience[batch.is_valid].tolist())

    def check_taken():
        """Items that the interrupted call has sampled come with the next call."""
        while replay.can_sample():
            pop()
        assert taken == set(range(COUNT))
        taken.clear()

    calls = {
        "add": lambda: add(replay, COUNT),
        "add of a block": lambda: replay.add(np.full((1, 1), COUNT, np.float32)),
        "update_priorities": lambda: replay.update_priorities(index, np.full(4, 2.0)),
        "clear": replay.clear,
        "pop": pop,
    }
    call = calls.get(what, replay.sample)
    checks = {"clear": check_cleared, "pop": check_taken}
    check = checks.get(what, lambda: check_goes_on(replay))

    def make_call():
        replay._owner._state = jax.device_put(jax.tree.map(np.copy, state))
        replay._owner._can_sample = None
        if what == "add and sample":  # the step waits until the sample
            add(replay, COUNT)
        return call, check

    check_each_moment(
        make_call, least=50, counts=lambda frame: frame.f_code.co_filename != __file__
    )


def test_an_interrupt_while_buffers_are_compared_is_one():
    def calls():
        replay = items()
        batch = replay.sample()
        return [
            lambda: add(replay, COUNT),
            replay.sample,
            lambda: replay.update_priorities(batch.index, np.ones(4)),
            lambda: replay.sample(beta=0.5),
            lambda: len(replay),
            replay.can_sample,
            replay.clear,
        ]

    check_comparisons(calls)


@pytest.mark.thorough
def test_an_interrupt_while_a_checkpointer_compares_buffers_is_one(tmp_path):
    example, first = (jr.Step(**step(0, axes)) for axes in ((), (1,)))

    def calls():
        buffer = jr.uniform(capacity=LENGTH, batch_size=4, autoreset="next_step")
        state = jr.jit(buffer).add(buffer.init(example), first)
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        checkpointer = Checkpointer(path, buffer)
        checkpointer.save(state)
        larger = Checkpointer(path, dataclasses.replace(buffer, capacity=2 * LENGTH))

        return [
            lambda: checkpointer.save(state),
            lambda: checkpointer.restore(example),
            lambda: larger.restore(example),
        ]

    check_comparisons(calls)


def test_an_interrupt_at_a_random_moment_loses_nothing():
    for seconds in waits_before_interrupts():
        replay = items()

        def act(t, replay=replay):
            add(replay, COUNT + t)
            batch = replay.sample()
            replay.update_priorities(batch.index, np.ones(4))

        check_goes_on(replay, COUNT + num_calls_until_interrupt(act, seconds))


def test_an_interrupt_of_a_loop_around_jit_loses_nothing():
    jitted = jr.jit(jr.items(capacity=LENGTH, batch_size=4))
    for seconds in waits_before_interrupts():
        state = jitted.init(np.float32(0))

        def act(t):
            nonlocal state
            with jr.defer_interrupts():
                state = jitted.add(state, np.full(1, t, np.float32))

        num_added = num_calls_until_interrupt(act, seconds)
        check_whole(state, num_added)


def test_who_waits_is_interrupted_at_once():
    """A call may wait for samples that lag behind, or for another thread that has the lock."""
    replay = make(samples_per_insert=1.0, timeout=60.0, steps=1)
    has_lock, may_end = threading.Event(), threading.Event()

    def run_ahead():
        for t in range(1000):
            replay.add(step(t))

    def hold():
        with replay._monitor:
            has_lock.set()
            may_end.wait(60)

    start = time.monotonic()
    threading.Timer(0.3, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        run_ahead()
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(hold)
        has_lock.wait(60)
        threading.Timer(0.2, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            len(replay)
        assert time.monotonic() - start < 30
        may_end.set()
        held.result(60)
        assert thread.submit(len, replay).result(60) == len(replay)


def test_a_handler_that_saves_sees_whole_rows():
    """A preempted job gets SIGTERM: its handler saves, or ends the run by an exception."""
    replay, seen = items(), []

    def leave(number, frame):
        seen.append(numbers_of(replay._owner.state))
        raise KeyboardInterrupt

    def call():
        add(replay, 200)
        replay.sample()

    def check():
        check_handler_is_back()
        assert signal.getsignal(signal.SIGTERM) is leave
        while seen:
            assert seen.pop() == numbers_of(replay._owner.state)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        check_each_moment(lambda: (call, check), least=50, number=signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_block_runs_to_its_end_and_its_error_is_told_too():
    done = []

    def fails():
        with jr.defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            with jr.defer_interrupts():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
            raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        fails()
    assert isinstance(caught.value.__context__, ValueError)
    assert done == ["inner", "outer"]
    check_handler_is_back()


@pytest.mark.no_xla
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGXCPU"])
def test_a_handler_that_was_installed_between_two_blocks_waits(name):
    """A cluster's library may install the handler of its preemptions in the midst of a run."""
    number, came, done = getattr(signal, name), [], []
    with jr.defer_interrupts():
        pass
    before = signal.signal(number, lambda *_: came.append(len(done)))
    try:
        for _ in range(2):
            with jr.defer_interrupts():
                signal.raise_signal(number)
                done.append(1)
    finally:
        signal.signal(number, before)
    assert came == [1, 2]


def test_other_handlers_stay_as_they_are():
    calls = []

    def run(handler=None):
        with jr.defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert calls == []
            if handler:
                signal.signal(signal.SIGINT, handler)
        return signal.getsignal(signal.SIGINT)

    def handler_in_block():
        with jr.defer_interrupts():
            return signal.getsignal(signal.SIGINT)

    note = lambda number, frame: calls.append(number)
    before = signal.signal(signal.SIGINT, note)
    try:
        assert run() is note
        assert calls.pop() == signal.SIGINT
        assert run(signal.SIG_IGN) is signal.SIG_IGN  # a handler set in the block is kept
        calls.clear()
        assert run() is signal.SIG_IGN  # ignored, as it is without the block
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        handler_in_block()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
    with ThreadPoolExecutor(1) as thread:  # where no handler runs
        assert thread.submit(handler_in_block).result() is before


def test_an_interrupt_at_any_line_of_the_block_itself_leaves_the_handlers():
    values = []

    def block():
        with jr.defer_interrupts():
            values.append(1)
            values.append(2)

    def check():
        check_handler_is_back()
        assert values in ([], [1, 2])
        values.clear()

    check_each_moment(lambda: (block, check), least=20, every=1)
