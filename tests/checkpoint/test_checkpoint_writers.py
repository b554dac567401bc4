"""Tests of the single writer of a path: a second one is refused at once and told of the first,
a dead one is succeeded, and rows of two runs never mix."""

import contextlib
import errno
import gc
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
import warnings

import jax
import numpy as np
import pytest

from tests.conftest import SOAK
from tests.support import checkpointed_run
from tests.support.checkpointed_run import EXAMPLE, added, expected, items, numbers

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer, PathInUseError, chain

WHOAMI = chain.whoami
HERE = pathlib.Path(checkpointed_run.__file__).parent


def running(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE,
    )


@pytest.fixture(params=["folder", "memory"])
def where(request, tmp_path):
    return tmp_path if request.param == "folder" else f"memory://{tmp_path.name}"


@pytest.fixture
def delay_of_commit(monkeypatch):
    """Return a function that delays the commits of a Checkpointer, and returns an event.

    A save commits when the event is set, or after 60 seconds.
    """

    def of(checkpointer):
        may, commit = threading.Event(), checkpointer._chain.commit
        monkeypatch.setattr(
            checkpointer._chain, "commit", lambda manifest: (may.wait(60), commit(manifest))
        )
        return may

    return of


def test_a_second_writer_is_refused_and_told_who_is_the_first(where):
    replay = items()
    one, other = Checkpointer(where, replay), Checkpointer(where, replay)
    state = added(replay, replay.init(EXAMPLE), 0, 4)
    one.save(state, 4)
    said = (
        rf"is being written to by this process, host .*, pid {os.getpid()}, program .*, since "
        r"20..-.*: close\(\) that Checkpointer first"
    )
    for wait in (True, False):
        with pytest.raises(PathInUseError, match=said):
            other.save(state, 5, blocking=wait)
    assert numbers(replay, other.restore(EXAMPLE)) == expected(replay, 4)  # readers need no lock
    assert [found.problems for found in other.verify()] == [[]]
    with pytest.raises(PathInUseError, match="two writers would mix their files"):
        checkpoint.save(where, replay, state)
    one.save(added(replay, state, 4, 1), 5)
    one.close()
    other.save(state := added(replay, other.restore(EXAMPLE), 5, 1), 6)
    with pytest.raises(PathInUseError):
        one.save(state, 7)
    other.close()
    one.save(state, 7)
    assert one.all_steps() == [5, 6, 7]
    assert numbers(replay, one.restore(EXAMPLE)) == expected(replay, 6)


def test_who_is_gone_holds_nothing(where):
    """Release the path of a Checkpointer that is deleted, fails before its save, or fails in a
    `with` block."""
    replay = items()
    state = added(replay, replay.init(EXAMPLE), 0, 4)
    one = Checkpointer(where, replay)
    one.save(state, 1)
    del one
    gc.collect()
    other = Checkpointer(where, replay)
    with pytest.raises(TypeError, match="JSON"):
        other.save(state, 2, metadata={"x": object()})
    with Checkpointer(where, replay) as third:
        third.save(state, 2)
    with contextlib.suppress(ZeroDivisionError), Checkpointer(where, replay) as fourth:
        fourth.save(state, 3, blocking=False)
        raise ZeroDivisionError
    other.save(state, 4)
    assert other.all_steps()[-1] == 4


HOLDS = """
import sys, time
import checkpointed_run as run
from jaxreplay.checkpoint import Checkpointer

checkpointer = Checkpointer(sys.argv[1], run.REPLAY)
checkpointer.save(run.added(run.REPLAY, run.REPLAY.init(run.EXAMPLE), 0, 3), 3)
print("saved", flush=True)
time.sleep(1000)
"""


def test_the_lock_dies_with_its_process(tmp_path):
    replay = checkpointed_run.REPLAY
    with running(HOLDS, tmp_path) as other:
        assert other.stdout.readline() == "saved\n"
        mine = Checkpointer(tmp_path, replay)
        state = added(replay, mine.restore(EXAMPLE), 3, 2)
        with pytest.raises(
            PathInUseError,
            match=rf"by host .*, pid {other.pid}, program -c, since .*give each run a path of its "
            r"own",
        ):
            mine.save(state, 5)
        other.kill()
    mine.save(state, 5)
    assert numbers(replay, Checkpointer(tmp_path, replay).restore(EXAMPLE)) == expected(replay, 5)


