"""Blocks are added once and in order, over a network that loses, delays, repeats and reorders them;
where one is missing, the episodes end."""

import copy

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxreplay.actors.block import Block, Inbox, joined, places_of
from tests.conftest import SOAK

pytestmark = pytest.mark.no_xla


def block(actor, incarnation, number, oldest=0, length=2):
    values = np.full((length, 3), 100 * incarnation + number)
    return Block(actor, (incarnation, number), oldest, 0, (values, None, None))


def add(inbox):
    """Add what can be added; return the places, each with whether it was a cut."""
    added = []
    while blocks := inbox.next_blocks():
        added += [(one.actor, one.place, inbox.is_cut(one)) for one in blocks]
        inbox.note(blocks)
    return added


class Sender:
    """An actor that sends each block again until it is acknowledged, at most three at once."""

    def __init__(self, index):
        self.index, self.incarnation, self.number, self.acked = index, 0, 0, 0

    def send(self):
        if self.number < self.acked + 3:
            self.number += 1
        return [
            block(self.index, self.incarnation, number, oldest=self.acked)
            for number in range(self.acked, self.number)
        ]

    def acknowledge(self, place):
        if place[0] == self.incarnation:
            self.acked = max(self.acked, place[1])

    def die(self):
        self.incarnation, self.number, self.acked = self.incarnation + 1, 0, 0


EVENTS = st.sampled_from(["send"] * 4 + ["arrive"] * 6 + ["lose", "die", "save", "restart"])


@given(events=st.lists(EVENTS, max_size=400 if SOAK else 120), seed=st.integers(0, 2**31))
def test_each_block_is_added_once_and_a_gap_is_a_cut(events, seed):
    r = np.random.default_rng(seed)
    senders, network, acknowledgements = [Sender(0), Sender(1)], [], []
    inbox, rows = Inbox(2), [[], []]  # rows: what the buffer holds
    saved = copy.deepcopy((inbox.added, rows))
    since_save = [set(), set()]  # acknowledged by this learner or an earlier one, not saved

    def receive(one):
        inbox.receive(one)
        for actor, place, is_cut in add(inbox):
            rows[actor].append((place, is_cut))
            since_save[actor].add(place)
            acknowledgements.append((actor, (place[0], place[1] + 1)))

    for event in [*events, *["send", "arrive"] * 8]:
        sender = senders[r.integers(2)]
        if event == "send":
            for one in sender.send():
                network += [one] * r.integers(1, 3)
        elif event == "arrive" and network:
            for _ in range(r.integers(1, 4)):
                if network:
                    receive(network.pop(r.integers(len(network))))
            while acknowledgements and r.random() < 0.7:
                actor, place = acknowledgements.pop(r.integers(len(acknowledgements)))
                senders[actor].acknowledge(place)
        elif event == "lose" and network:
            network.pop(r.integers(len(network)))
        elif event == "die":
            sender.die()
        elif event == "save":
            saved = copy.deepcopy((inbox.added, rows))
            since_save = [set(), set()]
        elif event == "restart":
            inbox = Inbox(2)
            added, rows = copy.deepcopy(saved)
            inbox.resume(added)

    for _ in range(8):  # a network that works, until all is said
        for sender in senders:
            sender.send()
            for number in range(sender.acked, sender.number):
                receive(block(sender.index, sender.incarnation, number, oldest=sender.acked))
            for actor, place in acknowledgements:
                senders[actor].acknowledge(place)
    for sender in senders:
        places = [place for place, _ in rows[sender.index]]
        assert places == sorted(set(places))
        previous = None
        for place, is_cut in rows[sender.index]:
            follows = previous is not None and place == (previous[0], previous[1] + 1)
            assert is_cut == (not follows)
            previous = place
        sent = {(sender.incarnation, number) for number in range(sender.number)}
        gone = sent - set(places)
        assert sender.number == sender.acked
        assert gone <= since_save[sender.index]  # by a learner that has died since


def test_a_lost_block_is_a_gap():
    inbox = Inbox(1)
    inbox.receive(block(0, 0, 0))
    assert add(inbox) == [(0, (0, 0), True)]
    inbox.receive(block(0, 0, 2))
    assert not add(inbox)
    lost = block(0, 0, 1)
    lost.steps = None
    inbox.receive(lost)
    assert add(inbox) == [(0, (0, 2), True)]
    assert inbox.num_dropped == 1


def test_a_new_incarnation_does_not_wait_for_what_the_last_one_lost():
    inbox = Inbox(1)
    for place in ((0, 0), (0, 2), (0, 3), (1, 0), (1, 1)):
        inbox.receive(block(0, *place))
    places = [((0, 0), True), ((0, 2), True), ((0, 3), False), ((1, 0), True), ((1, 1), False)]
    assert add(inbox) == [(0, *one) for one in places]
    inbox.receive(block(0, 0, 1))
    assert not add(inbox)
    assert inbox.num_dropped == 1


def test_blocks_that_a_learner_had_before_a_load_are_not_waited_for():
    inbox = Inbox(1)
    for number in range(3):
        inbox.receive(block(0, 0, number))
    assert len(add(inbox)) == 3
    inbox.resume([(0, 1)])
    inbox.receive(block(0, 0, 3))
    assert add(inbox) == [(0, (0, 3), True)]


def test_actors_take_turns():
    inbox = Inbox(3)
    for number in range(3):
        for actor in range(3):
            inbox.receive(block(actor, 0, number, length=2 if actor else 1))
    first = inbox.next_blocks()  # blocks of other lengths need a call of their own
    assert [one.actor for one in first] == [0]
    inbox.note(first)
    assert [one.actor for one in inbox.next_blocks()] == [1, 2]


def test_blocks_of_other_dtypes_or_shapes_are_not_joined():
    for other in (np.zeros((2, 3), np.float32), np.zeros((2, 3, 1), np.int64)):
        inbox = Inbox(2)
        inbox.receive(block(0, 0, 0))
        inbox.receive(Block(1, (0, 0), 0, 0, (other, None, None)))
        assert [one.actor for one in inbox.next_blocks()] == [0]


def test_blocks_are_joined_with_padding():
    blocks = [block(actor, 0, actor) for actor in (4, 0, 2)]
    (values, mask, priority), envs = joined(blocks, num_envs=15)
    assert mask is priority is None
    assert envs.tolist() == [12, 13, 14, 0, 1, 2, 6, 7, 8, 15, 15, 15]
    assert values.tolist() == 2 * [[4] * 3 + [0] * 3 + [2] * 3 + [0] * 3]


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        3,
        {"": 3},
        {"": {"run": "a", "added": [[0]], "incarnations": [0], "version": 0}},
        {"": {"run": "a", "added": [[0, 0]], "incarnations": ["x"], "version": 0}},
    ],
)
def test_damaged_numbers_of_a_checkpoint_are_ignored(damaged):
    assert places_of(damaged) == {}
