"""All orders of what can happen between a learner and its actors, over the code of both sides: each
block is added once and in order, a gap is a cut, and nothing waits for ever."""

import collections
import copy
import dataclasses

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxreplay.actors.block import IN_FLIGHT, ActorBlock, Inbox
from jaxreplay.actors.outbox import Ask, Outbox, StoppedError
from tests.conftest import thorough

pytestmark = pytest.mark.no_xla
FAULTS = ("kill", "interrupt", "save", "return")


class Worker:
    """An actor that takes a number of blocks, and the messages between it and its learner."""

    def __init__(self, incarnation, num_blocks):
        self.incarnation, self.num_blocks = incarnation, num_blocks
        self.outbox, self.number = Outbox(), 0
        self.under_way = ()  # requests that will reach it, in any order
        self.pending = ()  # those that are to be answered

    def copy(self):
        new = copy.copy(self)
        new.outbox = copy.copy(self.outbox)
        new.outbox._blocks = dict(self.outbox._blocks)
        return new

    def key(self):
        box = self.outbox
        told = (
            box.learner,
            box.added,
            box.asked,
            (*box._blocks,),
            box._num_put,
            box._end,
            box._early,
        )
        return self.incarnation, self.number, self.under_way, self.pending, told


class System:
    """A learner, its actors, and the rows that are added. `left` counts the faults to come;
    requests may reach an actor late, and in another order, if there are `delays`."""

    def __init__(self, num_actors, num_blocks, limit, delays=False, **faults):
        self.limit, self.delays = limit, delays
        self.left = dict.fromkeys(FAULTS, 0) | faults
        self.workers = [Worker(0, num_blocks) for _ in range(num_actors)]
        self.rows = [()] * num_actors  # places of blocks, and whether they were cuts
        self.gone = [frozenset()] * num_actors  # that learners had, and lost since their save
        self.lost = [frozenset()] * num_actors  # by an interrupt
        self.learner, self.inbox = 0, Inbox(num_actors)
        self.saved = (*self.inbox.added,), (*self.rows,)
        self.attach()

    def attach(self):
        for actor, worker in enumerate(self.workers):
            added = worker.outbox.attach(str(self.learner))
            self.inbox.begin(actor, worker.incarnation, added)
            late, key = [*worker.under_way, Ask("before", 99, 99)], worker.key()
            for ask in late:
                worker.outbox.hear(ask)
                assert worker.outbox.find(ask) == ("replaced",)
            assert not worker.outbox.stop("before")
            assert worker.key() == key  # what reaches it of another learner changes nothing
            worker.under_way = worker.pending = ()

    def copy(self):
        new = copy.copy(self)
        new.left = dict(self.left)
        new.workers = [worker.copy() for worker in self.workers]
        new.rows, new.gone, new.lost = [*self.rows], [*self.gone], [*self.lost]
        new.inbox = copy.copy(self.inbox)
        new.inbox.added = [*self.inbox.added]
        new.inbox.lines = [
            dataclasses.replace(line, waiting=collections.deque(line.waiting))
            for line in self.inbox.lines
        ]
        return new

    def key(self):
        box = self.inbox
        lines = [
            (one.incarnation, one.is_alive, one.asked, one.heard, *(b.place for b in one.waiting))
            for one in box.lines
        ]
        workers = [worker.key() for worker in self.workers]
        of_actors = zip(workers, lines, box.added, self.rows, self.gone, self.lost, strict=True)
        return self.learner, (*of_actors,), self.saved, (*self.left.values(),)

    def actions(self):
        """Return what may happen now: names, actors, and places among messages."""
        found = [("add", 0, 0)] if self.inbox.next_blocks() else []
        for actor, (worker, line) in enumerate(zip(self.workers, self.inbox.lines, strict=True)):
            box = worker.outbox
            if line.is_alive and line.under_way < self.limit:
                found.append(("ask", actor, 0))
            found += [("reach", actor, at) for at in range(len(worker.under_way))]
            if box.asked > worker.number and box._end is None:
                found.append(("put", actor, 0))
                if self.left["interrupt"]:
                    found.append(("interrupt", actor, 0))
            if worker.pending and box.find(worker.pending[0]) is not None:
                found.append(("hear", actor, 0))
            if self.left["kill"] and worker.incarnation == 0:
                found.append(("kill", actor, 0))
        return found + [(name, 0, 0) for name in ("save", "return") if self.left[name]]

    def act(self, name, actor, at):
        """Let something happen."""
        worker, box = self.workers[actor], self.workers[actor].outbox
        if name in self.left:
            self.left[name] -= 1
        if name == "ask":
            ask = Ask(str(self.learner), *self.inbox.ask(actor))
            worker.pending += (ask,)
            if self.delays:
                worker.under_way += (ask,)
            else:
                box.hear(ask)
        elif name == "reach":
            box.hear(worker.under_way[at])
            worker.under_way = worker.under_way[:at] + worker.under_way[at + 1 :]
        elif name in ("put", "interrupt"):
            if worker.number == worker.num_blocks:
                box.end("")
            elif name == "put":
                box.put(worker.number, worker.incarnation, worker.number)
            else:
                self.lost[actor] |= {(worker.incarnation, worker.number)}
                box.skip(worker.number + 1)
            worker.number += 1
        elif name == "hear":
            self.hear(actor, *box.find(worker.pending[0]))
        elif name == "add":
            self.add()
        elif name == "kill":
            self.workers[actor] = Worker(worker.incarnation + 1, worker.num_blocks)
            self.inbox.lose(actor)
            self.inbox.begin(
                actor, worker.incarnation + 1, self.workers[actor].outbox.attach(str(self.learner))
            )
        elif name == "save":
            self.saved = (*self.inbox.added,), (*self.rows,)
        elif name == "return":  # killed and started again, or a second one; it loads
            for one, rows in enumerate(self.rows):
                self.gone[one] |= {place for place, _ in rows} - {p for p, _ in self.saved[1][one]}
            self.learner, self.inbox = self.learner + 1, Inbox(len(self.rows))
            self.inbox.resume(self.saved[0])
            self.rows = [*self.saved[1]]
            self.attach()

    def hear(self, actor, kind, *of):
        worker = self.workers[actor]
        worker.pending = worker.pending[1:]
        if kind == "block":
            number, incarnation, its = of
            assert number == its
            self.inbox.receive(ActorBlock(actor, (incarnation, number), np.zeros((1, 1))))
        elif kind == "gap":
            self.inbox.skip(actor, *of)
        else:
            assert (kind, *of) == ("end", "")
            self.inbox.lose(actor)
            worker.pending = ()

    def add(self):
        blocks = self.inbox.next_blocks()
        for block in blocks:
            rows, is_cut = self.rows[block.actor], self.inbox.is_cut(block)
            last = rows[-1][0] if rows else (-1, 0)
            assert block.place > last
            assert is_cut == (block.place != (last[0], last[1] + 1))
            self.rows[block.actor] += ((block.place, is_cut),)
        self.inbox.note(blocks)

    def check_end(self):
        """Check what is there once nothing can happen any more but faults."""
        for actor, worker in enumerate(self.workers):
            assert worker.outbox._end is not None
            assert not self.inbox.lines[actor].is_alive
            sent = {(worker.incarnation, number) for number in range(worker.num_blocks)}
            rows = {place for place, _ in self.rows[actor]}
            assert sent - rows <= self.gone[actor] | self.lost[actor]