FORKS = r"""
import os, sys, time, warnings
import checkpointed_run as run
from jaxreplay.checkpoint import Checkpointer

warnings.simplefilter("ignore")  # of JAX, about the fork
checkpointer = Checkpointer(sys.argv[1], run.REPLAY)
state = run.added(run.REPLAY, run.REPLAY.init(run.EXAMPLE), 0, 3)
checkpointer.save(state, 3)
if not os.fork():
    checkpointer.close()  # the path stays with the parent
    for call in (lambda: checkpointer.save(state, 4), lambda: checkpointer.restore(run.EXAMPLE)):
        try:
            call()
        except RuntimeError as error:
            os.write(1, f"{error}\n".encode())  # in one piece: both write here
    time.sleep(1000)
os.write(1, f"{os.getpid()}\n".encode())
time.sleep(1000)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_is_refused_and_does_not_keep_its_parent_s_lock(tmp_path):
    replay = checkpointed_run.REPLAY
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE,
        process_group=0,
    ) as parent:
        lines = [parent.stdout.readline() for _ in range(3)]
        said = [line for line in lines if not line.strip().isdigit()]
        assert len(said) == 2
        assert all("spawn" in line for line in said), said
        mine = Checkpointer(tmp_path, replay)
        state = mine.restore(EXAMPLE)
        with pytest.raises(PathInUseError):
            mine.save(state, 4)
        parent.kill()
        parent.wait()
        mine.save(state, 4)  # the child is still alive
        os.killpg(parent.pid, 9)


IN_TURN = """
import sys, time
import checkpointed_run as run
from jaxreplay.checkpoint import Checkpointer, PathInUseError

start, rounds, num_saved, num_refused = int(sys.argv[2]), int(sys.argv[3]), 0, 0
state = run.added(run.REPLAY, run.REPLAY.init(run.EXAMPLE), start, 5)
end = start + 5
while num_saved < rounds:
    checkpointer = Checkpointer(
        sys.argv[1], run.REPLAY, max_to_keep=1 + num_saved % 3, chunk_bytes=2000
    )
    try:
        for _ in range(2):
            checkpointer.save(state, num_saved, blocking=num_saved % 2 == 0)
            state, end = (
                run.added(run.REPLAY, state, end, 1) if num_saved % 2 == 0 else state,
                end + (num_saved % 2 == 0),
            )
            checkpointer.wait_until_finished(state)
        num_saved += 1
        checkpointer.close()
    except PathInUseError:
        num_refused += 1
    time.sleep(0.002 * (num_refused % 7))
print(num_saved, num_refused)
"""


def checked(replay, state, starts, may_be_full=False):
    """Check that all rows are of one run, and return its start.

    The rows begin at the start; with `may_be_full` also later, if the rings are full.
    """
    found = numbers(replay, state)
    first = found[0][0]
    is_full = may_be_full and len(found[0]) == replay.capacity // replay.num_envs
    own = [start for start in starts if first == start or (is_full and start < first < start + 500)]
    assert own, found[0]
    assert found == [
        [1_000_000 * env + t for t in range(first, first + len(found[0]))]
        for env in range(replay.num_envs)
    ]
    return own[0]


def test_two_processes_that_write_to_one_path_never_mix(tmp_path):
    """Save from two processes while a reader restores: each restored state is one run's, intact."""
    replay, rounds, seen = checkpointed_run.REPLAY, 200 if SOAK else 20, []
    with (
        running(IN_TURN, tmp_path, 0, rounds) as one,
        running(IN_TURN, tmp_path, 50_000, rounds) as other,
    ):
        while one.poll() is None or other.poll() is None:
            try:
                seen.append(
                    checked(
                        replay,
                        checkpoint.restore(tmp_path, replay, EXAMPLE),
                        (0, 50_000),
                        may_be_full=True,
                    )
                )
            except FileNotFoundError:  # before the first save
                assert not seen
                time.sleep(0.01)
        said = [tuple(map(int, run.stdout.read().split())) for run in (one, other)]
    assert [num_saved for num_saved, _ in said] == [rounds, rounds]
    assert sum(num_refused for _, num_refused in said)
    assert set(seen) == {0, 50_000}
    assert all(not found.problems for found in checkpoint.verify(tmp_path))


