"""Ctrl-C at any moment: it is raised, no row is lost or stored twice, and no later call hangs."""

import _thread
import dataclasses
import random
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay._util import signals
from jaxreplay.samplers import PrioritySampler
from tests.conftest import SOAK
from tests.support.interrupting import interrupted_at
from tests.support.replays import make, step

LENGTH = 64


def items(**options):
    """Return a replay whose items are single numbers, so that each row can be told apart."""
    buffer = jr.ReplayBuffer(
        capacity=LENGTH,
        num_envs=1,
        batch_size=4,
        sampler=options.pop("sampler", jr.Prioritized()),
        view=jr.views.Item(),
        autoreset=None,
    )
    return jr.Replay(buffer, example=np.float32(0), framework="numpy", **options)


def held(replay):
    """Return the stored numbers, the oldest first."""
    streams = replay._owner.state.streams
    return np.roll(streams.steps, -int(streams.head))[LENGTH - int(streams.filled) :].tolist()


def add(replay, number):
    replay.add(np.full(1, number, np.float32))


def check_goes_on(replay, num_added):
    """Check the replay after an interrupt: the row of the next number is stored intact or not at
    all, and all calls still work."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    numbers = held(replay)
    assert (
        numbers == [float(number) for number in range(num_added + 1)][-LENGTH:]
        or numbers == [float(number) for number in range(num_added)][-LENGTH:]
    )
    count = len(numbers)
    assert len(replay) == count
    add(replay, 1000)
    assert held(replay)[-1] == 1000
    batch = replay.sample()
    assert batch.is_valid.all()
    replay.update_priorities(batch.index, np.ones(4))
    if isinstance(replay.buffer.sampler, PrioritySampler):
        tree = replay._owner.state.sampler.tree.sums
        assert float(tree[-1].sum()) == pytest.approx(float(tree[0].sum()))


def each_moment(make_call, most=10**6):
    """Interrupt a call at each of its lines in turn, and return the number of interrupts.

    `make_call()` returns the call, and a function that checks what is stored afterwards.
    """
    nth, num_interrupted = 1, 0
    while nth < most:
        call, check = make_call()
        was = interrupted_at(
            call, nth, by_opcode=SOAK, counts=lambda frame: frame.f_code.co_filename != __file__
        )
        check()
        if was is None:
            break
        assert was, f"the signal at line {nth} was lost"
        num_interrupted += 1
        nth += 1
    return num_interrupted


@pytest.mark.parametrize(
    "what",
    ["add", "add of a block", "update_priorities", "sample", "add and sample", "clear", "pop"],
)
def test_an_interrupt_at_any_line_of_a_call_loses_nothing(what):
    replay, count = items(sampler=jr.Queue()) if what == "pop" else items(), 8
    taken = set()
    for number in range(count):
        add(replay, number)
    state = jax.tree.map(np.array, replay._owner.state)

    def make_call():
        replay._owner._state, replay._owner._can_sample = jax.tree.map(jnp.array, state), None
        if what in ("add", "add of a block"):
            shape = (1,) if what == "add" else (1, 1)
            return lambda: replay.add(np.full(shape, count, np.float32)), lambda: check_goes_on(
                replay, count
            )
        if what == "update_priorities":
            index = replay.sample().index
            return lambda: replay.update_priorities(index, np.full(4, 2.0)), lambda: check_goes_on(
                replay, count
            )
        if what == "add and sample":  # the step waits until the sample
            add(replay, count)
            return replay.sample, lambda: check_goes_on(replay, count)
        if what == "sample":
            return replay.sample, lambda: check_goes_on(replay, count)
        if what == "clear":
            return replay.clear, lambda: check_cleared(replay)
        return lambda: taken.update(replay.sample().experience.tolist()), check_taken

    def check_cleared(replay):
        assert len(replay) in (0, count)
        add(replay, 1)
        assert held(replay)[-1] == 1

    def check_taken():
        """Items that the interrupted call has sampled come with the next call."""
        while replay.can_sample():
            batch = replay.sample()
            taken.update(batch.experience[batch.is_valid].tolist())
        assert taken == set(map(float, range(count)))
        taken.clear()

    assert each_moment(make_call) > 50


@pytest.mark.parametrize("kind", ["ReplayBuffer", "PrioritizedReplayBuffer"])
def test_an_interrupt_at_any_line_of_a_drop_in_buffer_s_add_loses_nothing(kind):
    sb3 = pytest.importorskip("jaxreplay.sb3", reason="the sb3 extra is not installed")
    spaces = pytest.importorskip("gymnasium").spaces
    buffer = getattr(sb3, kind)(LENGTH, spaces.Box(-1, 1000, (1,)), spaces.Discrete(2), n_envs=1)
    number = 0

    def arguments(number):
        obs = np.full((1, 1), number, np.float32)
        return (
            obs,
            obs + 1,
            np.zeros(1, int),
            np.full(1, number, np.float32),
            np.zeros(1, bool),
            [{}],
        )

    def make_call():
        nonlocal number
        before = number

        def check():
            nonlocal number
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            number = buffer.pos + (LENGTH if buffer.full else 0) if number < LENGTH else number
            size = buffer.size()
            rewards = {float(x) for x in buffer.sample(2000).rewards}
            newest = max(rewards)
            assert newest in (before, before - 1)
            number = int(newest) + 1
            assert size == min(number, LENGTH)
            assert rewards == set(map(float, range(number - size, number)))

        return lambda: buffer.add(*arguments(before)), check

    buffer.add(*arguments(0))
    number = 1
    assert each_moment(make_call, most=10**6 if SOAK else 250) > 100


@pytest.mark.parametrize(
    "kind", ["Replay", "ReplayBuffer", "PrioritizedReplayBuffer", "HerReplayBuffer", "Checkpointer"]
)
def test_an_interrupt_while_buffers_are_compared_is_one(kind, tmp_path):
    """JAX finds a compiled program by comparing buffers, and treats what `__eq__` raises as an
    error of the buffer."""

    def calls():
        """Return calls in sequence, on a new buffer that equals the previous one."""
        if kind == "Replay":
            replay = items()
            for number in range(8):
                add(replay, number)
            batch = replay.sample()
            weights = lambda: replay.sample(beta=0.5)
            update = lambda: replay.update_priorities(batch.index, np.ones(4))
            return [
                lambda: add(replay, 8),
                replay.sample,
                update,
                weights,
                lambda: len(replay),
                replay.can_sample,
                replay.clear,
            ]
        if kind == "Checkpointer":
            checkpoint = pytest.importorskip(
                "jaxreplay.checkpoint", reason="the checkpoint extra is not installed"
            )
            buffer = jr.uniform(capacity=LENGTH, num_envs=1, batch_size=4, autoreset="next_step")
            first = jr.Step(**step(0, (1,)))
            example = jax.tree.map(lambda leaf: leaf[0], first)
            state = jr.jit(buffer).add(buffer.init(example), first)
            path = tmp_path / str(len(list(tmp_path.iterdir())))
            checkpointer = checkpoint.Checkpointer(path, buffer)
            checkpointer.save(state)
            advance = lambda: (
                checkpointer.save(state, blocking=False),
                checkpointer.advance(state),
                checkpointer.wait_until_finished(state),
            )
            larger = checkpoint.Checkpointer(path, dataclasses.replace(buffer, capacity=2 * LENGTH))
            resized = lambda: larger.restore(example, resize=True)
            return [
                lambda: checkpointer.save(state),
                advance,
                lambda: checkpointer.restore(example),
                resized,
            ]
        sb3 = pytest.importorskip("jaxreplay.sb3", reason="the sb3 extra is not installed")
        spaces = pytest.importorskip("gymnasium").spaces
        if kind == "HerReplayBuffer":
            goals = pytest.importorskip("tests.sb3.test_sb3_hindsight")
            buffer, obs, action = (
                goals.make(LENGTH),
                dict.fromkeys(goals.SPACE, np.zeros((1, 1))),
                np.zeros((1, 2)),
            )
        else:
            buffer = getattr(sb3, kind)(
                LENGTH, spaces.Box(-1, 1000, (1,)), spaces.Discrete(2), n_envs=1
            )
            obs, action = np.zeros((1, 1), np.float32), np.zeros(1, int)

        def go(is_done):
            buffer.add(obs, obs, action, np.zeros(1, np.float32), np.full(1, is_done), [{}])

        go(False)
        go(True)
        found = [lambda: go(False), lambda: buffer.sample(4), buffer.reset]
        if kind == "PrioritizedReplayBuffer":
            indices = buffer.sample(4).indices
            found.insert(2, lambda: buffer.update_priorities(indices, np.ones(4)))
        return found

    def is_of_a_buffer(frame):
        """Return whether a frame is a buffer's `__eq__`.

        JAX itself is not made for interrupts: nothing is lost there, but other errors come out.
        """
        return frame.f_code.co_name == "__eq__" and frame.f_code.co_filename == "<string>"

    for call in calls():  # compiles
        call()
    num_interrupted = 0
    for which in range(len(calls())):
        for nth in range(1, 200):
            if not interrupted_at(calls()[which], nth, counts=is_of_a_buffer):
                break
            num_interrupted += 1
    assert num_interrupted > 3


def run_until_interrupted(act, seconds):
    """Call `act(t)` until Ctrl-C comes after `seconds`, and return the number of completed
    calls."""
    has_begun, t = threading.Event(), 0

    def interrupt():
        has_begun.wait()
        time.sleep(seconds)
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        has_begun.set()
        while True:
            act(t)
            t += 1
    except KeyboardInterrupt:
        return t


@pytest.mark.parametrize("owner", ["Replay", "SB3", "jit"])
def test_an_interrupt_at_a_random_moment_loses_nothing(owner):
    """A loop of adds, samples and updates; the soak interrupts each kind of owner 2,000 times."""
    r = random.Random(owner)
    for _ in range(2000 if SOAK else 60):
        seconds = r.random() * 0.02
        if owner == "Replay":
            replay = items()

            def act(t, replay=replay):
                add(replay, t)
                batch = replay.sample()
                replay.update_priorities(batch.index, np.ones(4))

            act(0)
            count = run_until_interrupted(lambda t, act=act: act(t + 1), seconds) + 1
            check_goes_on(replay, count)
        elif owner == "SB3":
            sb3 = pytest.importorskip("jaxreplay.sb3", reason="the sb3 extra is not installed")
            spaces = pytest.importorskip("gymnasium").spaces
            buffer = sb3.ReplayBuffer(
                LENGTH, spaces.Box(-1, 10_000, (1,)), spaces.Discrete(2), n_envs=1
            )

            def act_sb3(t, buffer=buffer):
                obs = np.full((1, 1), t, np.float32)
                buffer.add(
                    obs,
                    obs + 1,
                    np.zeros(1, int),
                    np.full(1, t, np.float32),
                    np.zeros(1, bool),
                    [{}],
                )
                buffer.sample(4)

            act_sb3(0)
            count = run_until_interrupted(lambda t, act=act_sb3: act(t + 1), seconds) + 1
            rewards = {float(x) for x in buffer.sample(2000).rewards}
            assert max(rewards) in (count, count - 1)
            act_sb3(int(max(rewards)) + 1)
        else:
            jitted = jr.jit(jr.items(capacity=LENGTH, batch_size=4))
            state = jitted.init(np.float32(0))

            def act_jit(t, jitted=jitted):
                nonlocal state
                with jr.defer_interrupts():
                    state = jitted.add(state, np.full(1, t, np.float32))

            count = run_until_interrupted(act_jit, seconds)
            streams = state.streams
            numbers = np.roll(streams.steps, -int(streams.head))[
                LENGTH - int(streams.filled) :
            ].tolist()
            assert numbers in (
                [float(t) for t in range(count + 1)][-LENGTH:],
                [float(t) for t in range(count)][-LENGTH:],
            )


def test_who_waits_is_interrupted_at_once():
    """A call may wait for samples that lag behind, or for another thread that has the lock."""
    replay = make(samples_per_insert=1.0, timeout=60.0)
    replay.add(step(0))  # compiled and stored before the interrupt comes
    start = time.monotonic()

    def run_ahead():
        threading.Timer(1.0, _thread.interrupt_main).start()
        for t in range(1000):
            replay.add(step(t))

    with pytest.raises(KeyboardInterrupt):
        run_ahead()
    assert time.monotonic() - start < 30
    has_lock, may_end = threading.Event(), threading.Event()

    def hold():
        with replay._monitor:
            has_lock.set()
            may_end.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    has_lock.wait(60)
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        len(replay)
    may_end.set()
    holder.join()
    assert len(replay) > 0
    in_another_thread = []
    other = threading.Thread(target=lambda: in_another_thread.append(len(replay)))
    other.start()
    other.join(60)
    assert in_another_thread


def test_a_handler_that_saves_sees_whole_rows(tmp_path):
    """A preempted job gets SIGTERM: its handler saves, or ends the run by an exception."""
    replay, seen = items(), []

    def leave(number, frame):
        seen.append(held(replay))
        raise SystemExit(number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        for number in range(200):  # handlers are looked up again only after a number of calls
            add(replay, number)
        call = lambda: add(replay, 200)
        for nth in range(1, 10**6):
            count = 0

            def trace(frame, event, _, nth=nth):
                nonlocal count
                count += event == "line"
                if event == "line" and count == nth:
                    sys.settrace(None)
                    signal.raise_signal(signal.SIGTERM)
                return trace

            sys.settrace(trace)
            try:
                call()
            except SystemExit:
                assert seen[-1] == held(replay)
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
                continue
            finally:
                sys.settrace(None)
            break
        assert len(seen) > 30
        assert signal.getsignal(signal.SIGTERM) is leave
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_loop_around_jit_is_safe_in_a_block():
    done = []

    def loop():
        with jr.defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            with jr.defer_interrupts():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_and_an_interrupt_are_both_told():
    def fails():
        with jr.defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        fails()
    assert isinstance(caught.value.__context__, ValueError)


def test_other_handlers_stay_as_they_are():
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with jr.defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert calls == []
        assert calls == [signal.SIGINT]
        with jr.defer_interrupts():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a handler set in the block is kept
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with jr.defer_interrupts():
            signal.raise_signal(signal.SIGINT)  # ignored, as it is without the block
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with jr.defer_interrupts():
            pass
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
    in_thread = []

    def run():
        with jr.defer_interrupts():
            in_thread.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert in_thread == [signal.default_int_handler]


def test_an_interrupt_at_any_line_of_the_block_itself_leaves_the_handlers():
    for nth in range(1, 10**4):
        value = None

        def block():
            nonlocal value
            with signals.defer_interrupts():
                value = 1
                value = 2

        was = interrupted_at(block, nth)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert value in (None, 2)
        if was is None:
            break
        assert was
    assert nth > 20
