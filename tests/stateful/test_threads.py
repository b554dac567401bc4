"""Many threads on one replay: rows are intact, neither side starves, and no call hangs."""

import contextlib
import functools
import gc
import os
import threading
import time
import weakref
import zlib

import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.buffers import memory
from jaxreplay.stateful.rate_limiter import RateLimiter
from tests.conftest import SOAK, thorough
from tests.support.refusals import refused
from tests.support.replays import (
    PRIORITIZED,
    damaged,
    have_few_lengths,
    make,
    output_of,
    step,
    unchanged,
)
from tests.support.sampling import assert_same

LONG = 400.0  # seconds; only a call that hangs takes longer


def in_threads(*functions):
    """Run the functions in threads, check that all end, and raise the first error of theirs."""
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(function,), daemon=True) for function in functions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG + (60 if SOAK else 0))
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_nothing_is_torn_and_the_ratio_holds():
    """8 threads add and 4 sample; each row carries the checksum of its bytes, and both counts are
    compared after every sample."""
    ratio, batch_size = 4.0, 32
    buffer = jr.items(capacity=8 * 50, num_envs=8, batch_size=batch_size, allow_mask=True)
    example = {
        "bytes": np.zeros(1000, np.uint8),
        "sum": np.uint32(0),
        "env": np.int32(0),
    }
    replay = jr.Replay(buffer, example=example, framework="numpy", samples_per_insert=ratio)
    start, added, drawn, distances = time.monotonic(), [0] * 8, [], []

    def is_over():
        """Count the work, since a machine may be slow; the soak also runs for a minute."""
        return len(drawn) >= 60 and min(added) > 5 and (not SOAK or time.monotonic() > start + 60)

    def adder(env):
        r = np.random.default_rng(env)
        memory = np.empty(1000, np.uint8)  # reused for every step
        while not is_over():
            memory[:] = r.integers(0, 256, 1000)
            memory[0] = env
            item = {"bytes": memory, "sum": np.uint32(zlib.crc32(memory)), "env": env}
            with contextlib.suppress(TimeoutError):  # at the end, when the samplers have stopped
                replay.add(item, env=env, timeout=0.2)
                added[env] += 1
            memory[:] = 0

    def check(batch):
        items = batch.experience
        assert batch.is_valid.all()
        assert (items["bytes"][:, 0] == items["env"]).all()
        assert [zlib.crc32(row) for row in items["bytes"]] == items["sum"].tolist()
        drawn.append(len(items["sum"]))
        with replay._monitor:
            limiter = replay._limiter
            distances.append(limiter.num_samples - ratio * limiter.num_inserts)

    def sampler():
        while not is_over():
            with contextlib.suppress(TimeoutError):  # at the end, when the adders have stopped
                check(replay.sample(timeout=0.2))

    in_threads(*(functools.partial(adder, env) for env in range(8)), *[sampler] * 4)
    assert replay._limiter.num_samples == sum(drawn)
    assert sum(added) - 1 <= replay._limiter.num_inserts <= sum(added)
    assert len(replay) == sum(min(count, 50) for count in added)
    assert max(distances) <= batch_size
    assert min(distances) >= -batch_size - ratio


def test_the_limiter_never_stops_both_sides():
    r = np.random.default_rng(0)
    for ratio in (0.01, 0.5, 1.0, 7.3, 300.0):
        limiter = RateLimiter(ratio, batch_size=32)
        for _ in range(2000):
            assert limiter.may_sample() or limiter.may_insert()
            if limiter.may_insert() and (r.random() < 0.5 or not limiter.may_sample()):
                limiter.num_inserts += 1
            else:
                limiter.num_samples += 32
            assert -32 - ratio <= limiter.num_samples - ratio * limiter.num_inserts <= 32