@pytest.mark.parametrize("kind", ["Replay", "Checkpointer"])
def test_two_threads_that_write_to_one_path_never_mix(kind, where):
    replay, num_rounds, refused = items(), 150 if SOAK else 20, []

    def save_of(start):
        if kind == "Replay":
            owner = jr.Replay(
                replay, example=jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), EXAMPLE)
            )
            for t in range(start, start + 20):
                owner.add(checkpointed_run.step(t, 4))
            return lambda: owner.save(where)
        state = added(replay, replay.init(EXAMPLE), start, 20)

        def save():
            with Checkpointer(where, replay, max_to_keep=2, chunk_bytes=1000) as checkpointer:
                checkpointer.save(state)

        return save

    def run(save, barrier, num_saved):
        barrier.wait()
        try:
            save()
            num_saved.append(1)
        except PathInUseError:
            refused.append(1)

    saves = [save_of(start) for start in (0, 500)]
    for _ in range(num_rounds):
        barrier, num_saved = threading.Barrier(2), []
        threads = [threading.Thread(target=run, args=(save, barrier, num_saved)) for save in saves]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert num_saved
        checked(replay, checkpoint.restore(where, replay, EXAMPLE), (4, 504))
    assert refused


@pytest.mark.parametrize("has_links", [True, False])
def test_of_two_first_saves_one_counts(has_links, where, monkeypatch, delay_of_commit):
    """Begin to save twice on an empty path: neither writer sees the other, and the second is told
    at its end. None of its rows is left."""
    if not has_links:

        def link(*_):
            raise OSError(errno.EOPNOTSUPP, "no hard links")

        monkeypatch.setattr(os, "link", link)
    replay = items()
    one, other = Checkpointer(where, replay), Checkpointer(where, replay)
    states = [added(replay, replay.init(EXAMPLE), start, 4) for start in (0, 500)]
    may_commit = delay_of_commit(one)
    one.save(states[0], 1, blocking=False)
    other.save(states[1], 2)
    may_commit.set()
    with pytest.raises(PathInUseError, match="this process"):
        one.wait_until_finished(states[0])
    assert one.all_steps() == [2]
    assert numbers(replay, one.restore(EXAMPLE))[0] == list(range(500, 504))
    one.close()
    other.close()
    other.save(added(replay, states[1], 504, 1), 3)
    named = {group.folder for one in other._chain.read()[0] for group in one.groups}
    assert set(other._store.entries("rows")) == named


def test_a_writer_that_is_late_by_many_does_not_count(where, delay_of_commit):
    """Commit a number whose manifest was there, and is deleted since."""
    replay = items()
    one, other = (Checkpointer(where, replay, max_to_keep=1) for _ in range(2))
    states = [added(replay, replay.init(EXAMPLE), start, 4) for start in (0, 500)]
    may_commit = delay_of_commit(one)
    one.save(states[0], 1, blocking=False)
    for step in (2, 3):
        other.save(states[1], step)
    may_commit.set()
    with pytest.raises(PathInUseError, match="this process"):
        one.wait_until_finished(states[0])
    assert other.all_steps() == [3]
    assert other.verify()[0].problems == []


def test_a_manifest_that_cannot_be_deleted_keeps_what_it_names(tmp_path, monkeypatch):
    replay = items()
    with Checkpointer(tmp_path, replay, max_to_keep=1) as checkpointer:
        state = added(replay, replay.init(EXAMPLE), 0, 20)
        checkpointer.save(state, 1)
        delete = checkpointer._store.delete

        def broken(name):
            if name.startswith("manifests"):
                raise OSError(errno.EACCES, "not allowed")
            delete(name)

        monkeypatch.setattr(checkpointer._store, "delete", broken)
        with pytest.warns(UserWarning, match="no longer needed, but cannot be deleted"):
            checkpointer.save(added(replay, state, 20, 20), 2)
        assert checkpointer.all_steps() == [1, 2]
        assert not any(one.problems for one in checkpointer.verify())
        monkeypatch.undo()
        checkpointer.save(checkpointer.restore(EXAMPLE), 3)
        assert checkpointer.all_steps() == [3]


