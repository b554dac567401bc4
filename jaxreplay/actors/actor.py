"""An actor: it takes steps in its own envs, and answers with blocks of them."""

import dataclasses
import functools
import math
import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxreplay._util import checks
from jaxreplay._util.aliases import Autoreset, PyTree
from jaxreplay._util.names import kind_of
from jaxreplay.actors.block import ActorBlock, News
from jaxreplay.actors.outbox import Outbox, StoppedError
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.host import arrays
from jaxreplay.host.arrays import Format
from jaxreplay.types import Step


@dataclasses.dataclass(frozen=True)
class Setup:
    """Settings of all actors of a buffer.

    Attributes:
      num_actors: Number of actors A.
      num_envs: Number of envs e of each actor.
      block_length: Number of steps T of a block.
      seed: Seed from which the actors' own are made.
      autoreset: The buffer's, as are `num_agents` and `allow_mask`.
      example: Shapes and dtypes of one env's step, or None: the first step tells them.
      version_key: Name of the extra that gets the version, or None.
      others: Names of the mixture's members that may get steps, too. Default: none.
    """

    num_actors: int
    num_envs: int
    block_length: int
    seed: int
    autoreset: Autoreset | None
    num_agents: int | None
    allow_mask: bool
    example: Any
    version_key: str | None
    others: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        buffer: ReplayBuffer,
        example: Any,
        num_actors: int,
        block_length: int,
        seed: int,
        version_key: str | None,
        others: tuple[str, ...] = (),
    ) -> "Setup":
        """Return the settings for a buffer, or raise a ValueError."""
        checks.check_size("start", "num_actors", num_actors)
        checks.check_size("start", "block_length", block_length)
        num_envs = buffer.num_envs // num_actors
        if num_envs == 0 or num_envs * num_actors != buffer.num_envs:
            raise ValueError(
                f"start: {buffer.num_envs} envs cannot be divided among num_actors={num_actors}"
            )
        if buffer.layout().lockstep:
            raise ValueError(
                "start: actors need a write position for each env; make the buffer with "
                "allow_mask=True"
            )
        told = buffer.autoreset, buffer.num_agents, buffer.allow_mask
        return cls(num_actors, num_envs, block_length, seed, *told, example, version_key, others)