def test_who_is_ahead_waits_and_says_why():
    # of one step no row is sampleable: the ratio is not counted yet
    replay = make(samples_per_insert=4 / 3, timeout=0.05, steps=3)
    with (
        unchanged(replay),
        refused(
            "after 0.05 s: samples lag behind: sample, or lower samples_per_insert", TimeoutError
        ),
    ):
        replay.add(step(3))
    replay.sample()
    replay.sample()
    with refused(
        "after 0.01 s: inserts lag behind: add, or raise samples_per_insert", TimeoutError
    ):
        replay.sample(timeout=0.01)
    replay.add(step(3), timeout=float("inf"))


def test_batches_that_were_drawn_ahead_are_the_same():
    plain = make(seed=1, framework="numpy", steps=4)
    expected = [plain.sample() for _ in range(8)]
    for prefetch in (1, 3):
        with make(seed=1, framework="numpy", prefetch=prefetch, timeout=0.0, steps=4) as ahead:
            for batch in expected:
                assert ahead.can_sample()  # whoever polls draws ahead, too
                assert_same(ahead.sample(), batch)
            with refused("with prefetch every batch has the buffer's 8 items, not 4"):
                ahead.sample(4)
            ahead.clear()
            with refused("no batch can be sampled yet", TimeoutError):
                ahead.sample(timeout=0.05)
        with refused("this Replay is closed", RuntimeError):
            ahead.sample()


@pytest.mark.parametrize(
    ("rows", "ahead", "copy"),
    [
        ("device", 2, False),
        thorough("files", 1, False),
        thorough("files", 2, True),
        thorough("host", 0, False),
    ],
)
def test_batches_that_were_drawn_ahead_are_saved(rows, ahead, copy, tmp_path, monkeypatch):
    """Rows were added, and priorities changed, since they were drawn."""
    have_few_lengths(monkeypatch)
    made = lambda prefetch, folder: jr.Replay(
        make(**PRIORITIZED).buffer,
        seed=0,
        framework="numpy",
        prefetch=prefetch,
        rows=tmp_path / folder if rows == "files" else rows,
    )
    whole, stopped = made(2, "whole"), made(2, "stopped")

    for replay in (whole, stopped):
        for t in range(5):
            replay.add(step(t))
            if t > 1:
                batch = replay.sample()
                replay.update_priorities(batch.index, batch.experience.reward)
    stopped.save(tmp_path / "replay", extras={"weights": np.ones(3)}, copy=copy)
    stopped.close()
    again = made(ahead, "again" if copy else "stopped")
    again.load(tmp_path / "replay")
    for _ in range(4):
        assert_same(again.sample(), whole.sample())
    if rows == "files" and not copy:
        return
    smaller = jr.Replay(make(capacity=30, **PRIORITIZED).buffer)
    smaller.load(tmp_path / "replay")
    assert not smaller._ahead  # their indices mean other rows


@pytest.mark.parametrize("rows", [thorough("device"), "files"])
def test_batches_of_a_mixture_that_were_drawn_ahead_are_saved(rows, tmp_path):
    """Load without an example: it is that of the checkpoint, or of the files."""
    items = jr.items(capacity=16, batch_size=2)
    made = lambda folder: jr.Replay(
        jr.mix(a=(items, 2), b=(items, 2)),
        seed=0,
        framework="numpy",
        prefetch=2,
        rows={"a": tmp_path / folder if rows == "files" else rows, "b": "device"},
    )
    whole, stopped = made("whole"), made("stopped")
    for replay in (whole, stopped):
        for number in range(6):
            replay.add({"x": np.float32([number])}, member="a")
            replay.add({"x": np.float32([-number])}, member="b")
            if number > 1:
                replay.sample()
    stopped.save(tmp_path / "replay", copy=True)
    stopped.save(tmp_path / "replay")  # of rows in files the index alone
    stopped.close()
    again = made("stopped")
    again.load(tmp_path / "replay")
    for _ in range(4):
        assert_same(again.sample(), whole.sample())