def test_a_writer_that_has_left_holds_nothing_though_its_file_stays(tmp_path, monkeypatch):
    replay = items()
    state = added(replay, replay.init(EXAMPLE), 0, 20)
    one = Checkpointer(tmp_path, replay)
    one.save(state, 1)
    monkeypatch.setattr(one._store, "delete", lambda name: os.stat("/nowhere"))
    one.close()
    assert [*(tmp_path / "writers").iterdir()]
    with Checkpointer(tmp_path, replay) as other:
        other.save(state, 2)
        assert other.all_steps() == [1, 2]


def test_an_error_after_the_commit_is_not_said_to_be_of_another_writer(tmp_path, monkeypatch):
    replay = items()
    state = added(replay, replay.init(EXAMPLE), 0, 20)
    checkpointer = Checkpointer(tmp_path, replay)
    create = checkpointer._store.create

    def created(name, content):
        create(name, content)
        if name.startswith("manifests"):
            raise FileNotFoundError(errno.ENOENT, "not there")

    monkeypatch.setattr(checkpointer._store, "create", created)
    with pytest.raises(FileNotFoundError, match="not there"):
        checkpointer.save(state, 1)
    monkeypatch.undo()
    checkpointer.save(state, 2)
    assert checkpointer.all_steps() == [1, 2]


def test_a_writer_whose_files_are_deleted_is_told_of_the_other(tmp_path, monkeypatch):
    """Save three newer checkpoints before the first of its files is on the disk."""
    replay = items()
    one, other = (Checkpointer(tmp_path, replay, max_to_keep=1) for _ in range(2))
    states = [added(replay, replay.init(EXAMPLE), start, 4) for start in (0, 500)]
    fsync, once = os.fsync, threading.Semaphore()

    def late(descriptor):
        if once.acquire(blocking=False):
            for step in range(3):
                other.save(states[1], step)
            for path in {*tmp_path.glob("r*/*")} - {
                tmp_path / name for name in other._base.files()
            }:
                shutil.rmtree(path)
        fsync(descriptor)

    enter = one._chain.enter

    def entered(*given):
        folder = enter(*given)
        monkeypatch.setattr(os, "fsync", late)
        return folder

    monkeypatch.setattr(one._chain, "enter", entered)
    with pytest.raises(PathInUseError, match="this process"):
        one.save(states[0], 9)
    assert other.all_steps() == [2]


def test_a_collection_leaves_what_may_still_count(where):
    """Pause a writer at each of its steps, while another saves and collects: whatever is listed in
    between is intact."""
    replay, states = (
        items(),
        [added(items(), items().init(EXAMPLE), start, 4) for start in (0, 500)],
    )
    steps_of_a_save = (("read", "_chain"), ("enter", "_chain"), ("write", "_store"))
    steps_of_a_save += (("create", "_store"), ("entries", "_store"))
    for (name, owner), leaves in itertools.product(steps_of_a_save, (False, True)):
        one, other = (Checkpointer(where, replay, max_to_keep=1) for _ in range(2))
        real, once = getattr(getattr(one, owner), name), threading.Semaphore()

        def paused(*given, real=real, other=other, once=once, leaves=leaves):
            found = real(*given)
            if not once.acquire(blocking=False):
                return found
            with contextlib.suppress(PathInUseError):  # the paused one has committed already
                other.save(states[1], 2)
            if leaves:
                other.close()
            assert all(not one.problems for one in other.verify())
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(getattr(one, owner), name, paused)
            with contextlib.suppress(PathInUseError):
                one.save(states[0], 1)
        assert all(not one.problems for one in other.verify())
        steps = other.all_steps()
        assert len(steps) == 1
        assert numbers(replay, other.restore(EXAMPLE))[0][0] == {1: 0, 2: 500}[steps[0]]
        one.close()
        other.close()


