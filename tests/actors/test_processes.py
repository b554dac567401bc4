"""Memory of actors on one machine, and how their processes end; no process is started here."""

import collections
import multiprocessing
import os
import queue
import selectors
import socket
import threading
import types

import numpy as np
import pytest

from jaxreplay.actors import processes
from jaxreplay.actors.actor import Setup
from jaxreplay.actors.actors import Actors, pause_before
from jaxreplay.actors.block import Line
from tests.support import acting

pytestmark = pytest.mark.no_xla
processes._PATIENCE = 1e6  # of listeners that are left here; actors import the module themselves
SETUP = Setup(1, 3, 2, 0, "next_step", None, True, None, None)


@pytest.fixture
def engine():
    made = processes.local()(acting.few, SETUP)
    yield made
    made.stop(0.0)


@pytest.fixture
def learner(engine):
    """Return an actor's end of a pipe to the engine, which ends with the engine."""
    ours, its = multiprocessing.Pipe()
    calls = {name: lambda *_: None for name in ("join", "kill", "close", "is_alive")}
    process = types.SimpleNamespace(**calls, exitcode=None)
    engine._of[0] = ours, processes._Process(process, 0)
    engine._selector.register(ours, selectors.EVENT_READ, 0)
    return processes._Learner(its)


def test_blocks_and_parameters_lie_in_memory_without_a_name(engine, learner):
    """A full `/dev/shm` does not matter, and nothing is left, whoever is killed."""
    given = queue.SimpleQueue()
    for size, number in ((200, 0), (200, 4), (64, 5), (64, 6), (0, 7)):
        of = size, number
        ask = threading.Thread(target=lambda of=of: given.put(learner.memory(*of)), daemon=True)
        ask.start()
        while given.empty():
            assert engine.answers(0.1) == []
        memory = np.frombuffer(given.get(), np.uint8)
        assert memory.shape == (size,)
        memory[:] = number
        of = np.frombuffer(engine._of[0][1].memory.map, np.uint8)
        assert (of[(number - number // 3 * 3) * size :][:size] == number).all()
    for version, data in enumerate([bytes(100), b"more", b""]):
        engine.ask(0, version, 0, (version, engine.share(data)))
        learner.outbox.begin(version)
        of, memory = learner.outbox.newest()
        assert (of, memory[: len(data)]) == (version, data)
        assert learner.outbox.newest() is None
    for one in (engine._of[0][1].memory, engine.share(b"x")):
        assert not os.path.exists(os.readlink(f"/proc/self/fd/{one.file}"))


def test_an_error_of_a_signals_handler_is_no_end_of_the_learner(learner):
    """`TimeoutError` is an `OSError`."""

    def interrupted(*_):
        raise TimeoutError

    learner._pipe = types.SimpleNamespace(send=interrupted)
    with pytest.raises(TimeoutError):
        learner.tell("block", 0, 2)


def test_memory_that_was_asked_for_twice_is_given_once(engine, learner):
    """An interrupt may come while an actor waits for it."""
    learner.tell("memory", 8)
    learner.tell("memory", 8)
    engine.answers(1.0)
    given = engine._of[0][1].memory
    engine.answers(1.0)
    assert engine._of[0][1].memory is given
    learner.memory(8, 0)[:] = b"12345678"
    assert given.map[:8] == b"12345678"


@pytest.mark.parametrize(
    ("code", "why"),
    [(-9, "its process ended with exit code -9"), (None, "it closed its connection")],
)
@pytest.mark.parametrize("has_begun", [True, False])
def test_it_is_told_why_an_actor_was_lost(engine, learner, code, why, has_begun):
    engine._of[0][1].process.exitcode = code
    if has_begun:
        learner.tell("ready")
        assert [news.kind for news in engine.answers(1.0)] == ["ready"]
    with socket.socket(fileno=os.dup(learner._pipe.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
    (news,) = engine.answers(1.0)
    assert (news.kind, news.incarnation) == ("lost", 0)
    assert news.why.startswith(why)
    assert ("before it began" in news.why) != has_begun
    assert engine.answers(0.0) == []
    engine.ask(0, 0, 0, None)  # in vain


def test_restarts_pause_longer_and_longer_and_a_long_run_begins_anew():
    def pause_after(seconds):
        line.since = line.began + seconds
        Actors._lose(actors, line, "it was killed")
        return line.due - line.since

    line, actors = Line(0), types.SimpleNamespace(_figures=collections.Counter(), _most_restarts=4)
    assert [pause_after(1.0) for _ in range(4)] == [0.0, 0.25, 0.75, 1.75]
    with pytest.raises(RuntimeError, match="actor 0 failed: it was killed"):
        pause_after(1.0)
    assert [pause_after(seconds) for seconds in (600.0, 599.0)] == [0.0, 0.25]
    assert (line.incarnation, actors._figures) == (5, {"lost": 7, "restarts": 6})
    assert pause_before(9) == pause_before(10**6) == 60.0
