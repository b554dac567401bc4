"""Tests of the single writer of a path: a second one is refused at once and told of the first,
a dead one is succeeded, and rows of two runs never mix."""

import contextlib
import errno
import functools
import gc
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer, PathInUseError, chain
from tests.checkpoint.runs import (
    BUFFER,
    SUPPORT,
    check,
    check_intact,
    check_restored,
    outcomes_of_two_writers,
    replay_of,
    save_run,
    state_of,
)
from tests.conftest import ALL, SOAK
from tests.support.checkpointed_run import EXAMPLE, added, numbers
from tests.support.refusals import check_refused, refused, warned

WHOAMI = chain.whoami


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
    may, commit, state = threading.Event(), checkpointer._chain.commit, state_of(end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            checkpointer._chain, "commit", lambda manifest: (may.wait(60), commit(manifest))
        )
        checkpointer.save(state, end, blocking=False)
        try:
            yield
        finally:
            may.set()
        with refused(said, error):
            checkpointer.wait_until_finished(state)


@contextlib.contextmanager
def on_another_machine():
    """Give this process another machine's name."""
    machine = {"host": "elsewhere", "pid": 7, "program": "train.py", "since": "2030-01-01"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "whoami", lambda: machine)
        patch.setattr(chain.socket, "gethostname", lambda: "elsewhere")
        yield


def test_a_second_writer_is_refused_and_told_who_is_the_first(where):
    one, other = Checkpointer(where, BUFFER), Checkpointer(where, BUFFER)
    save_run(one, 4)
    said = (
        rf"is being written to by this process, host .*, pid {os.getpid()}, program .*, since "
        r"20..-.*two writers would mix their files: close\(\) that Checkpointer first"
    )
    check_refused(
        said,
        lambda: other.save(state_of(4), 5),
        lambda: other.save(state_of(4), 5, blocking=False),
        lambda: checkpoint.save(where, BUFFER, state_of(4)),
        error=PathInUseError,
    )
    check_restored(other, 4)  # readers need no lock
    assert [found.problems for found in other.verify()] == [[]]
    save_run(one, 5)
    one.close()
    other.save(state := added(BUFFER, other.restore(EXAMPLE), 5, 1), 6)
    with pytest.raises(PathInUseError):
        one.save(state, 7)
    other.close()
    one.save(state, 7)
    assert one.all_steps() == [5, 6, 7]
    check_restored(one, 6)


def test_a_writer_that_is_gone_holds_nothing(where):
    """Release the path of a Checkpointer that is deleted, fails before its save, or fails in a
    `with` block."""
    state, one, other = state_of(4), Checkpointer(where, BUFFER), Checkpointer(where, BUFFER)
    one.save(state, 1)
    del one
    gc.collect()
    with refused("JSON", TypeError):
        other.save(state, 2, metadata={"x": object()})
    with Checkpointer(where, BUFFER) as third:
        third.save(state, 2)
    with contextlib.suppress(ZeroDivisionError), Checkpointer(where, BUFFER) as fourth:
        fourth.save(state, 3, blocking=False)
        raise ZeroDivisionError
    other.save(state, 4)
    assert other.all_steps()[-1] == 4


# Other processes of this machine.

HOLDS = r"""
import os, sys, time, warnings
import checkpointed_run as run
from jaxreplay.checkpoint import Checkpointer

warnings.simplefilter("ignore")  # of JAX, about the fork
buffer = run.items()
checkpointer, state = Checkpointer(sys.argv[1], buffer), run.begun(buffer, 3)
checkpointer.save(state, 3)
if not os.fork():
    checkpointer.close()  # the path stays with the parent
    for call in (lambda: checkpointer.save(state, 4), lambda: checkpointer.restore(run.EXAMPLE)):
        try:
            call()
        except RuntimeError as error:
            os.write(1, f"{error}\n".encode())  # in one piece: both write here
    time.sleep(1000)
os.write(1, b"saved\n")
time.sleep(1000)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_lock_dies_with_its_process_which_a_forked_child_is_not(tmp_path):
    with running(HOLDS, tmp_path) as parent:
        lines = [parent.stdout.readline() for _ in range(3)]
        assert sum("spawn" in line for line in lines) == 2, lines
        assert "saved\n" in lines
        mine = Checkpointer(tmp_path, BUFFER)
        state = added(BUFFER, mine.restore(EXAMPLE), 3, 2)
        with refused(
            rf"by host .*, pid {parent.pid}, program -c, since .*give each run a path of its own",
            PathInUseError,
        ):
            mine.save(state, 5)
        parent.kill()
        parent.wait()
        mine.save(state, 5)  # the child is still alive
    check_restored(Checkpointer(tmp_path, BUFFER), 5)


IN_TURN = """
import sys, time
import checkpointed_run as run
from jaxreplay.checkpoint import Checkpointer, PathInUseError