def test_a_path_that_is_deleted_meanwhile_is_not_said_to_be_saved(tmp_path, delay_of_commit):
    replay, path = items(), tmp_path / "run"
    checkpointer = Checkpointer(path, replay)
    state = added(replay, replay.init(EXAMPLE), 0, 4)
    checkpointer.save(state, 4)
    may_commit = delay_of_commit(checkpointer)
    checkpointer.save(added(replay, jax.tree.map(jax.numpy.copy, state), 4, 1), 5, blocking=False)
    shutil.rmtree(path / "writers")
    may_commit.set()
    with pytest.raises(OSError, match="was deleted, or replaced, while it was written to"):
        checkpointer.wait_until_finished(added(replay, state, 4, 1))
    assert checkpointer.all_steps() == [4]


# Whether a process of another machine is alive, nobody can tell.


def test_who_goes_on_with_what_a_dead_machine_left_takes_its_place(where, monkeypatch):
    replay = items()
    elsewhere = {"host": "elsewhere", "pid": 7, "program": "train.py", "since": "2030-01-01"}
    with monkeypatch.context() as patch:
        patch.setattr(chain, "whoami", lambda: elsewhere)
        patch.setattr(chain.socket, "gethostname", lambda: "elsewhere")
        other = Checkpointer(where, replay)
        state = added(replay, replay.init(EXAMPLE), 0, 4)
        other.save(state, 4)
    with pytest.raises(
        PathInUseError,
        match=r"by host elsewhere, pid 7, program train.py, since 2030-01-01; .* give each run a",
    ):
        checkpoint.save(where, replay, state)
    mine = Checkpointer(where, replay)
    restored = mine.restore(EXAMPLE)
    mine.save(added(replay, restored, 4, 1), 5)
    with monkeypatch.context() as patch:  # the other writer was alive after all
        patch.setattr(chain, "whoami", lambda: elsewhere)
        patch.setattr(chain.socket, "gethostname", lambda: "elsewhere")
        with pytest.raises(PathInUseError, match=rf"pid {os.getpid()}"):
            other.save(added(replay, state, 500, 1), 6)
    assert mine.all_steps() == [4, 5]
    assert numbers(replay, mine.restore(EXAMPLE)) == expected(replay, 5)


def test_a_writer_that_was_replaced_in_a_save_does_not_count(where, monkeypatch, delay_of_commit):
    """Restore its checkpoint elsewhere, and save, while its save runs."""
    replay = items()
    one, state = Checkpointer(where, replay), added(replay, replay.init(EXAMPLE), 0, 4)
    with monkeypatch.context() as patch:
        patch.setattr(chain, "whoami", lambda: {**WHOAMI(), "host": "elsewhere"})
        one.save(state, 4)
    later = added(replay, jax.tree.map(jax.numpy.copy, state), 4, 1)
    may_commit = delay_of_commit(one)
    one.save(later, 5, blocking=False)
    other = Checkpointer(where, replay)
    other.save(added(replay, other.restore(EXAMPLE), 500, 1), 6)
    may_commit.set()
    with pytest.raises(PathInUseError, match="this process"):
        one.wait_until_finished(later)
    assert one.all_steps() == [4, 6]


def test_a_dead_process_of_this_machine_holds_nothing(where):
    replay = items()
    state = added(replay, replay.init(EXAMPLE), 0, 4)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    for pid in (gone.pid, os.getpid()):  # the system may use a number again
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chain, "whoami", lambda pid=pid: {**WHOAMI(), "pid": pid})
            patch.setattr(chain, "_PROCESS", "another")
            dead = Checkpointer(where, replay)
            dead.save(state)
        checkpoint.save(where, replay, state)
        assert dead._store.entries("writers") == []


def test_a_store_without_conditional_writes_says_so(tmp_path, monkeypatch):
    replay, state = items(), added(items(), items().init(EXAMPLE), 0, 4)
    checkpointer = Checkpointer("memory://unconditional", replay)
    real, failed = checkpointer._store._wait, []

    def wait(what, future):
        if what.startswith("to write writers/") and not failed:
            failed.append(what)
            raise OSError("UNIMPLEMENTED: conditional writes")
        return real(what, future)

    monkeypatch.setattr(checkpointer._store, "_wait", wait)
    with pytest.warns(
        UserWarning,
        match="this store has no conditional writes, so a second writer may not be detected",
    ):
        checkpointer.save(state, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpointer.save(state, 2)
    assert checkpointer.all_steps() == [1, 2]
