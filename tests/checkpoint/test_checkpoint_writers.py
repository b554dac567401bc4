"""Tests of the single writer of a path: a second one is refused at once and told of the first,
a dead one is succeeded, and rows of two runs never mix."""

import contextlib
import errno
import functools
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer, PathInUseError, planning
from tests.checkpoint.runs import (
    BUFFER,
    SUPPORT,
    check,
    check_intact,
    check_no_other_files,
    check_restored,
    outcomes_of_two_writers,
    replay_of,
    save_run,
    state_of,
)
from tests.conftest import ALL, SOAK
from tests.support.checkpointed_run import EXAMPLE, added, numbers
from tests.support.refusals import check_refused, refused, warned


@contextlib.contextmanager
def running(code, *arguments):
    """Run a program, and at the end of the block kill it and its children."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=SUPPORT,
        process_group=0,
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, 9)


@pytest.fixture(params=["folder", "memory"])
def where(request, tmp_path):
    return tmp_path if request.param == "folder" else f"memory://{tmp_path.name}"


@contextlib.contextmanager
def late(checkpointer, end, error, said):
    """Save in the background, and commit only after the block, which fails."""
    may, is_there, commit = threading.Event(), threading.Event(), checkpointer._chain.commit

    def waits(manifest):
        is_there.set()
        may.wait(60)
        commit(manifest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer._chain, "commit", waits)
        checkpointer.save(state_of(end), end, blocking=False)
        try:
            assert is_there.wait(60)
            yield
        finally:
            may.set()
        with refused(said, error):
            checkpointer.wait_until_finished()


def test_a_second_run_is_refused_and_told_who_was_the_first(where):
    """Unless it restores what the first one saved, or says that it replaces it."""
    one, other = Checkpointer(where, BUFFER), Checkpointer(where, BUFFER)
    save_run(one, 4)
    said = (
        rf"has a newer checkpoint, by this process, host .*, pid {os.getpid()}, program .*, since "
        r"20..-.*: restore it first, to go on from it, give each run a path of its own"
    )
    check_refused(
        said,
        lambda: other.save(state_of(4), 5),
        lambda: other.save(state_of(4), 5, blocking=False),
        error=PathInUseError,
    )
    check_restored(Checkpointer(where, BUFFER), 4)  # readers may always read
    assert [found.problems for found in other.verify()] == [[]]
    save_run(one, 5)
    other.save(state := added(BUFFER, other.restore(EXAMPLE), 5, 1), 6)
    with pytest.raises(PathInUseError):
        one.save(state, 7)
    assert one.all_steps() == [4, 5, 6]
    third = Checkpointer(where, BUFFER, max_to_keep=1, overwrite=True)
    third.save(state, 7)
    assert third.all_steps() == [7]
    check_refused(said, lambda: other.save(state, 8), error=PathInUseError)
    third.save(state, 8)
    assert one.all_steps() == [8]
    if not isinstance(where, str):
        check_no_other_files(one, where)


def test_what_a_run_that_fails_left_is_replaced(where):
    """In a `with` block whose error is not of the save, the save is completed."""
    one = Checkpointer(where, BUFFER)
    with refused("JSON", TypeError):
        one.save(state_of(4), 2, metadata={"x": object()})
    with contextlib.suppress(ZeroDivisionError), Checkpointer(where, BUFFER) as other:
        other.save(state_of(4), 3, blocking=False)
        raise ZeroDivisionError
    assert one.all_steps() == [3]


# Other processes of this machine.

FORKED = r"""
import os, sys, warnings
import checkpointed_run as run
from jaxreplay.checkpoint import Checkpointer

warnings.simplefilter("ignore")  # of JAX, about the fork
buffer = run.items()
checkpointer, state = Checkpointer(sys.argv[1], buffer), run.begun(buffer, 3)
checkpointer.save(state, 3)
if not os.fork():
    for call in (lambda: checkpointer.save(state, 4), lambda: checkpointer.restore(run.EXAMPLE)):
        try:
            call()
        except RuntimeError as error:
            os.write(1, f"{error}\n".encode())  # in one piece: both write here
    os._exit(0)
os.wait()
os.write(1, b"saved\n")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_write(tmp_path):
    with running(FORKED, tmp_path) as parent:
        lines = [parent.stdout.readline() for _ in range(3)]
    assert sum("spawn" in line for line in lines) == 2, lines
    mine = Checkpointer(tmp_path, BUFFER)
    with refused(rf"by host .*, pid {parent.pid}, program -c, since ", PathInUseError):
        mine.save(state_of(5), 5)
    mine.save(added(BUFFER, mine.restore(EXAMPLE), 3, 2), 5)
    check_restored(Checkpointer(tmp_path, BUFFER), 5)


