"""The learner's numbers of its actors' blocks, and how blocks are joined."""

import numpy as np
import pytest

from jaxreplay.actors.block import ActorBlock, Inbox, joined, saved_actors

pytestmark = pytest.mark.no_xla


def block(actor, incarnation, number, length=2):
    values = np.full((length, 3), 100 * incarnation + number)
    return ActorBlock(actor, (incarnation, number), (values, None, None))


def add(inbox):
    """Add what can be added; return the places, each with whether it was a cut."""
    added = []
    while blocks := inbox.next_blocks():
        added += [(one.actor, one.place, inbox.is_cut(one)) for one in blocks]
        inbox.note(blocks)
    return added


def test_a_lost_block_is_a_gap():
    inbox = Inbox(1)
    inbox.begin(0, 0)
    for number in range(3):
        assert inbox.ask(0) == (number, 0)
    inbox.receive(block(0, 0, 0))
    inbox.skip(0, 2)
    assert (inbox.lines[0].under_way, inbox.num_dropped) == (3, 1)
    assert add(inbox) == [(0, (0, 0), True)]
    assert inbox.lines[0].under_way == 1  # the lost one is not waited for
    inbox.receive(block(0, 0, 2))
    assert add(inbox) == [(0, (0, 2), True)]
    assert inbox.ask(0) == (3, 3)


def test_a_load_goes_on_after_the_blocks_that_its_rows_have():
    """Blocks that came before the load are added after those of the rows, or are among them."""
    for saved, added in (
        ((0, 1), [(0, (0, 2), True)]),
        ((0, 3), []),
        ((0, 2), [(0, (0, 2), False)]),
    ):
        inbox = Inbox(1)
        inbox.begin(0, 0)
        for number in range(2):
            inbox.receive(block(0, 0, number))
        assert len(add(inbox)) == 2
        inbox.receive(block(0, 0, 2))
        inbox.resume([saved])
        assert add(inbox) == added
        assert (inbox.num_dropped, inbox.lines[0].added) == (1 - len(added), 3)
    inbox = Inbox(1)
    inbox.resume([(0, 5)])
    inbox.begin(0, 0, added=4)  # the learner that was killed had not told that it has the fifth
    assert inbox.ask(0) == (5, 5)
    inbox.begin(0, 1)
    assert inbox.ask(0) == (0, 0)


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
        inbox.receive(ActorBlock(1, (0, 0), (other, None, None)))
        assert [one.actor for one in inbox.next_blocks()] == [0]


def test_blocks_are_joined_with_padding():
    blocks = [block(actor, 0, actor) for actor in (4, 0, 2)]
    blocks[1].resets = np.array([True, False, True])
    (values, mask, priority), envs, resets = joined(blocks, num_envs=15)
    assert mask is priority is None
    assert np.flatnonzero(resets).tolist() == [3, 5]
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
    assert saved_actors(damaged) == {}
