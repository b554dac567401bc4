"""Many threads on one replay: rows are intact, neither side starves, and no call hangs."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
import zlib

import jax
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.buffers import memory
from jaxreplay.stateful.rate_limiter import RatioLimiter
from tests.conftest import SOAK
from tests.support.replays import make, rows_of, step

LONG = 120.0  # seconds; only a call that hangs takes longer


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
        "sum": np.zeros((), np.uint32),
        "env": np.zeros((), np.int32),
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
            try:
                replay.add(
                    {"bytes": memory, "sum": np.uint32(zlib.crc32(memory)), "env": env},
                    env=env,
                    timeout=0.2,
                )
            except TimeoutError:
                continue  # at the end, when the samplers have stopped
            memory[:] = 0
            added[env] += 1

    def sampler():
        while not is_over():
            try:
                batch = replay.sample(timeout=0.2)
            except TimeoutError:
                continue  # at the end, when the adders have stopped
            items = batch.experience
            assert batch.is_valid.all()
            assert (items["bytes"][:, 0] == items["env"]).all()
            assert [zlib.crc32(row) for row in items["bytes"]] == items["sum"].tolist()
            drawn.append(len(items["sum"]))
            with replay._monitor:
                limiter = replay._limiter
                distances.append(limiter.num_samples - ratio * limiter.num_inserts)

    in_threads(*(lambda env=env: adder(env) for env in range(8)), *[sampler] * 4)
    assert replay._limiter.num_samples == sum(drawn)
    assert sum(added) - 1 <= replay._limiter.num_inserts <= sum(added)
    assert len(replay) == sum(min(count, 50) for count in added)
    assert max(distances) <= batch_size
    assert min(distances) >= -batch_size - ratio


def test_the_limiter_never_stops_both_sides():
    r = np.random.default_rng(0)
    for ratio in (0.01, 0.5, 1.0, 7.3, 300.0):
        limiter = RatioLimiter(ratio, batch_size=32)
        for _ in range(2000):
            assert limiter.may_sample() or limiter.may_insert()
            if limiter.may_insert() and (r.random() < 0.5 or not limiter.may_sample()):
                limiter.num_inserts += 1
            else:
                limiter.num_samples += 32
            assert -32 - ratio <= limiter.num_samples - ratio * limiter.num_inserts <= 32
    for ratio in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="samples_per_insert must be a positive number"):
            make(samples_per_insert=ratio)


def test_who_is_ahead_waits_and_says_why():
    replay = make(num_envs=1, samples_per_insert=4.0, timeout=0.05)
    replay.add(step(0, (1,)))  # no row is sampleable: the ratio is not counted yet
    replay.add(step(1, (1,)))
    replay.add(step(2, (1,)))
    before = rows_of(replay)
    with pytest.raises(
        TimeoutError, match=r"after 0.05 s: samples lag behind: sample, or lower samples_per_insert"
    ):
        replay.add(step(3, (1,)))
    for x, y in zip(before, rows_of(replay), strict=True):
        np.testing.assert_array_equal(x, y)
    replay.sample()
    replay.sample()
    with pytest.raises(
        TimeoutError, match=r"after 0.01 s: inserts lag behind: add, or raise samples_per_insert"
    ):
        replay.sample(timeout=0.01)
    replay.add(step(3, (1,)))


@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_that_were_drawn_ahead_are_the_same(prefetch):
    plain = make(seed=1, example=jax.tree.map(lambda x: x[0], step(0)))
    for t in range(10):
        plain.add(step(t))
    with make(seed=1, prefetch=prefetch, example=jax.tree.map(lambda x: x[0], step(0))) as ahead:
        ahead.add(jax.tree.map(lambda *x: np.stack(x), *(step(t) for t in range(10))))
        for _ in range(8):
            for x, y in zip(
                jax.tree.leaves(plain.sample()), jax.tree.leaves(ahead.sample()), strict=True
            ):
                np.testing.assert_array_equal(x, y)
        assert ahead.can_sample()
        with pytest.raises(
            ValueError, match="with prefetch every batch has the buffer's 8 items, not 4"
        ):
            ahead.sample(4)
        ahead.clear()
        with pytest.raises(TimeoutError, match="no batch can be sampled yet"):
            ahead.sample(timeout=0.05)
    with pytest.raises(RuntimeError, match="this Replay is closed"):
        ahead.sample()


def test_a_failed_load_wakes_what_waits(tmp_path, monkeypatch):
    replay, waiting = make(samples_per_insert=1.0, timeout=LONG), threading.Event()
    replay.add(step(0))
    replay.save(tmp_path / "replay")

    def free_bytes():
        """Leave no room for both, and damage a file between its two reads."""
        if replay._owner._state is not None:
            return 1
        next((tmp_path / "replay").rglob("steps.reward/c.0")).write_bytes(b"broken")
        return 2**40

    monkeypatch.setattr(memory, "free_bytes", free_bytes)

    def wait():
        waiting.set()
        with pytest.raises(RuntimeError, match="the rows were lost while saved ones were loaded"):
            replay.sample()

    def load():
        assert waiting.wait(LONG)
        time.sleep(0.05)
        with pytest.raises(ValueError, match=r"steps\.reward/c\.0"):
            replay.load(tmp_path / "replay")

    start = time.monotonic()
    in_threads(wait, load)
    assert time.monotonic() - start < LONG / 2


def test_who_polls_draws_ahead_too():
    with make(prefetch=1, timeout=0.0) as replay:
        for t in range(4):
            replay.add(step(t))
        for _ in range(30):
            assert replay.can_sample()
            assert replay.sample().is_valid.all()
    with pytest.raises(ValueError, match="prefetch must be an int of at least 0, got -1"):
        make(prefetch=-1)


def test_closing_ends_what_waits():
    replay = make(samples_per_insert=1.0, timeout=LONG)
    waiting = threading.Event()

    def wait():
        waiting.set()
        with pytest.raises(RuntimeError, match="this Replay is closed"):
            replay.sample()

    def close():
        assert waiting.wait(LONG)
        time.sleep(0.05)
        replay.close()

    in_threads(wait, wait, close)
    with pytest.raises(RuntimeError, match="this Replay is closed"):
        replay.add(step(0))
    replay.close()  # a second close has no effect


def test_a_worker_that_dies_leaves_no_lock():
    replay = make(allow_mask=True)

    def die():
        replay.add(step(0))
        replay.add({**step(1), "action": np.zeros(3)})

    with pytest.raises(ValueError, match="action"):
        in_threads(die)
    in_threads(lambda: replay.add(step(1)))
    assert len(replay) == 3


def test_a_program_may_end_without_closing():
    code = """
