"""Blocks of steps from actors, which the learner asks for, and the order in which they are added.

An actor's blocks come in the order of the requests. One that was lost on the way is missing; an
actor that is started again has a new incarnation, whose blocks are numbered from 0.
"""

import collections
import contextlib
import dataclasses
import queue
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxreplay._util import pow2
from jaxreplay._util.aliases import PyTree

IN_FLIGHT = 3  # blocks of an actor, with the one that it fills
Place = tuple[int, int]  # incarnation, number of a block


@dataclasses.dataclass
class ActorBlock:
    """Steps that one actor took.

    Attributes:
      actor: Index of the actor.
      place: Incarnation of the actor, and number of the block in it.
      steps: Step or item, mask and priority, leaves [T, e, ...]; None for priorities that were not
        given.
      members: Names of other members that get the steps, too.
      version: Version of the parameters at its first step.
      resets: bool[e], True for the envs whose first step here is one that resets, since their step
        before has ended an episode. Default: False, for none.
      seconds: Seconds from the actor's last block to this one.
      waited: Seconds of these that the actor was held back.
      logged: Sums and counts of the numbers that the actor has logged, by version and name.
    """

    actor: int
    place: Place
    steps: Any
    members: tuple[str, ...] = ()
    version: int = 0
    resets: Any = False
    seconds: float = 0.0
    waited: float = 0.0
    logged: Mapping[tuple[int, str], tuple[float, int]] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of steps and envs [T, e]."""
        return jax.tree.leaves(self.steps)[0].shape[:2]


@dataclasses.dataclass
class News:
    """Event in the life of an actor.

    Attributes:
      actor: Index of the actor.
      incarnation: Its incarnation.
      kind: "ready": it waits for requests; "gap": an interrupt of it has lost blocks; "done": `act`
        returned; "lost": it ended before, or `act` raised an error; "replaced": another learner has
        it.
      why: Why it was lost. Default: "".
      number: Number of the first block that may still come: those before it were added by another
        learner ("ready"), or are lost if they were not answered ("gap"). Default: 0.
    """

    actor: int
    incarnation: int
    kind: str
    why: str = ""
    number: int = 0


@dataclasses.dataclass
class Line:
    """An actor, as the learner knows it. The numbers are of blocks of this incarnation.

    Attributes:
      index: Index of the actor.
      incarnation: The newest one, which has begun or will after a pause.
      is_alive: Whether it may be asked.
      is_done: Whether `act` has returned.
      asked: Blocks with smaller numbers were asked for.
      heard: Those were answered, or an interrupt of the actor has lost them.
      waiting: Blocks that wait to be added, also of earlier incarnations.
      told: Newest version of the parameters that it was told, or -1.
      bases: Steps that the learner had taken by its newest version, at each of the last requests.
      began: When the newest incarnation began, by `time.monotonic`, as are `since` and `due`.
      since: When it answered last, or was asked after it had answered all.
      due: When to begin it again, or None.
      restarts: Number of times that it was started again, in a row.
    """

    index: int
    incarnation: int = -1
    is_alive: bool = False
    is_done: bool = False
    asked: int = 0
    heard: int = 0
    waiting: collections.deque[ActorBlock] = dataclasses.field(default_factory=collections.deque)
    told: int = -1
    bases: tuple[float, ...] = ()
    began: float = 0.0
    since: float = 0.0
    due: float | None = None
    restarts: int = 0

    @property
    def added(self) -> int:
        """Blocks with smaller numbers were added, or lost: the actor need not keep them."""
        places = (block.place for block in self.waiting)
        return next((number for of, number in places if of == self.incarnation), self.heard)

    @property
    def under_way(self) -> int:
        """Number of blocks that were asked for, and are not added yet."""
        return self.asked - self.added if self.is_alive else 0


class Inbox:
    """The learner's side: how far it has asked each actor, and what was answered and added.

    A block follows the previous one of its actor only if no block between them is missing.
    Otherwise it is a cut: its envs' episodes end before it.

    Args:
      num_actors: Number of actors.

    Attributes:
      added: For each actor the incarnation, and the number of its next block; (-1, 0) before the
        first one, which is a cut.
    """

    def __init__(self, num_actors: int):
        self.added: list[Place] = [(-1, 0)] * num_actors
        self.lines = [*map(Line, range(num_actors))]
        self.num_dropped = 0  # lost, or the rows that were loaded have them
        self._turn = 0

    def resume(self, added: Sequence[Place]) -> None:
        """Continue after the blocks that a checkpoint has. Later ones that were added are gone."""
        self.added = [(int(incarnation), int(number)) for incarnation, number in added]

    def begin(self, actor: int, incarnation: int, added: int = 0) -> None:
        """Begin to ask an incarnation, of which so many blocks were added by another learner."""
        line, place = self.lines[actor], self.added[actor]
        first = max(added, place[1] if place[0] == incarnation else 0)
        line.incarnation, line.is_alive = incarnation, True
        line.asked = line.heard = first

    def ask(self, actor: int) -> Place:
        """Return the number of the next request, and how many blocks were added."""
        line = self.lines[actor]
        line.asked += 1
        return line.asked - 1, line.added

    def receive(self, block: ActorBlock) -> None:
        """Keep a block."""
        self.skip(block.actor, block.place[1])
        line = self.lines[block.actor]
        line.heard += 1
        line.waiting.append(block)

    def skip(self, actor: int, number: int) -> None:
        """Note that blocks with smaller numbers that were not answered are lost."""
        line = self.lines[actor]
        lost = max(number - line.heard, 0)
        line.heard, self.num_dropped = line.heard + lost, self.num_dropped + lost

    def lose(self, actor: int) -> None:
        """Ask an actor no more: it has ended. What it had sent is still added."""
        self.lines[actor].is_alive = False

    def next_of(self, actor: int) -> ActorBlock | None:
        """Return the block of an actor that is to be added next, or None if it has not arrived.
        Drop those that loaded rows have."""
        line = self.lines[actor]
        while line.waiting and line.waiting[0].place < self.added[actor]:
            line.waiting.popleft()
            self.num_dropped += 1
        return line.waiting[0] if line.waiting else None

    def is_cut(self, block: ActorBlock) -> bool:
        """Return whether the steps of a block do not follow those that were added last."""
        return block.place != self.added[block.actor]

    def next_blocks(self) -> list[ActorBlock]:
        """Return blocks that can be added by one call: one of an actor, of one form. The actors
        take turns."""
        order = map(self.next_of, in_turn(range(len(self.added)), self._turn))
        found = [block for block in order if block is not None]
        return [block for block in found if _form(block) == _form(found[0])]

    def note(self, blocks: Sequence[ActorBlock]) -> None:
        """Note that blocks were added."""
        for block in blocks:
            self.lines[block.actor].waiting.popleft()
            incarnation, number = block.place
            self.added[block.actor] = incarnation, number + 1
            self._turn = block.actor + 1


def in_turn(these: Sequence[Any], turn: int) -> list[Any]:
    """Return all of them in their order, from the one whose turn it is."""
    return [*these[turn:], *these[:turn]]


def arrived(simple_queue: Any, seconds: float) -> list[Any]:
    """Return all that a `queue.SimpleQueue` has; wait at most so many seconds until it has some."""
    found = []
    with contextlib.suppress(queue.Empty):
        found.append(simple_queue.get(timeout=seconds))
        while True:
            found.append(simple_queue.get(False))
    return found


def saved_actors(saved: Any) -> dict[str, dict[str, Any]]:
    """Return what a checkpoint says of actors, by their replay's member; {} if it is damaged."""
    try:
        return {
            member: {
                "run": str(one["run"]),
                "added": [(int(incarnation), int(number)) for incarnation, number in one["added"]],
                "incarnations": [int(newest) for newest in one["incarnations"]],
                "version": int(one["version"]),
            }
            for member, one in saved.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def _form(block: ActorBlock) -> Any:
    leaves, structure = jax.tree.flatten(block.steps)
    return structure, block.members, [(leaf.shape, leaf.dtype) for leaf in leaves]


def joined(blocks: Sequence[ActorBlock], num_envs: int) -> tuple[PyTree, np.ndarray, np.ndarray]:
    """Return blocks of one form as one: new arrays [T, E, ...], the numbers of its envs, and which
    of them reset. It is padded to a power of two of blocks, so that few programs are compiled.

    Args:
      blocks: Blocks of different actors, with e envs each.
      num_envs: Number of envs of all actors. Larger numbers are of padding.
    """
    time, num = blocks[0].shape
    total = num * pow2.power_above(len(blocks))

    def join(*leaves: np.ndarray) -> np.ndarray:
        array = np.zeros((time, total, *leaves[0].shape[2:]), leaves[0].dtype)
        for place, leaf in enumerate(leaves):
            array[:, place * num : (place + 1) * num] = leaf
        return array

    envs, resets = np.full(total, num_envs, np.int32), np.zeros(total, bool)
    for place, block in enumerate(blocks):
        own = slice(place * num, (place + 1) * num)
        envs[own], resets[own] = np.arange(num) + block.actor * num, block.resets
    return jax.tree.map(join, *(block.steps for block in blocks)), envs, resets