IN_TURN = """
import sys, time
import checkpointed_run as run
from jaxreplay.checkpoint import Checkpointer, PathInUseError

buffer, end = run.items(), int(sys.argv[2])
state, end = run.begun(buffer, end + 5, end), end + 5
while True:
    options = {"max_to_keep": 1 + end % 3, "chunk_bytes": 2000, "overwrite": True}
    checkpointer = Checkpointer(sys.argv[1], buffer, **options)
    try:
        for _ in range(2):
            checkpointer.save(state, blocking=end % 2 == 0)
            checkpointer.wait_until_finished()
            state, end = run.added(buffer, state, end, 1), end + 1
    except PathInUseError:
        print("refused", flush=True)
        time.sleep(0.004)
"""


def start_of(state):
    """Check that all rows are of one of the runs that start at 0 and 50,000, and return which."""
    first, *_, last = numbers(BUFFER, state)[0]
    start = first // 50_000 * 50_000
    check(state, last + 1, start)
    return start


def test_two_processes_that_write_to_one_path_never_mix(tmp_path):
    """Save from two processes while a reader restores: each restored state is one run's, intact."""
    seen = []
    with running(IN_TURN, tmp_path, 0) as one, running(IN_TURN, tmp_path, 50_000) as other:
        while len(seen) < (200 if SOAK else 20) or len({*seen}) < 2:
            assert one.poll() is other.poll() is None
            time.sleep(0.02)
            try:
                seen.append(start_of(checkpoint.restore(tmp_path, BUFFER, EXAMPLE)))
            except FileNotFoundError:  # before the first save
                assert not seen
        one.kill()
        other.kill()
        assert "refused" in one.stdout.read() + other.stdout.read()
    check_intact(checkpoint.verify(tmp_path))


@pytest.mark.parametrize("kind", ["Replay", "Checkpointer"])
def test_two_threads_that_write_to_one_path_never_mix(kind, where):
    def save_of(start):
        if kind == "Replay":
            return functools.partial(replay_of(start + 20, start).save, where)
        return lambda: checkpoint.save(
            where, BUFFER, state_of(start + 20, start), max_to_keep=2, chunk_bytes=1000
        )

    outcomes = outcomes_of_two_writers(
        save_of,
        lambda: checkpoint.restore(where, BUFFER, EXAMPLE),
        150 if SOAK else 20 if ALL else 8,
    )
    assert {*itertools.chain(*outcomes)} == {None, PathInUseError}
    assert all(None in both for both in outcomes)


# Writers that do not see each other in time.


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("steps", [(2,), (2, 3)], ids=["number is taken", "number was deleted"])
def test_of_two_first_saves_one_counts(steps, has_links, where, monkeypatch):
    """Begin to save twice on an empty path: neither writer sees the other, and the second is told
    at its end. None of its rows is left."""
    if not has_links:

        def link(*_):
            raise OSError(errno.EOPNOTSUPP, "no hard links")

        monkeypatch.setattr(os, "link", link)
    one, other = (Checkpointer(where, BUFFER, max_to_keep=1) for _ in range(2))
    with late(one, 4, PathInUseError, "this process"):
        for step in steps:
            other.save(state_of(504, 500), step)
    assert one.all_steps() == [steps[-1]]
    check_restored(one, 504, start=500)
    other.save(state_of(505, 500), 4)
    check_intact(other.verify())
    named = {name for name in other._chain.read()[0][0].file_names() if name.startswith("rows")}
    assert {f"rows/{name}" for name in other._store.entries("rows")} == named


def test_a_writer_whose_files_are_deleted_is_told_of_the_other(tmp_path, monkeypatch):
    """Save three newer checkpoints before the first of its files is on the disk."""
    one, other = (Checkpointer(tmp_path, BUFFER, max_to_keep=1) for _ in range(2))
    enter, fsync, once = one._chain.enter, os.fsync, threading.Semaphore()

    def after_three(descriptor):
        if once.acquire(blocking=False):
            for step in range(3):
                other.save(state_of(504, 500), step)
            kept = {tmp_path / name for name in other._base.file_names()}
            for path in {*tmp_path.glob("r*/*")} - kept:
                path.unlink()
        fsync(descriptor)

    def entered(*given):
        folder = enter(*given)
        monkeypatch.setattr(os, "fsync", after_three)
        return folder

    monkeypatch.setattr(one._chain, "enter", entered)
    with refused("this process", PathInUseError):
        one.save(state_of(4), 9)
    assert other.all_steps() == [2]


def test_a_collection_leaves_what_may_still_count(where):
    """Pause a writer at each of its steps, while another saves and collects: whatever is listed in
    between is intact."""
    steps = (
        ("_chain", "read"),
        ("_chain", "enter"),
        ("_store", "write"),
        ("_store", "create"),
        ("_store", "entries"),
    )
    options = {"max_to_keep": 1, "overwrite": True}
    for owner, name in steps:
        one, other = (Checkpointer(where, BUFFER, **options) for _ in range(2))
        real, once = getattr(getattr(one, owner), name), threading.Semaphore()

        def paused(*given, real=real, other=other, once=once):
            found = real(*given)
            if not once.acquire(blocking=False):
                return found
            with contextlib.suppress(PathInUseError):  # the paused one has committed already
                other.save(state_of(504, 500), 2)
            check_intact(other.verify())
            return found

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(PathInUseError):
            patch.setattr(getattr(one, owner), name, paused)
            one.save(state_of(4), 1)
        check_intact(other.verify())
        (step,) = other.all_steps()
        check_restored(other, *{1: (4, 0), 2: (504, 500)}[step])


