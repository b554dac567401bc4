"""Tests of the single writer of a path: a second one is refused at once and told of the first,
a dead one is succeeded, and rows of two runs never mix."""

import contextlib
import errno
import functools
import itertools
import os
import shutil
import threading

import pytest

from jaxreplay import checkpoint
from jaxreplay.checkpoint import Checkpointer, PathInUseError, planning
from tests.checkpoint.runs import (
    BUFFER,
    SUPPORT,
    check_intact,
    check_no_other_files,
    check_restored,
    outcomes_of_two_writers,
    replay_of,
    save_run,
    state_of,
)
from tests.conftest import ALL, SOAK
from tests.support.checkpointed_run import EXAMPLE, added
from tests.support.refusals import check_refused, refused, warned
from tests.support.replays import output_of


@pytest.fixture(params=["folder", "memory"])
def where(request, tmp_path):
    return tmp_path if request.param == "folder" else f"memory://{tmp_path.name}"


def check_no_other_rows(checkpointer):
    """Check that there are no rows but those of checkpoints."""
    named = {name for found in checkpointer._chain.read()[0] for name in found.sums()}
    assert {*checkpointer._store.entries("rows")} <= named


def check_is_told(checkpointer, act, error, said):
    """Check that a save fails if this happens before it commits."""
    commit = checkpointer._chain.commit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer._chain, "commit", lambda *given: (act(), commit(*given)))
        with refused(said, error):
            checkpointer.save(state_of(5), 5)


def test_a_second_run_is_refused_and_told_who_was_the_first(where):
    """Unless it restores what the first one saved, or says that it replaces it."""
    one, other = Checkpointer(where, BUFFER), Checkpointer(where, BUFFER)
    save_run(one, 4)
    said = (
        rf"has a newer checkpoint, by this process, host .*, pid {os.getpid()}, program .*, since "
        r"20..-.*: restore it first, to go on from it, give each run a path of its own"
    )
    check_refused(said, lambda: other.save(state_of(4), 5), error=PathInUseError)
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
os.write(1, f"{os.getpid()}\n".encode())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_write(tmp_path):
    *told, pid = output_of(FORKED, str(tmp_path), cwd=SUPPORT).splitlines()
    assert ["spawn" in line for line in told] == [True] * 2, told
    mine = Checkpointer(tmp_path, BUFFER)
    with refused(rf"by host .*, pid {pid}, program -c, since ", PathInUseError):
        mine.save(state_of(5), 5)
    mine.save(added(BUFFER, mine.restore(EXAMPLE), 3, 2), 5)
    check_restored(Checkpointer(tmp_path, BUFFER), 5)


@pytest.mark.parametrize("kind", ["Replay", *["Checkpointer"] * ALL])
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
def test_of_two_first_saves_one_counts(has_links, where, monkeypatch):
    """Begin to save twice on an empty path: neither writer sees the other, and the second is told
    at its end, also where its number is free again. None of its rows is left."""
    if not has_links:

        def link(*_):
            raise OSError(errno.EOPNOTSUPP, "no hard links")

        monkeypatch.setattr(os, "link", link)
    one, other = (Checkpointer(where, BUFFER, max_to_keep=1) for _ in range(2))
    save_other = lambda: [other.save(state_of(504, 500), step) for step in (2, 3)[: 1 + has_links]]
    check_is_told(one, save_other, PathInUseError, "this process")
    assert one.all_steps() == [2 + has_links]
    check_restored(one, 504, start=500)
    other.save(state_of(505, 500), 4)
    check_intact(other.verify())
    check_no_other_rows(other)


def test_a_writer_whose_files_are_deleted_is_told_of_the_other(tmp_path, monkeypatch):
    """Save three newer checkpoints before the first of its files is on the disk."""
    one, other = (Checkpointer(tmp_path, BUFFER, max_to_keep=1) for _ in range(2))
    enter, fsync, once = one._chain.enter, os.fsync, threading.Semaphore()

    def after_three(descriptor):
        if once.acquire(blocking=False):
            for step in range(3):
                other.save(state_of(504, 500), step)
            base = other._base
            kept = {tmp_path / name for name in (base.name, *base.sums())}
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
        ("_store", "read"),
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


# Files that are deleted meanwhile.

REPLACED = "was deleted, or replaced, while it was written to"


def test_a_path_that_is_deleted_or_replaced_meanwhile_is_not_said_to_be_saved(tmp_path):
    """A part of it, then all, which a copy of itself replaces."""
    path, copy = tmp_path / "run", tmp_path / "copy"
    checkpointer = Checkpointer(path, BUFFER)
    save_run(checkpointer, 4)
    shutil.copytree(path, copy)
    check_fails = lambda act: check_is_told(checkpointer, act, OSError, REPLACED)
    check_fails(lambda: shutil.rmtree(path / "rest"))
    assert checkpointer.all_steps() == [4]
    check_fails(lambda: shutil.rmtree(path))
    assert checkpointer.all_steps() == []
    check_fails(lambda: (path.rename(tmp_path / "old"), copy.rename(path)))
    assert checkpointer.all_steps() == [4]
    save_run(checkpointer, 6)
    check_intact(checkpointer.verify())


def test_a_path_on_which_another_run_began_meanwhile_gets_all_rows_again(where):
    """The other one has saved as often: only the content of its newest manifest tells."""
    one, other = (Checkpointer(where, BUFFER, max_to_keep=2) for _ in range(2))
    for end in (4, 5, 6):
        save_run(one, end)
    for kind in ("manifests", "rest", "rows"):
        for name in one._store.entries(kind):
            one._store.delete(name)
    for end in (504, 505, 506):
        other.save(state_of(end, 500), end)
    save_run(one, 7)
    check_intact(one.verify())
    check_restored(Checkpointer(where, BUFFER), 7)


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