@pytest.mark.parametrize("rows", ["device", thorough("host"), "files"])
def test_a_queue_loses_no_row_that_was_drawn_ahead_of_a_save(rows, tmp_path):
    queue = jr.items(capacity=8, batch_size=2, sampler=jr.Queue())
    made = lambda: jr.Replay(queue, prefetch=2, rows=tmp_path / "rows" if rows == "files" else rows)
    replay = made()
    for number in range(8):
        replay.add(np.float32([number]))
    assert replay.sample().experience.tolist() == [0, 1]
    for number in range(8, 13):  # in the places of rows that were drawn ahead
        replay.add(np.float32([number]))
    replay.save(tmp_path / "replay")
    replay.close()
    loaded = made()
    loaded.load(tmp_path / "replay")
    seen = [loaded.sample().experience.tolist() for _ in range(5)]
    assert seen == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    if rows != "files":
        larger = jr.Replay(jr.items(capacity=16, batch_size=2, sampler=jr.Queue()), rows=rows)
        with pytest.warns(UserWarning, match="sampled ahead of the save do not fit this buffer"):
            larger.load(tmp_path / "replay")
        assert larger.sample().experience.tolist() == [6, 7]


def check_wakes(replay, act, text):
    """Check that `act` ends calls that wait with a RuntimeError, at once."""
    waiting = threading.Barrier(3)

    def wait():
        waiting.wait(LONG)
        with refused(text, RuntimeError):
            replay.sample(timeout=LONG)

    def act_later():
        waiting.wait(LONG)
        time.sleep(0.05)
        act()

    start = time.monotonic()
    in_threads(wait, wait, act_later)
    assert time.monotonic() - start < LONG / 2


def test_a_load_that_loses_the_rows_wakes_what_waits_and_says_so(tmp_path, monkeypatch):
    """Memory is too small for both, and a file breaks after it was verified."""
    replay, path, mends = make(samples_per_insert=1.0, steps=1), tmp_path / "replay", []
    replay.save(path)

    def free_bytes():
        if replay._owner._state is not None:
            return 1
        mends.append(damaged(path))
        return 2**40

    def load():
        with refused(r"rows/.* is not as it was written"):
            replay.load(path)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "free_bytes", free_bytes)
        check_wakes(replay, load, "the rows were lost while saved ones were loaded")
    mends[0]()
    replay.load(path)
    replay.add(step(1))
    assert len(replay) == 3


def test_closing_ends_what_waits():
    replay = make(samples_per_insert=1.0)
    check_wakes(replay, replay.close, "this Replay is closed")
    with refused("this Replay is closed", RuntimeError):
        replay.add(step(0))
    replay.close()  # a second close has no effect


def test_a_worker_that_dies_leaves_no_lock():
    replay = make()

    def die():
        replay.add(step(0))
        replay.add(step(1) | {"action": np.zeros(3)})

    with refused("action"):
        in_threads(die)
    in_threads(lambda: replay.add(step(1)))
    assert len(replay) == 3


def test_a_replay_that_is_dropped_frees_its_rows():
    replay = make(prefetch=2, framework="numpy", steps=4)
    assert replay.sample().is_valid.all()
    rows = weakref.ref(replay._owner.state.rows.steps.reward)
    del replay
    gc.collect()
    assert rows() is None


FORKED = """
import os, sys, warnings

warnings.simplefilter("ignore")
import numpy as np, jaxreplay as jr

buffer = jr.items(capacity=10, batch_size=4, sampler=jr.Prioritized())
replay = jr.Replay(buffer, example=np.float32(0), prefetch=2)
calls = [
    lambda: replay.add(np.float32(1)),
    replay.sample,
    lambda: len(replay),
    replay.can_sample,
    replay.clear,
    lambda: replay.save("x"),
    lambda: replay.load("x"),
    lambda: replay.update_priorities({"row": [0], "lap": [0]}, [1.0]),
    replay.close,
]
calls[0]()
replay.sample(timeout=60)
if (pid := os.fork()) == 0:
    for call in calls:
        try:
            call()
            print("returned", call)
        except RuntimeError as error:
            assert "was forked from it" in str(error) and "spawn" in str(error), error
    sys.stdout.flush()
    os._exit(0)  # JAX's own end crashes here
assert os.waitpid(pid, 0)[1] == 0
calls[0]()
print("whole")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_gets_an_error_and_does_not_hang():
    assert output_of(FORKED) == "whole"