import numpy as np, jaxreplay as jr
replay = jr.Replay(jr.items(capacity=10, batch_size=4), prefetch=2)
replay.add({"x": np.zeros((1, 3))})
print(replay.sample().experience["x"].shape)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=4 * LONG
    )
    assert (done.returncode, done.stdout.strip()) == (0, "(4, 3)"), done.stderr


def test_a_replay_that_is_dropped_frees_its_rows():
    replay = make(prefetch=2)
    for t in range(4):
        replay.add(step(t))
    assert replay.sample().is_valid.all()
    rows = weakref.ref(replay._owner.state.streams.steps.reward)
    del replay
    gc.collect()
    assert rows() is None


FORKED = """
import os, sys, warnings

warnings.simplefilter("ignore")
import numpy as np, jaxreplay as jr

kind = sys.argv[1]
if kind == "sb3":
    from gymnasium import spaces
    from jaxreplay import sb3

    replay = sb3.ReplayBuffer(10, spaces.Box(-1, 1, (1,)), spaces.Discrete(2))
    obs = np.zeros((1, 1), np.float32)
    add = lambda: replay.add(obs, obs, np.zeros(1, int), np.zeros(1), np.zeros(1, bool), [{}])
    calls = (add, lambda: replay.sample(2), replay.reset)
else:
    replay = jr.Replay(
        jr.prioritized(capacity=10, num_envs=1, batch_size=4, autoreset="next_step"),
        prefetch=int(kind),
    )
    flag, zero = np.zeros(1, bool), np.zeros(1)
    add = lambda: replay.add(obs=zero, action=zero, reward=zero, terminated=flag, truncated=flag)
    calls = (
        add,
        replay.sample,
        lambda: len(replay),
        replay.can_sample,
        replay.clear,
        lambda: replay.save("x"),
        lambda: replay.load("x"),
    )
    calls += (lambda: replay.update_priorities({"row": [0], "lap": [0]}, [1.0]), replay.close)
for _ in range(3):
    add()
replay.sample(2) if kind == "sb3" else replay.sample(timeout=60)
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
add()
print("whole")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("kind", ["0", "2", "sb3"])
def test_a_forked_process_gets_an_error_and_does_not_hang(kind):
    if kind == "sb3":
        pytest.importorskip("jaxreplay.sb3", reason="the sb3 extra is not installed")
    done = subprocess.run(
        [sys.executable, "-c", FORKED, kind], capture_output=True, text=True, timeout=4 * LONG
    )
    assert (done.returncode, done.stdout.strip()) == (0, "whole"), done.stderr


@pytest.mark.parametrize("wrong", [float("nan"), -1, "1", True])
def test_a_time_to_wait_is_a_number(wrong):
    with pytest.raises(
        ValueError, match="Replay: timeout must be a number of seconds, at least 0, got"
    ):
        make(timeout=wrong)
    replay = make(samples_per_insert=1.0)
    for call in (lambda: replay.add(step(0), timeout=wrong), lambda: replay.sample(timeout=wrong)):
        with pytest.raises(ValueError, match=r"(add|sample): timeout must be a number of seconds"):
            call()
    replay.add(step(0), timeout=float("inf"))