# Files that cannot be deleted, or are deleted meanwhile.


def test_a_manifest_that_cannot_be_deleted_keeps_what_it_names(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, BUFFER, max_to_keep=1) as checkpointer:
        checkpointer.save(state_of(20), 1)
        delete = checkpointer._store.delete

        def broken(name):
            if name.startswith("manifests"):
                raise OSError(errno.EACCES, "not allowed")
            delete(name)

        monkeypatch.setattr(checkpointer._store, "delete", broken)
        with warned("no longer needed, but cannot be deleted"):
            checkpointer.save(state_of(40), 2)
        assert checkpointer.all_steps() == [1, 2]
        check_intact(checkpointer.verify())
        monkeypatch.undo()
        checkpointer.save(checkpointer.restore(EXAMPLE), 3)
        assert checkpointer.all_steps() == [3]


def test_an_error_after_the_commit_is_not_said_to_be_of_another_writer(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, BUFFER)
    create = checkpointer._store.create

    def created(name, content):
        create(name, content)
        if name.startswith("manifests"):
            raise FileNotFoundError(errno.ENOENT, "not there")

    monkeypatch.setattr(checkpointer._store, "create", created)
    with refused("not there", FileNotFoundError):
        checkpointer.save(state_of(20), 1)
    monkeypatch.undo()
    checkpointer.save(state_of(20), 2)
    assert checkpointer.all_steps() == [1, 2]


def test_a_path_that_is_deleted_meanwhile_is_not_said_to_be_saved(tmp_path):
    checkpointer = Checkpointer(tmp_path, BUFFER)
    save_run(checkpointer, 4)
    for path in (tmp_path / "rest", tmp_path):
        with late(checkpointer, 5, OSError, "was deleted, or replaced, while it was written to"):
            shutil.rmtree(path)
        assert checkpointer.all_steps() == [4] * (path != tmp_path)


def test_a_path_that_is_replaced_by_a_copy_of_itself_is_not_said_to_be_saved(tmp_path):
    path, old = tmp_path / "run", tmp_path / "old"
    checkpointer = Checkpointer(path, BUFFER)
    save_run(checkpointer, 4)
    shutil.copytree(path, tmp_path / "copy")
    with late(checkpointer, 5, OSError, "was deleted, or replaced, while it was written to"):
        path.rename(old)
        (tmp_path / "copy").rename(path)
    assert checkpointer.all_steps() == [4]
    save_run(checkpointer, 6)
    check_intact(checkpointer.verify())


def test_a_newest_checkpoint_that_is_gone_is_told_of(tmp_path):
    checkpointer = Checkpointer(tmp_path, BUFFER)
    for end in (4, 5):
        save_run(checkpointer, end)
    max((tmp_path / "manifests").iterdir()).unlink()
    with warned(
        r"step 4 was restored.*\n  manifests/0000000002.json, written or read here, is gone"
    ):
        checkpointer.restore(EXAMPLE)


def test_a_run_of_another_machine_is_named(where):
    machine = {"host": "elsewhere", "pid": "7", "program": "train.py", "since": "2030-01-01"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "whoami", lambda: machine)
        save_run(Checkpointer(where, BUFFER), 4)
    with refused(
        r"by host elsewhere, pid 7, program train.py, since 2030-01-01; .* give each run a path",
        PathInUseError,
    ):
        Checkpointer(where, BUFFER).save(state_of(4))


def test_a_writer_that_was_replaced_in_a_save_does_not_count(where):
    """Restore its checkpoint elsewhere, and save, while its save runs. It leaves no file."""
    one = Checkpointer(where, BUFFER)
    save_run(one, 4)
    with late(one, 5, PathInUseError, "this process"):
        other = Checkpointer(where, BUFFER)
        other.save(added(BUFFER, other.restore(EXAMPLE), 500, 1), 6)
    assert one.all_steps() == [4, 6]
    named = {name for found in one._chain.read()[0] for name in found.file_names()}
    for kind in ("manifests", "rest", "rows"):
        assert {f"{kind}/{name}" for name in one._store.entries(kind)} <= named


def test_a_store_without_conditional_writes_says_so(monkeypatch):
    checkpointer = Checkpointer("memory://unconditional", BUFFER)
    real, failed = checkpointer._store._wait, []

    def wait(what, future):
        if what.startswith("to write manifests/") and not failed:
            failed.append(what)
            raise OSError("UNIMPLEMENTED: conditional writes")
        return real(what, future)

    monkeypatch.setattr(checkpointer._store, "_wait", wait)
    with warned("this store has no conditional writes, so a second writer may not be detected"):
        checkpointer.save(state_of(4), 1)
    checkpointer.save(state_of(4), 2)  # without a warning
    assert checkpointer.all_steps() == [1, 2]