buffer, end = run.items(), int(sys.argv[2])
state, end = run.begun(buffer, end + 5, end), end + 5
while True:
    checkpointer = Checkpointer(sys.argv[1], buffer, max_to_keep=1 + end % 3, chunk_bytes=2000)
    try:
        for _ in range(2):
            checkpointer.save(state, blocking=end % 2 == 0)
            checkpointer.wait_until_finished(state)
            state, end = run.added(buffer, state, end, 1), end + 1
        checkpointer.close()
        time.sleep(0.05)  # the other one's turn
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
    one.close()
    other.close()
    other.save(state_of(505, 500), 4)
    check_intact(other.verify())
    named = {group.folder for group in other._chain.read()[0][0].groups}
    assert set(other._store.entries("rows")) == named


def test_a_writer_whose_files_are_deleted_is_told_of_the_other(tmp_path, monkeypatch):
    """Save three newer checkpoints before the first of its files is on the disk."""
    one, other = (Checkpointer(tmp_path, BUFFER, max_to_keep=1) for _ in range(2))
    enter, fsync, once = one._chain.enter, os.fsync, threading.Semaphore()

    def after_three(descriptor):
        if once.acquire(blocking=False):
            for step in range(3):
                other.save(state_of(504, 500), step)
            kept = {tmp_path / name for name in other._base.files()}
            for path in {*tmp_path.glob("r*/*")} - kept:
                shutil.rmtree(path)
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
    for (owner, name), leaves in itertools.product(steps, (False, True)):
        one, other = (Checkpointer(where, BUFFER, max_to_keep=1) for _ in range(2))
        real, once = getattr(getattr(one, owner), name), threading.Semaphore()

        def paused(*given, real=real, other=other, once=once, leaves=leaves):
            found = real(*given)
            if not once.acquire(blocking=False):
                return found
            with contextlib.suppress(PathInUseError):  # the paused one has committed already
                other.save(state_of(504, 500), 2)
            if leaves:
                other.close()
            check_intact(other.verify())
            return found

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(PathInUseError):
            patch.setattr(getattr(one, owner), name, paused)
            one.save(state_of(4), 1)
        check_intact(other.verify())
        (step,) = other.all_steps()
        check_restored(other, *{1: (4, 0), 2: (504, 500)}[step])
        one.close()
        other.close()


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


def test_a_writer_that_has_left_holds_nothing_though_its_file_stays(tmp_path, monkeypatch):
    one = Checkpointer(tmp_path, BUFFER)
    one.save(state_of(20), 1)
    monkeypatch.setattr(one._store, "delete", lambda name: os.stat("/nowhere"))
    one.close()
    assert [*(tmp_path / "writers").iterdir()]
    checkpoint.save(tmp_path, BUFFER, state_of(20), step=2)
    assert one.all_steps() == [2]


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
    with late(checkpointer, 5, OSError, "was deleted, or replaced, while it was written to"):
        shutil.rmtree(tmp_path / "writers")
    assert checkpointer.all_steps() == [4]


# Whether a process of another machine is alive cannot be known.


def test_a_run_that_continues_what_a_dead_machine_left_takes_its_place(where):
    with on_another_machine():
        other = Checkpointer(where, BUFFER)
        save_run(other, 4)
    with refused(
        r"by host elsewhere, pid 7, program train.py, since 2030-01-01; .* give each run a path",
        PathInUseError,
    ):
        checkpoint.save(where, BUFFER, state_of(4))
    mine = Checkpointer(where, BUFFER)
    mine.save(added(BUFFER, mine.restore(EXAMPLE), 4, 1), 5)
    with on_another_machine(), refused(rf"pid {os.getpid()}", PathInUseError):
        other.save(state_of(501, 496), 6)  # it was alive after all
    assert mine.all_steps() == [4, 5]
    check_restored(mine, 5)


def test_a_writer_that_was_replaced_in_a_save_does_not_count(where):
    """Restore its checkpoint elsewhere, and save, while its save runs."""
    one = Checkpointer(where, BUFFER)
    with on_another_machine():
        save_run(one, 4)
    with late(one, 5, PathInUseError, "this process"):
        other = Checkpointer(where, BUFFER)
        other.save(added(BUFFER, other.restore(EXAMPLE), 500, 1), 6)
    assert one.all_steps() == [4, 6]


def test_a_dead_process_of_this_machine_holds_nothing(where):
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    for pid in (gone.pid, os.getpid()):  # the system may use a number again
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chain, "whoami", lambda pid=pid: WHOAMI() | {"pid": pid})
            patch.setattr(chain, "_PROCESS", "another")
            dead = Checkpointer(where, BUFFER)
            dead.save(state_of(4))
        checkpoint.save(where, BUFFER, state_of(4))
        assert dead._store.entries("writers") == []


def test_a_store_without_conditional_writes_says_so(monkeypatch):
    checkpointer = Checkpointer("memory://unconditional", BUFFER)
    real, failed = checkpointer._store._wait, []

    def wait(what, future):
        if what.startswith("to write writers/") and not failed:
            failed.append(what)
            raise OSError("UNIMPLEMENTED: conditional writes")
        return real(what, future)

    monkeypatch.setattr(checkpointer._store, "_wait", wait)
    with warned("this store has no conditional writes, so a second writer may not be detected"):
        checkpointer.save(state_of(4), 1)
    checkpointer.save(state_of(4), 2)  # without a warning
    assert checkpointer.all_steps() == [1, 2]