class Actor:
    """One of the actors that `Replay.start` has started, as `act(actor)` gets it.

    Args:
      index: Number of the actor, from 0.
      incarnation: Number of times that it was started before.
      setup: What all actors are told.
      outbox: What the learner asks for, and gets.
      memory: Called with a size in bytes and the number of a block; returns memory for it.

    Attributes:
      index: Number of the actor, from 0.
      incarnation: Number of times that it was started before.
      num_actors: Number of actors.
      num_envs: Number of envs e of this actor.
      envs: Numbers of these in the buffer, a range.
      seed: A seed of its own, another one in each incarnation.
      version: Version of the parameters that `params` returned last. Initially 0.
    """

    def __init__(
        self,
        index: int,
        incarnation: int,
        setup: Setup,
        outbox: Outbox,
        memory: Callable[[int, int], Any] = lambda size, number: np.zeros(size, np.uint8),
    ):
        self.index, self.incarnation, self.version = index, incarnation, 0
        self.num_actors, self.num_envs = setup.num_actors, setup.num_envs
        self.envs = range(index * self.num_envs, (index + 1) * self.num_envs)
        entropy = np.random.SeedSequence([setup.seed, index, incarnation])
        self.seed = int(entropy.generate_state(1)[0] >> 1)
        self._setup, self._outbox, self._memory_for = setup, outbox, memory
        self._params: Any = None
        self._number = self._length = 0  # blocks that were sent, steps of the one that is filled
        self._memory: Any = None  # of the block that is filled
        self._told: Any = None  # format of the newest block, and the same in bytes
        self._arrays: list[np.ndarray] = []  # of the block that is filled
        self._steps: Any = None  # of the block, of which these are the leaves
        self._mask: Any = None
        self._ended = np.zeros(self.num_envs, bool)  # envs whose next step resets
        self._priority: Any = None
        self._members: tuple[str, ...] = ()  # that get the block, too
        self._sums = np.zeros((2, self.num_envs))  # return and length of the unfinished episodes
        self._logged: dict[tuple[int, str], tuple[float, int]] = {}  # sums and counts
        self._format: Any = None
        self._stamp = np.zeros(self.num_envs, np.int32)  # the version
        self._first_version, self._since, self._waited = 0, time.monotonic(), 0.0
        if setup.example is not None:
            self._format = Format("start", setup, setup.example, self._stamped)

    @property
    def running(self) -> bool:
        """True while the learner wants more steps."""
        return not self._outbox.is_stopped

    def params(self) -> Any:
        """Return the newest parameters that have come with a request, of type and structure as they
        were published. `version` is theirs from now on.

        Returns:
          The parameters; those that `Replay.start` got, or None, if none were published yet.
        """
        found = self._outbox.newest()
        if found is not None:
            self.version, self._params = found[0], pickle.loads(found[1])
            self._stamp = np.full(self.num_envs, self.version, np.int32)
        return self._params

    def log(self, **numbers: float) -> None:
        """Count numbers, of which `Actors.metrics` has the mean for each version of the parameters.
        They go with the block that is filled; after an actor's last step they are lost.

        Returns and lengths of episodes are counted without it, as `episode_return` (of all agents)
        and `episode_length`.

        Args:
          **numbers: Any numbers, by name.
        """
        self._count(self._logged, numbers.items())

    def _count(self, logged: dict[Any, Any], numbers: Iterable[tuple[str, float]]) -> None:
        for name, number in numbers:
            total, num = logged.get((self.version, name), (0.0, 0))
            logged[self.version, name] = total + float(number), num + 1

    def add(
        self,
        step: PyTree = None,
        *,
        mask: Any = None,
        priority: Any = None,
        members: Sequence[str] = (),
        **fields: Any,
    ) -> None:
        """Append one step of the actor's envs to a block, and send the block if it is complete.

        Arrays are copied. After a block it waits while the learner holds the actor back, so that
        the next action is of the newest parameters. If the learner stops the actor, it raises an
        error that is no `Exception`, and ends `act`.

        Args:
          step: A `Step`, or a mapping, dataclass or NamedTuple with its fields, or items. Leaves
            [e, ...] of NumPy or JAX arrays or tensors; those of a step may be [...] if e is 1.
            Default: `fields`.
          mask: bool[e], False where an env took no step; needs `allow_mask=True`. Default: every
            env took a step.
          priority: float[e], at least 0, such as the actor's own TD errors; for all steps of a
            block, or for none. Default: as for `ReplayBuffer.add`.
          members: Names of other members of the mixture that get the step, too, as a human's
            intervention is a demonstration: members with the same envs, each with a write position
            of its own. There an episode ends before a step that does not follow the last one, and
            its newest transition is given up: name a member for the step after the last one, too.
            A block ends where they change. Default: none.
          **fields: Fields of the step, in place of `step`: `obs=..., action=..., ...`.

        Raises:
          ValueError: The step does not fit the buffer, or those before it; or a member gets no
            steps of these envs.
        """
        if (step is None) == (not fields):
            raise ValueError(
                "add: give a step, or its fields as keywords: add(obs=..., action=..., ...)"
            )
        given, axes = fields if step is None else step, (self.num_envs,)
        leaves = self._format and self._format.on_host("add", axes, given, self._stamp)
        self._put(
            self._slowly(given) if leaves is None else leaves,
            self._per_env("mask", mask, bool),
            self._per_env("priority", priority, float),
            members,
        )

    def _slowly(self, given: Any) -> list[Any]:
        """Return the leaves of any step as they are stored."""
        if self._format is None:
            example = arrays.example_of("add", self._setup, given)
            version = jax.ShapeDtypeStruct((), np.int32)
            self._format = Format(
                "add", self._setup, self._stamped("add", example, version), self._stamped
            )
        steps = self._format.steps("add", given, self._stamp)
        if self.num_envs == 1:  # it needs no axis
            lacks = lambda leaf, spec: leaf[None] if leaf.shape == spec.shape else leaf
            steps = jax.tree.map(lacks, steps, self._format.specs)
        self._format.check("add", steps, (self.num_envs,))
        return [*map(np.asarray, jax.tree.leaves(steps))]

    def _stamped(self, where: str, given: Any, version: Any) -> Any:
        """Return a step with the version, if that is stored."""
        step = arrays.as_stored(where, self._setup, given)
        if (key := self._setup.version_key) is None:
            return step
        is_step = isinstance(step, Step)
        entries = step.extras if is_step else step
        entries = {} if entries is None else entries
        if not isinstance(entries, dict):
            raise ValueError(
                f"{where}: version_key={key!r} needs {'extras' if is_step else 'an item'} that are "
                f"a dict, got {kind_of(entries)}"
            )
        stamped = {**entries, key: version}
        return step.replace(extras=stamped) if is_step else stamped

    def _per_env(self, name: str, given: Any, kind: type) -> Any:
        """Return a mask or priorities [e], or None if they are not given."""
        if given is None:
            return None
        if name == "mask" and not self._setup.allow_mask:
            raise ValueError(
                "add: a mask was given, but this buffer was made without allow_mask=True"
            )
        array = np.asarray(given)
        array = array[None] if self.num_envs == 1 and array.ndim == 0 else array
        if array.shape != (self.num_envs,) or not np.can_cast(array.dtype, kind, "same_kind"):
            raise ValueError(
                f"add: {name}: got {kind_of(given)}, expected {kind.__name__}[{self.num_envs}]"
            )
        return array

    def _put(self, leaves: list[Any], mask: Any, priority: Any, members: Sequence[str]) -> None:
        """Copy a step to the block that is filled."""
        members = (members,) if isinstance(members, str) else tuple(members)
        if self._length == self._setup.block_length or members != self._members:
            if not {*members} <= {*self._setup.others}:
                raise ValueError(
                    f"add: members={members}, but these may get the steps: {self._setup.others}"
                )
            self._send()  # if it is full, an interrupt came before
            self._members = members
        if self._length == 0:
            self._wait()  # again, should an interrupt have ended the wait before
            priorities = None if priority is None else jax.ShapeDtypeStruct((), np.float32)
            specs = self._format.specs, jax.ShapeDtypeStruct((), bool), priorities
            if self._told is None or self._told[0] != specs:
                self._told = specs, pickle.dumps(specs)
            *_, size = layout(self._told[1], self._setup.block_length, self.num_envs)
            self._memory = self._memory_for(size, self._number)
            found = views(self._memory, self._told[1], self._setup)
            self._steps, self._mask, self._priority = found
            self._arrays = jax.tree.leaves(self._steps)
            self._mask[:] = True
            self._first_version = self.version
        elif (priority is None) != (self._priority is None):
            raise ValueError("add: give the priority of all steps of a block, or of none")
        for array, leaf in zip(self._arrays, leaves, strict=True):
            array[self._length] = leaf
        of_envs: Any = ((self._mask, mask), (self._priority, priority))
        for array, given in of_envs:
            if given is not None:
                array[self._length] = given
        self._length += 1
        if self._length == self._setup.block_length:
            self.flush()

    def flush(self) -> None:
        """Send the steps of the block that is being filled, and wait as `add` does. The next block
        has its full length."""
        self._send()
        self._wait()

    def _send(self) -> None:
        if self._length:
            now = time.monotonic()
            number, memory, logged = self._number, self._memory, {**self._logged}
            ended, sums = self._after(self._length, logged)
            figures = self._first_version, self._ended, now - self._since, self._waited, logged
            about = self._told[1], self._length, self._members, *figures
            # at once, and first: should an interrupt come, the block is lost, and a gap
            self._length, self._number, self._ended, self._sums = 0, number + 1, ended, sums
            self._since, self._waited, self._logged = now, 0.0, {}
            self._outbox.put(number, about, memory)

    def _after(self, length: int, logged: dict[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return what follows a block of so many steps: bool[e], True for the envs whose last step
        has ended an episode, if the next one only resets; and the sums of the unfinished episodes.
        Log those that end."""
        autoreset, ended = self._setup.autoreset, self._ended
        if autoreset is None:
            return ended, self._sums
        ends = self._steps.terminated[:length] | self._steps.truncated[:length]
        reward = self._steps.reward[:length]
        if ends.ndim > 2:  # of each agent
            ends = ends.all(-1)
        if reward.ndim > 2:
            reward = reward.sum(-1)
        took = self._mask[:length]

        # which steps only reset: those whose env's last step, of the block or before, has ended
        ended = np.concatenate([ended[None], ends & (autoreset == "next_step")])
        if not took.all():
            last = np.maximum.accumulate(np.where(took, np.arange(1, length + 1)[:, None], 0))
            ended[1:] = ended[last, np.arange(self.num_envs)]
        counts = took & ~ended[:-1]

        # returns and lengths of the episodes that end
        numbers = np.where(counts, reward, 0.0), counts
        sums, first = self._sums.copy(), np.zeros(self.num_envs, int)
        for at, env in np.argwhere(counts & ends):
            found = sums[:, env] + [
                one[first[env] : at + 1, env].sum(None, float) for one in numbers
            ]
            self._count(logged, zip(("episode_return", "episode_length"), found, strict=True))
            sums[:, env], first[env] = 0.0, at + 1
        is_rest = np.arange(length)[:, None] >= first
        return ended[-1], sums + [np.where(is_rest, one, 0).sum(0, float) for one in numbers]

    def _wait(self) -> None:
        """Wait until the next block may be begun."""
        if self._outbox.asked > self._number and not self._outbox.is_stopped:
            return
        began = time.monotonic()
        self._outbox.skip(self._number)
        self._outbox.begin(self._number)
        self._waited += time.monotonic() - began


def run(
    act: Callable[[Actor], Any],
    index: int,
    incarnation: int,
    setup: Setup,
    outbox: Outbox,
    *memory: Callable[[int, int], Any],
) -> None:
    """Run an actor until `act` returns, or it is stopped, and tell its outbox how it ended. The
    other arguments are those of `Actor`."""
    try:
        actor = Actor(index, incarnation, setup, outbox, *memory)
        actor._wait()
        act(actor)
        actor._send()
        outbox.end("")
    except StoppedError:
        pass
    except BaseException:
        if not outbox.is_stopped:
            outbox.end(traceback.format_exc())


@functools.lru_cache
def layout(told: bytes, length: int, num_envs: int) -> tuple[Any, list[Any], int]:
    """Return the structure of a block whose steps have such specs, pickled; shape, dtype and offset
    of each leaf; and its size in bytes."""
    leaves, structure = jax.tree.flatten(pickle.loads(told))
    places, end = [], 0
    for spec in leaves:
        shape, dtype = (length, num_envs, *spec.shape), np.dtype(spec.dtype)
        places.append((shape, dtype, end))
        end += -(-math.prod(shape) * dtype.itemsize // 64) * 64
    return structure, places, end


def views(memory: Any, told: bytes, setup: Setup) -> Any:
    """Return the arrays of a block in some memory, as a tree."""
    structure, places, _ = layout(told, setup.block_length, setup.num_envs)
    arrays = [np.ndarray(shape, dtype, memory, at) for shape, dtype, at in places]
    return jax.tree.unflatten(structure, arrays)


def heard(setup: Setup, index: int, incarnation: int, kind: str, *of: Any) -> ActorBlock | News:
    """Return an answer of an outbox, or "ready", as the learner's thread takes it."""
    if kind == "block":
        number, (told, length, *figures), memory = of
        steps = jax.tree.map(lambda leaf: leaf[:length], views(memory, told, setup))
        return ActorBlock(index, (incarnation, number), steps, *figures)
    if kind == "end":
        return News(index, incarnation, "lost" if of[0] else "done", of[0])
    return News(index, incarnation, kind, number=of[0] if of else 0)
