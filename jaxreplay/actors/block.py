"""Blocks of steps from actors, and the order in which they are added: each one once.

A block may arrive late, twice, before an earlier one, or never. An actor that is started again has
a new incarnation, whose blocks are numbered from 0.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxreplay._util import pow2
from jaxreplay._util.aliases import PyTree

Place = tuple[int, int]  # incarnation, number of a block


@dataclasses.dataclass
class Block:
    """Steps that one actor took.

    Attributes:
      actor: Index of the actor.
      place: Incarnation of the actor, and number of the block in it.
      oldest: Number of the oldest block of the incarnation that was not acknowledged yet: earlier
        ones will not be sent again.
      version: Version of the parameters at its first step.
      steps: Step or item, mask and priority, leaves [T, e, ...]; None for what was not given. A
        lost block has None in place of all.
      resets: bool[e], True for the envs whose first step here is one that resets, since their step
        before has ended an episode; or None.
      seconds: Seconds from the actor's last block to this one.
      waited: Seconds of these that the actor was held back.
    """

    actor: int
    place: Place
    oldest: int
    version: int
    steps: Any
    resets: Any = None
    seconds: float = 0.0
    waited: float = 0.0

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
      kind: "ready": it began, or this learner has met it; "lost": it ended before `act` returned;
        "done": `act` returned; "failed": it was lost, and is not started again.
      why: Why it was lost. Default: "".
      acked: Number of its blocks that were acknowledged before, by another learner. Default: 0.
      granted: Number of blocks that it was granted before. Default: 0.
    """

    actor: int
    incarnation: int
    kind: str
    why: str = ""
    acked: int = 0
    granted: int = 0


class Inbox:
    """Blocks that were received and wait to be added, and how far each actor's were added.

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
        self._waiting: list[dict[Place, Block]] = [{} for _ in self.added]
        # places before which all that is missing will not arrive: a learner had it, or an
        # incarnation has ended
        self._oldest: list[Place] = [(-1, 0)] * num_actors
        self.num_dropped = 0  # received twice, too late, or lost
        self._turn = 0

    def resume(self, added: Sequence[Place]) -> None:
        """Continue after the blocks that a checkpoint has. Later ones that were added are gone."""
        self._oldest = [max(places) for places in zip(self._oldest, self.added, strict=True)]
        self.added = [(int(incarnation), int(number)) for incarnation, number in added]

    def receive(self, block: Block) -> None:
        """Keep a block, unless it was received before or came too late."""
        waiting, incarnation = self._waiting[block.actor], block.place[0]
        self._oldest[block.actor] = max(self._oldest[block.actor], (incarnation, block.oldest))
        if block.place < self.added[block.actor] or block.place in waiting:
            self.num_dropped += 1
        elif block.steps is None:
            self.num_dropped += 1
            self._oldest[block.actor] = max(
                self._oldest[block.actor], (incarnation, block.place[1] + 1)
            )
        else:
            waiting[block.place] = block

    def next_of(self, actor: int) -> Block | None:
        """Return the block of an actor that is to be added next, or None if it has not arrived."""
        place = min(self._waiting[actor], default=None)
        if place is None:
            return None
        is_next = place[1] == 0 or place == self.added[actor] or place <= self._oldest[actor]
        return self._waiting[actor][place] if is_next else None

    def is_cut(self, block: Block) -> bool:
        """Return whether the steps of a block do not follow those that were added last."""
        return block.place != self.added[block.actor]

    def next_blocks(self) -> list[Block]:
        """Return blocks that can be added by one call: one of an actor, of one form. The actors
        take turns."""
        num = len(self.added)
        order = [*range(self._turn, num), *range(self._turn)]
        found = [block for actor in order if (block := self.next_of(actor)) is not None]
        return [block for block in found if _form(block) == _form(found[0])]

    def note(self, blocks: Sequence[Block]) -> None:
        """Note that blocks were added."""
        for block in blocks:
            del self._waiting[block.actor][block.place]
            incarnation, number = block.place
            self.added[block.actor] = incarnation, number + 1
            self._turn = block.actor + 1

    @property
    def num_waiting(self) -> int:
        """Number of blocks that wait."""
        return sum(map(len, self._waiting))


def places_of(saved: Any) -> dict[str, dict[str, Any]]:
    """Return what a checkpoint says of actors, by their replay's member; {} if it is damaged."""
    try:
        return {
            member: {
                "run": str(one["run"]),
                "added": [(int(incarnation), int(number)) for incarnation, number in one["added"]],
                "incarnations": [int(newest) for newest in one.get("incarnations", [])],
                "version": int(one["version"]),
            }
            for member, one in saved.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def _form(block: Block) -> Any:
    leaves, structure = jax.tree.flatten(block.steps)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def joined(blocks: Sequence[Block], num_envs: int) -> tuple[PyTree, np.ndarray]:
    """Return blocks of one form as one: new arrays [T, E, ...], and the numbers of its envs. It is
    padded to a power of two of blocks, so that few programs are compiled.

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

    envs = np.full(total, num_envs, np.int32)
    for place, block in enumerate(blocks):
        envs[place * num : (place + 1) * num] = np.arange(num) + block.actor * num
    return jax.tree.map(join, *(block.steps for block in blocks)), envs
