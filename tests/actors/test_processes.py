"""Folders of actors on one machine, what is in them, and how their processes end; no process is
started here."""

import multiprocessing
import os
import pathlib
import types

import jax
import numpy as np
import pytest

from jaxreplay.actors import processes
from jaxreplay.actors.actor import Allowance, Setup
from jaxreplay.actors.restarts import Restarts
from tests.support import acting

pytestmark = pytest.mark.no_xla
SETUP = Setup(1, 3, 2, 0, "next_step", None, True, None, None)
SPECS = {"x": jax.ShapeDtypeStruct((5,), np.float32)}


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """Return an engine without actors, whose memory is a folder of the test."""
    monkeypatch.setattr(processes, "_MEMORY", str(tmp_path))
    made = processes.local()(acting.few, SETUP, [], 2)
    yield made
    made.stop(0.0)
    assert not any(os.path.exists(path) for path in made._paths)


@pytest.fixture
def link(monkeypatch, engine):
    """Return the engine's end of a pipe, and the link of an actor at the other end."""
    monkeypatch.setattr(processes._PipeLink, "_listen", lambda self: None)
    ours, its = multiprocessing.Pipe()
    yield ours, processes._PipeLink(its, engine._paths, "0-0", SETUP, Allowance())
    ours.close()
    its.close()


def fill(engine, name):
    """Let the memory have no room for a file: what is written to `/dev/full` raises that."""
    os.symlink("/dev/full", pathlib.Path(engine._paths[0], name))


def test_parameters_that_memory_has_no_room_for_lie_on_a_disk(engine, link):
    for version, is_full in enumerate([True, False, False, True, True, False]):
        if is_full:
            fill(engine, "params.new")
        data = bytes(100 + version)
        engine.publish(version, data)
        assert link[1].newest() == (version, data)
        assert link[1].newest() is None
        assert [os.path.exists(path + "/params") for path in engine._paths] == [not is_full, True]
        assert not any(os.path.exists(path + "/params.new") for path in engine._paths)


def test_blocks_that_memory_has_no_room_for_lie_in_a_private_folder(engine, link):
    ours, its = link
    fill(engine, "0-0-0")
    its.arrays(SPECS, 0)["x"][:] = 3
    kind, path, specs = ours.recv()
    assert (kind, specs) == ("memory", SPECS)
    assert os.path.dirname(path) == engine._paths[1]
    assert {os.stat(folder).st_mode & 0o777 for folder in engine._paths} == {0o700}


def test_the_folders_of_learners_that_were_killed_are_removed(tmp_path):
    (tmp_path / "jaxreplay-actors-killed").mkdir()
    (tmp_path / "jaxreplay-actors-killed" / "params").write_bytes(b"large")
    (tmp_path / "jaxreplay-rows").mkdir()
    (tmp_path / "jaxreplay-actors-link").symlink_to(tmp_path / "jaxreplay-rows")
    first = processes.Folder(str(tmp_path))
    second = processes.Folder(str(tmp_path))
    others = {"jaxreplay-rows", "jaxreplay-actors-link"}
    names = {os.path.basename(folder.path) for folder in (first, second)}
    assert {path.name for path in tmp_path.iterdir()} == {*names, *others}
    for folder in (first, second, first):
        folder.remove()
    assert {path.name for path in tmp_path.iterdir()} == others


def test_an_error_of_a_signals_handler_is_no_end_of_the_learner(engine, link):
    """`TimeoutError` is an `OSError`."""

    def interrupted(*_):
        raise TimeoutError

    with pytest.raises(TimeoutError):
        processes._made(engine._paths, "x", interrupted)
    link[1]._pipe = types.SimpleNamespace(send=interrupted)
    with pytest.raises(TimeoutError):
        link[1].send(0, 2)


def with_actor(engine, **process):
    """Let an engine have an actor with this process; return the actor's end of its pipe."""
    ours, its = multiprocessing.Pipe()
    calls = {name: lambda *_: None for name in ("join", "kill", "close", "is_alive")}
    one = types.SimpleNamespace(**calls, **process)
    engine._alive[ours] = processes._Process(one, 0, 0, 0.0, has_begun=True)
    return its


def test_an_error_of_the_learner_is_no_end_of_an_actor(engine, tmp_path):
    its = with_actor(engine, exitcode=None)
    its.send(("memory", str(tmp_path / "missing"), SPECS))
    with pytest.raises(FileNotFoundError, match="missing"):
        engine.receive(1.0)
    assert len(engine._alive) == 1


@pytest.mark.parametrize(
    ("code", "why"),
    [(-9, "its process ended with exit code -9"), (None, "it closed its connection")],
)
def test_it_is_told_why_an_actor_was_lost(engine, monkeypatch, code, why):
    started = []
    monkeypatch.setattr(engine, "_start", lambda *place: started.append(place))
    with_actor(engine, exitcode=code).close()
    (news,) = engine.receive(1.0)
    assert (news.kind, news.incarnation) == ("lost", 0)
    assert news.why.startswith(why)
    assert engine.receive(0.0) == []
    assert started == [(0, 1)]


def test_restarts_pause_longer_and_longer_and_a_long_run_begins_anew():
    restarts = Restarts(4)
    assert [restarts.pause_after(1.0) for _ in range(5)] == [0.0, 0.25, 0.5, 1.0, None]
    assert [restarts.pause_after(seconds) for seconds in (600.0, 599.0)] == [0.0, 0.25]
    assert Restarts(0).pause_after(1e6) is None
    many = Restarts(100)
    assert [many.pause_after(1.0) for _ in range(100)][-1] == 60.0