def is_over(system):
    """Return whether nothing can happen any more but faults; then check what is there."""
    if any(name not in FAULTS for name, *_ in system.actions()):
        return False
    system.check_end()
    return True


@pytest.mark.parametrize(
    ("of", "faults", "num_states"),
    [
        ((1, 3, IN_FLIGHT, True), {"kill": 1, "interrupt": 1}, 14_185),
        ((1, 3, IN_FLIGHT), {"kill": 1, "interrupt": 1}, 5_034),
        ((1, 3, 2), {"kill": 1, "save": 1, "return": 1}, 16_805),
        ((1, 3, 2, True), {"save": 1, "return": 1}, 11_304),
        ((2, 2, 2), {"kill": 1}, 12_987),
        thorough((2, 3, 2), {"kill": 1}, 33_824),
        thorough((2, 2, 2), {"save": 1, "return": 1}, 207_835),
        thorough((2, 2, 1), {"kill": 1, "save": 1, "return": 1}, 154_576),
    ],
)
def test_every_order_adds_each_block_once(of, faults, num_states):
    """The arguments are those of `System`. The number of states says how far the search went: it
    changes with the protocol alone."""
    first = System(*of, **faults)
    seen, todo, num_ends = {first.key()}, [first], 0
    while todo:
        system = todo.pop()
        num_ends += is_over(system)
        for action in system.actions():
            new = system.copy()
            new.act(*action)
            if (key := new.key()) not in seen:
                seen.add(key)
                todo.append(new)
    assert num_ends
    assert len(seen) == num_states


def test_a_block_is_not_begun_before_the_parameters_of_its_request_have_come():
    box = Outbox()
    box.hear(Ask("", 1, 0))
    assert box.asked == 0
    box.hear(Ask("", 0, 0, (3, b"new")))
    assert (box.asked, box.newest(), box.newest()) == (2, (3, b"new"), None)
    box.hear(Ask("", 2, 1, (2, b"old")))
    assert box.newest() is None
    assert box.attach("other") == 1
    box.hear(Ask("other", 3, 1, (0, b"of another learner")))
    assert box.newest() == (0, b"of another learner")


def test_an_actor_that_its_learner_has_stopped_is_lost_for_a_successor():
    box = Outbox()
    assert not box.stop("other")
    assert box.stop("")
    box.attach("other")
    assert box.answer(Ask("other", 0, 0)) == ("end", "a learner has stopped it")
    with pytest.raises(StoppedError):
        box.begin(0)


@given(seed=st.integers(0, 2**31))
def test_random_orders_of_a_fleet_add_each_block_once(seed):
    r = np.random.default_rng(seed)
    system = System(4, 5, IN_FLIGHT, True, kill=3, interrupt=3, save=3, **{"return": 2})
    while not is_over(system):
        actions = system.actions()
        system.act(*actions[r.integers(len(actions))])
