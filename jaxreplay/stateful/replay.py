"""`Replay` keeps its own state, for loops that are not jitted: PyTorch, NumPy, many threads."""

import collections
import collections.abc
import dataclasses
import operator
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Unpack

import jax

from jaxreplay._util import checks, transfers
from jaxreplay._util.aliases import Framework, PyTree
from jaxreplay._util.hints import unknown_attribute
from jaxreplay._util.names import kind_of
from jaxreplay.actors import Actor, Actors
from jaxreplay.actors.actor import Setup
from jaxreplay.actors.block import saved_actors
from jaxreplay.buffers.jitted import buffer_of, method, unjitted
from jaxreplay.buffers.mixture import Mixture
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.tiered import Tiered, tiered
from jaxreplay.buffers.verbs import VERBS
from jaxreplay.host import arrays as host_arrays
from jaxreplay.host.arrays import Block, owned
from jaxreplay.inspection import Inspection, inspect
from jaxreplay.inspection.contents import resets_of
from jaxreplay.inspection.lag import LagWatch
from jaxreplay.samplers import OnlineQueue
from jaxreplay.stateful.actor_host import ActorHost
from jaxreplay.stateful.lock import Monitor
from jaxreplay.stateful.owner import Draws, MixtureOwner, StateOwner
from jaxreplay.stateful.places import OnDevice, OnHost, consumes_rows
from jaxreplay.stateful.rate_limiter import RateLimiter
from jaxreplay.storage.episodes import Episodes
from jaxreplay.storage.state import ReplayState
from jaxreplay.types import Index, Sample, SampleOptions

_WAIT = 60.0  # seconds, if samples_per_insert is given


class Replay:
    """A buffer that keeps its own state and random key, and is safe to use from any thread.

    It takes NumPy, PyTorch and JAX arrays. If a call fails after the state was donated, the rows
    are lost. Later calls then raise RuntimeError, until a `load` succeeds. Axes: T time, E env
    (`num_envs`), B batch.

    Steps of NumPy arrays, or of tensors on the host, wait there, up to 64 of them, also those of
    one env or of some. The next call that needs the rows adds them all in one program; `sample`
    does so in the program that samples. So does a step of all envs after steps of some.
    Every call sees all steps that were added before it.

    Args:
      buffer: A `ReplayBuffer`, as `jaxreplay.uniform`, `prioritized`, `sequences`, ... make it, or
        a `Mixture`: methods that add or read rows then take the name of a `member`.
      example: One env's step, or one item; only structure, shapes and dtypes are read. `state`
        takes its place. Default: the first step added, or that of the checkpoint that is loaded.
      state: State to begin with, of any `ReplayBuffer` with the same steps, as `from_episodes` and
        `checkpoint.restore` return it; for a mixture a dict of some members' states by name. The
        replay takes it over: do not use it afterwards. Default: an empty one.
      seed: Seed of the random key. It is not saved: resume with the same seed to get the same
        samples. Default: 0.
      framework: Kind of arrays in a batch: "jax", "numpy" (read-only views) or "torch" (do not
        write to the tensors). Default: "jax".
      device: Device that stores the rows: a `jax.Device`, or a platform such as "cpu" for the
        host's memory. Batches go to JAX's default device. Default: JAX's default device.
      rows: Where the rows lie: "device"; or with an index of 5 to 22 bytes a row on the device, as
        `jaxreplay.tiered` has it: "host", in the memory of the host; or the path of a folder on a
        disk of this machine, such as "/data/run7". Rows that the folder has already are those that
        the replay begins with, once it knows the shapes of a step. A class of your own, as
        `jaxreplay.buffers.RowStore`, may keep them, too. Of a mixture, one for all members, or
        `{"demos": "/data/demos"}`: the others' rows lie on the device. A member may have those of a
        `jaxreplay.open`, with its buffer, to sample from. Default: "device".
      continue_streams: With rows in files, as for `jaxreplay.tiered`: if True, the unfinished
        episodes of the folder continue with the next step. Default: False; they end.
      prefetch: Number of batches that are sampled in advance, at the end of each `sample`: the
        device works on them while the caller learns. Their priorities are older by as many batches.
        They count as sampled, and `save` takes them along: after a `load` they are the first ones,
        unless the buffer's capacity, `num_envs`, `allow_mask` or its items have changed. Default:
        0.
      samples_per_insert: Number of items to sample for each step inserted, counted once a batch can
        be sampled. The side that is ahead waits. Default: no limit.
      timeout: Seconds that a call waits for other threads. Default: 60 if `samples_per_insert` is
        given, else 0.

    Raises:
      ValueError: An argument is out of range, or `buffer` is not a buffer.
      ImportError: `framework="torch"`, and PyTorch is not installed.

    Example:
      >>> import numpy as np, jaxreplay as jr
      >>> replay = jr.Replay(
      ...     jr.uniform(capacity=100, num_envs=2, batch_size=4, autoreset="next_step"),
      ...     framework="numpy",
      ... )
      >>> for t in range(5):
      ...     flags = np.zeros(2, bool)
      ...     replay.add(
      ...         obs=np.ones((2, 3)),
      ...         action=np.zeros(2),
      ...         reward=np.full(2, t),
      ...         terminated=flags,
      ...         truncated=flags,
      ...     )
      >>> len(replay), replay.sample().experience.obs.shape
      (8, (4, 3))
    """

    @transfers.allows
    def __init__(
        self,
        buffer: ReplayBuffer | Mixture,
        *,
        example: PyTree = None,
        state: ReplayState | dict[str, ReplayState] | None = None,
        seed: int = 0,
        framework: Framework = "jax",
        device: Any = None,
        rows: Any = "device",
        continue_streams: bool = False,
        prefetch: int = 0,
        samples_per_insert: float | None = None,
        timeout: float | None = None,
    ):
        buffer = unjitted(buffer)
        if not isinstance(buffer, Mixture):
            buffer = buffer_of("Replay", buffer)
        if framework not in host_arrays.NAMES:
            raise ValueError(
                f"Replay: framework must be one of {host_arrays.NAMES}, got {framework!r}"
            )
        host_arrays.to_framework(framework, ())  # raises if the extra is not installed
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"Replay: prefetch must be an int of at least 0, got {prefetch!r}")
        self.framework: Framework = framework
        self._buffer = buffer
        members: dict[str | None, Any] = {None: buffer}
        if isinstance(buffer, Mixture):
            members = {name: one for name, one, _ in buffer.members}
        if continue_streams and rows == "device":
            raise ValueError("Replay: continue_streams=True needs rows in files: rows=folder")
        places = {
            member: _place_of(member, one, given, device, continue_streams, prefetch > 0)
            for (member, one), given in zip(members.items(), _by_member(rows, members), strict=True)
        }
        self._owner: Any  # of all rows
        self._owners: dict[str | None, StateOwner]  # of each member
        if isinstance(buffer, Mixture):
            self._owner = MixtureOwner(buffer, seed, places)
            self._owners = {**self._owner.members}
        else:
            self._owner = StateOwner(places[None], Draws(seed))
            self._owners = {None: self._owner}
        self._limiter = (
            None
            if samples_per_insert is None
            else RateLimiter(samples_per_insert, buffer.batch_size)
        )
        self._timeout = _WAIT if self._limiter else 0.0
        self._timeout = self._seconds("Replay", timeout)
        self._monitor = Monitor("this Replay")
        self._is_closed = False
        self._prefetch = prefetch
        # prefetched; or consumed by a `sample` that was interrupted before it returned
        self._ahead: collections.deque[Sample] = collections.deque()
        self._actors: dict[str | None, Actors] = {}  # by the member that they fill
        # what the loaded checkpoint says of actors, by the member that they fill, "" for none
        self._saved_actors: dict[str, Any] = {}
        has_queue = isinstance(getattr(buffer, "sampler", None), OnlineQueue)
        self._lag = LagWatch() if has_queue else None
        self._is_hungry = True  # no batch was sampled yet, or since one was found missing
        states: Any = {} if state is None else {None: state} if None in self._owners else state
        if not isinstance(states, dict):
            raise ValueError(
                "Replay: state of a mixture must be a dict of its members' states, got "
                f"{kind_of(states)}"
            )
        for member in states:
            self._owner_of("Replay: state", member)
        for member, owner in self._owners.items():
            if member in states:
                owner.take(states[member])
            elif example is not None or owner.place.is_read_only:
                owner.init(owner.place.saved.example if example is None else example)

    if not TYPE_CHECKING:  # a type checker knows the methods

        def __getattr__(self, name: str) -> Any:
            if name in VERBS and (instead := VERBS[name].of_replay):
                raise AttributeError(f"a Replay has no {name}; it has {instead}")
            raise AttributeError(unknown_attribute(self, name))

    @property
    def buffer(self) -> Any:
        """The `ReplayBuffer` or `Mixture`, whose methods are pure functions of a state."""
        return self._buffer

    def _owner_of(self, where: str, member: str | None) -> StateOwner:
        """Return the owner of a member's rows; None names those of a buffer that is no mixture."""
        found = self._owners.get(member)
        if found is None:
            names = "one buffer" if None in self._owners else ", ".join(map(repr, self._owners))
            raise ValueError(f"{where}: member={member!r}, but this Replay has {names}")
        return found

    def add(
        self,
        step: PyTree = None,
        *,
        member: str | None = None,
        env: int | None = None,
        envs: Any = None,
        mask: Any = None,
        priority: Any = None,
        timeout: Any = None,
        **fields: Any,
    ):
        """Append one step of every env or of some envs, a block of steps, or one step of one env.

        Arrays are copied, so the caller may reuse them. It warns once if episodes do not reset
        where `autoreset` says, and once if `final_obs` shows that envs were reset without a flag.

        Args:
          step: A `Step`, or a mapping, dataclass or NamedTuple with its fields, or items. Leaves
            [E, ...], or [T, E, ...] for a block, or [...] for one env. Default: `fields`.
          member: Name of the mixture's member that gets the step. Default: None, without a mixture.
          env: Index of the env that took the step, if `step` is of one env. Default: every env, or
            the only one.
          envs: int[E], different envs that took the steps, in any order; numbers that no env has
            are for padding. As `env`, it needs a buffer of which each env has a write position of
            its own: one with `autoreset="same_step"` or `allow_mask=True`. Default: every env.
          mask: bool[E] or bool[T, E], False where an env took no step; needs `allow_mask=True`, or
            `envs`. Default: every env took every step.
          priority: float[E], float[T, E], or float[] for one env, at least 0, for samplers with
            priorities. Default: as for `ReplayBuffer.add`.
          timeout: Seconds to wait while samples lag behind inserts. Default: the replay's.
          **fields: Fields of the step, in place of `step`: `obs=..., action=..., ...`.

        Raises:
          ValueError: Both `step` and `fields` are given, or neither, or one does not fit the
            buffer.
          TimeoutError: Samples lagged behind for `timeout` seconds. Nothing was added.
          RuntimeError: The replay is closed, or its rows were lost.
        """
        if (step is None) == (not fields):
            raise ValueError(
                "add: give a step, or its fields as keywords: add(obs=..., action=..., ...)"
            )
        owner = self._owner_of("add", member)
        if mask is not None:
            mask = owned("add: mask", mask)
        if priority is not None:
            priority = owned("add: priority", priority)
        given = fields if step is None else step, env, envs, mask, priority
        waits = self._limiter is None
        if waits and self._add_quickly(owner, *given):
            return
        with self._monitor:
            self._check_open()
            owner.check_not_lost()
            if waits and owner.has_waiting:  # there was no room
                self._changing(owner.flush)
                if self._add_quickly(owner, *given):
                    return
            is_first = not owner.has_example
            try:
                block = owner.block_of(*given)
                self._wait(
                    "add",
                    self._may_insert,
                    timeout,
                    lambda: "samples lag behind: sample, or lower samples_per_insert",
                )
                problem = self._add(owner, block)
            except BaseException:
                if is_first:  # a rejected step must not fix the format of later ones
                    owner.forget()
                raise
        if problem is not None:
            warnings.warn(f"add: {problem}", stacklevel=2)

    def _add(self, owner: StateOwner, block: Block) -> str | None:
        """Add a block. Return what is suspicious of the rows, or None."""
        self._changing(owner.insert, block)
        owner.look_at(block.steps, block.mask, block.envs is not None)
        limiter = self._limiter
        if limiter is not None and (limiter.has_begun or self._owner.has_batch()):
            limiter.num_inserts += block.num_steps
        self._monitor.notify_all()
        owner.watch.count(block.num_steps)
        return owner.watch.look(lambda: resets_of(owner.whole[1]))

    def _add_quickly(self, owner: StateOwner, *given: Any) -> bool:
        """Copy a step to those that wait, if that is all there is to do, and return whether it was.

        An interrupt meanwhile leaves a whole step or none, so signals need not wait.
        """
        with self._monitor.without_delay():
            if self._is_closed or (owner.watch.is_due and not owner.has_waiting):
                return False
            num_steps = owner.stage(*given)
            if num_steps is None:
                return False
            owner.watch.count(num_steps)
            self._monitor.notify_all()
            return True

    def start(
        self,
        act: Callable[[Actor], Any],
        num_actors: int,
        *,
        params: Any = None,
        block_length: int = 64,
        max_restarts: int = 3,
        max_staleness: int | None = None,
        block_timeout: float = 300.0,
        version_key: str | None = None,
        seed: int = 0,
        on: Any = None,
        member: str | None = None,
    ) -> Actors:
        """Start actors in other processes, whose steps a thread adds to this replay.

        Actor i has the e = `num_envs` / `num_actors` envs from `i * e`. The buffer needs
        `autoreset="same_step"` or `allow_mask=True`. If an actor is lost, its unfinished episodes
        end, and the steps that were not added yet are lost; another one is started in its place.
        With `samples_per_insert`, actors are asked for no more while samples lag behind. `save` and
        `load` take along how far each actor's steps were added. `close` stops the actors.

        Args:
          act: Function `act(actor)`, which takes steps and gives each to `actor.add`, while
            `actor.running`. See `actors.Actor`. If it returns, the actor is done. It gets other
            arguments by `functools.partial`.
          num_actors: Number of actors A, a divisor of `num_envs`.
          params: Parameters that `actor.params()` returns before others are published. Default:
            None.
          block_length: Number of steps of its envs that an actor sends at once. Default: 64.
          max_restarts: Number of times in a row that each actor is started again, after pauses that
            grow up to a minute. One that has run for ten minutes begins another row. After that,
            calls of this replay raise an error with the last reason, until `stop` of the actors, or
            another `start`. Default: 3.
          max_staleness: Largest number of versions by which parameters that acted are older than
            the newest ones, when a step is added. Actors wait before blocks that would be older.
            The limit is kept if each version is learned from equally many steps, and a block has
            fewer; samples that are a batch ahead may add one version. Default: no limit.
          block_timeout: Seconds that an actor may take for a block that it was asked for. One that
            takes longer hangs: it is ended, and counts as lost. Default: 300, for slow resets, and
            programs that are compiled in the first block; a robot that people reset needs more.
          version_key: Name of an extra, int32, of each step (of an entry of each item), for the
            version of the parameters that acted. The replay's `example`, if it has one, needs the
            same extra. Default: none.
          seed: Seed from which each actor's is made. Default: 0.
          on: Where they run: `actors.local()`, `actors.ray()` or `actors.threads()`. Default:
            `actors.local()`.
          member: Name of the mixture's member that gets the steps; others get some, too, by
            `actor.add(members=...)`. Default: None, without a mixture.

        Returns:
          The `actors.Actors`: `publish`, `metrics` and `stop`.

        Raises:
          ValueError: An argument is out of range, the buffer has no write position for each env, or
            `act` cannot be sent to another process.
          RuntimeError: The replay is closed, or its actors are not stopped, and have not failed.
        """
        owner = self._owner_of("start", member)
        failed = self._actors.get(member)
        if failed is not None and failed.failure is not None:
            failed.stop()  # without the lock, for which their thread may wait
        with self._monitor:
            self._check_open()
            before = self._actors.get(member)
            if before is not None and not before.is_stopped:
                raise RuntimeError(
                    "start: the actors before are not stopped; call their stop() first"
                )
            saved = self._saved_actors.get(member or "") if before is None else before.state
            host = ActorHost(self, owner)
            example, others = owner.example, tuple(host.others)
            setup = Setup.of(
                owner.buffer, example, num_actors, block_length, seed, version_key, others
            )
            ratio = 1.0 if self._limiter is None else self._limiter.ratio
            self._actors[member] = Actors(
                act,
                setup,
                host,
                self.buffer.batch_size / ratio,
                saved,
                params,
                max_restarts,
                max_staleness,
                block_timeout,
                on,
            )
            return self._actors[member]

    def __iter__(self) -> Iterator[Sample]:
        """Yield batches, until the replay is closed, or its actors are done and no batch can be
        sampled any more."""
        while not self._is_closed:
            try:
                batch = self.sample()
            except _NoMoreError:
                return
            except RuntimeError:
                if self._is_closed:
                    return
                raise
            yield batch

    def sample(
        self,
        batch_size: int | None = None,
        timeout: float | None = None,
        *,
        consume: bool = True,
        **options: Unpack[SampleOptions],
    ) -> Sample:
        """Sample a batch. If the sampler consumes rows, the batch's rows are consumed.

        It warns once if an `OnlineQueue` lags: if rows become new faster than batches take them.

        Args:
          batch_size: Number of items B. With `prefetch`, and of a mixture, only the buffer's is
            allowed. Default: the buffer's.
          timeout: Seconds to wait while no batch can be sampled. Default: the replay's.
          consume: False: only look, as for a report. The rows stay for the next batch, which begins
            with the same new ones; prefetched batches stay, too, and `samples_per_insert` does not
            count this one. Default: True.
          options: As for `ReplayBuffer.sample`: beta, n_step, gamma, fractions. A prefetched batch
            has those of the call that requested it.

        Returns:
          The items, their indices, probabilities and weights, leaves [B, ...], in arrays of the
          framework.

        Raises:
          ValueError: `batch_size` is less than 1, or is not the buffer's, with `prefetch`.
          TimeoutError: No batch could be sampled within `timeout` seconds, or all actors are done.
          RuntimeError: The replay is closed, or its rows were lost.
        """
        self.buffer.check_given("sample", options)
        batch = None
        try:
            with self._monitor:
                if self._prefetch and batch_size not in (None, self.buffer.batch_size):
                    raise ValueError(
                        "sample: with prefetch every batch has the buffer's "
                        f"{self.buffer.batch_size} items, not {batch_size}"
                    )
                draw = lambda: (self._next if consume else self._look)(batch_size, options)
                batch = self._wait("sample", draw, timeout, self._why_no_sample)
                while consume and len(self._ahead) < self._prefetch:
                    if (ahead := self._draw(None, options)) is None:
                        break
                    self._ahead.append(ahead)
                self._monitor.notify_all()
                if consume and self._lag is not None:
                    figures = lambda: self._owner.ask(method("metrics"))
                    if problem := self._lag.look(self.buffer.batch_size, figures):
                        warnings.warn(f"sample: {problem}", stacklevel=2)
            with transfers.allowed():  # in the `try`: an interrupt of its end keeps the batch
                return host_arrays.to_framework(self.framework, self._owner.finished(batch))
        except BaseException:
            if batch is not None and consume and consumes_rows(self.buffer):
                self._ahead.appendleft(batch)  # its rows are consumed: the next call returns them
            raise

    def update_priorities(self, index: Any, priority: Any) -> None:
        """Set the priorities of sampled rows, such as absolute TD errors.

        Rows that were overwritten since are ignored.

        Args:
          index: `batch.index` of a sample, or a mapping with its `row` and `lap`, leaves [B].
          priority: float[B], at least 0. A row with priority 0 is never sampled again: add a small
            constant to TD errors.

        Raises:
          ValueError: Nothing was added yet, the sampler has no priorities, or an argument has
            another shape.
          RuntimeError: The replay is closed, or its rows were lost.
        """
        priority = owned("update_priorities: priority", priority)
        with self._monitor:
            self._check_open()
            self._owner.check_begun("update_priorities")
            given = self._owner.put((_index_of(index), priority))
            self._changing(self._owner.change, method("update_priorities"), *given)
            self._monitor.notify_all()

    def reset_max_priority(self, *, member: str | None = None) -> None:
        """Give new rows the largest priority of a stored row, as
        `ReplayBuffer.reset_max_priority` does. Before the first `add` it changes nothing.

        Args:
          member: Name of the mixture's member. Default: None, without a mixture.

        Raises:
          ValueError: There are rows, and the sampler has no priorities.
        """
        owner = self._owner_of("reset_max_priority", member)
        with self._monitor:
            self._check_open()
            self._change_rows(owner, "reset_max_priority")

    def write(self, index: Any, values: Any, *, member: str | None = None) -> None:
        """Overwrite leaves of rows that were sampled, as `ReplayBuffer.write` does.

        Args:
          index: `batch.index` of a sample, leaves [B], or `batch.experience.index`, [B, T]; or a
            mapping with its `row` and `lap`.
          values: Some leaves of a step, such as `{"reward": r}`, [B, ...] or [B, T, ...].
          member: Name of the mixture's member that has the rows. Default: None, without a mixture.

        Raises:
          ValueError: Nothing was added yet, or as for `ReplayBuffer.write`.
          RuntimeError: The replay is closed, or its rows were lost.
        """
        owner = self._owner_of("write", member)
        values = host_arrays.owned_tree("write", values)
        with self._monitor:
            self._check_open()
            given = owner.put((_index_of(index), values))
            self._change(owner, "write", *given)
            self._monitor.notify_all()

    def map_rows(
        self, function: Any, *arguments: Any, block: int = 65_536, member: str | None = None
    ) -> None:
        """Compute leaves of all rows anew, as `ReplayBuffer.map_rows` does.

        Args:
          function: As for `ReplayBuffer.map_rows`. Each function is compiled once, so give the same
            one again, with other parameters in `arguments`.
          arguments: Further arguments of the function: arrays of JAX or NumPy.
          block: Number of rows that are computed at once. Default: 65,536.
          member: Name of the mixture's member that has the rows. Default: None, without a mixture.

        Raises:
          ValueError: Nothing was added yet, or as for `ReplayBuffer.map_rows`.
        """
        owner = self._owner_of("map_rows", member)
        with self._monitor:
            self._check_open()
            self._change(owner, "map_rows", function, *owner.put(arguments), block=block)

    def get(self, index: Any, *, member: str | None = None) -> Sample:
        """Read rows that were sampled before, as `ReplayBuffer.get` does.

        Args:
          index: `batch.index` of a sample, a mapping with its `row` and `lap`, or row numbers,
            int[B].
          member: Name of the mixture's member that has the rows. Default: None, without a mixture.

        Returns:
          The items, leaves [B, ...], in arrays of the framework. A random view is sampled anew.

        Raises:
          ValueError: Nothing was added yet, or `index` is not of integers.
        """
        owner = self._owner_of("get", member)
        with self._monitor:
            batch = owner.taken_out(owner.get(_index_of(index)))
            return host_arrays.to_framework(self.framework, batch)

    def age(self, index: Any, *, member: str | None = None) -> Any:
        """Return how many rows of its env were written after each row, as `ReplayBuffer.age` does.

        Args:
          index: `batch.index` of a sample, or a mapping with its `row` and `lap`, leaves [B].
          member: Name of the mixture's member that has the rows. Default: None, without a mixture.

        Returns:
          int32[B], in an array of the framework.

        Raises:
          ValueError: Nothing was added yet.
        """
        owner = self._owner_of("age", member)
        with self._monitor:
            owner.check_begun("age")
            found = owner.ask(method("age"), _index_of(index))
            return host_arrays.to_framework(self.framework, found)

    def episode_table(self, *, member: str | None = None) -> Episodes:
        """Return look-ups of the episodes of today's rows, as `ReplayBuffer.episode_table` does.

        They take and return JAX arrays, and copy 13 bytes a row, no steps.

        Args:
          member: Name of the mixture's member. Default: None, without a mixture.

        Raises:
          ValueError: Nothing was added yet, or as for `ReplayBuffer.episode_table`.
        """
        owner = self._owner_of("episode_table", member)
        with self._monitor:
            owner.check_begun("episode_table")
            state = owner.buffer.episode_table(owner.state).state
            rows = state.rows.replace(steps=None)
            return Episodes(_copied(state.replace(rows=rows, sampler=None)))

    @property
    def state(self) -> Any:
        """A copy of the `ReplayState`, for the methods of `buffer`: as large as the buffer. Of a
        mixture a dict of each member's. ValueError before the first `add`."""
        with self._monitor:
            self._owner.check_begun("state")
            return _copied(self._owner.whole[1])

    def merge(self, other: Any, *, member: str | None = None) -> None:
        """Append the rows of another buffer, as `ReplayBuffer.merge` does. Unfinished episodes end.

        Args:
          other: A `Replay`, or the state of a `ReplayBuffer`, with the same steps. It stays valid.
          member: Name of the mixture's member that gets the rows. Default: None, without a mixture.

        Raises:
          ValueError: The steps have other leaves, or nothing was added to the other yet.
          RuntimeError: The replay is closed, or its rows were lost.
        """
        owner = self._owner_of("merge", member)
        state = other.state if isinstance(other, Replay) else other
        with self._monitor:
            self._check_open()
            if owner.has_example:
                self._change(owner, "merge", owner.put(state))
            else:
                owner.take(_copied(state))
                if owner.buffer.autoreset is not None:
                    owner.change(owner.place.method("end_streams"))
            self._start_anew()

    def add_episodes(self, episodes: Any, *, member: str | None = None) -> None:
        """Add whole episodes, such as demonstrations, as `datasets.from_episodes` does.

        Each goes to the env with the fewest of them. Unfinished episodes of the replay end.

        They are added a few MB at a time, if the buffer has one env or `allow_mask=True`: an error
        or Ctrl-C then leaves those that were added before. Other buffers get them at the end, of a
        state of their whole capacity.

        Args:
          episodes: Iterable of `jaxreplay.datasets.Episode`s.
          member: Name of the mixture's member that gets them. Default: None, without a mixture.

        Raises:
          ValueError: As for `datasets.from_episodes`.
          RuntimeError: The replay is closed, or its rows were lost.
        """
        from jaxreplay.datasets import from_episodes
        from jaxreplay.datasets.episodes import blocks, episode_parts

        owner = self._owner_of("add_episodes", member)
        buffer = owner.buffer
        is_divided = buffer.autoreset is not None and buffer.num_agents is None
        if not is_divided or (buffer.num_envs > 1 and not buffer.allow_mask):
            with self._monitor:
                self._check_open()
                state = from_episodes(episodes, owner.whole[0], owner.example)
            self.merge(state, member=member)
            return
        with self._monitor:
            self._check_open()
            owner.check_not_lost()
            parts, is_first = self._interruptible(episode_parts("add_episodes", episodes)), True
            try:
                for _, steps, mask in blocks("add_episodes", parts, buffer, owner.example):
                    if is_first and owner.has_example:
                        self._change(owner, "end_streams")
                    is_first = False
                    block = owner.block_of(steps, None, None, mask, is_ours=True)
                    self._changing(owner.insert, block)
            except BaseException:
                if not is_first and not owner.is_lost:  # the last one may have no end
                    self._change(owner, "end_streams")
                raise
            finally:
                self._start_anew()

    def _interruptible(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield items. Handlers of signals that came while one was made run before it is used."""
        for item in items:
            self._monitor.deliver()
            yield item

    def __repr__(self) -> str:
        try:
            rows = f"{len(self)} sampleable rows"
        except RuntimeError as error:
            rows = str(error)
        return f"Replay({rows}, framework={self.framework!r}, buffer={self._buffer!r})"

    def __len__(self) -> int:
        """Return the number of sampleable rows."""
        with self._monitor:
            return self._owner.size()

    def can_sample(self) -> bool:
        """Return whether `sample` would return a batch now."""
        with self._monitor:
            found = not self._is_closed and self._has_sample()
            self._is_hungry |= not found
            return found

    def clear(self) -> None:
        """Remove all rows and all prefetched batches."""
        with self._monitor:
            self._check_open()
            for owner in self._owners.values():
                self._change_rows(owner, "clear")
            self._start_anew()

    def end_streams(self, mask: Any = None, *, member: str | None = None) -> None:
        """End the unfinished episodes, after a reset that no step tells: one by hand, or of new
        envs after `load`. The newest transition of each is given up.

        Args:
          mask: bool[E], False for envs that go on. Default: every env was reset.
          member: Name of the mixture's member whose envs were reset. Default: all that have any.

        Raises:
          ValueError: As for `ReplayBuffer.end_streams`.
        """
        with self._monitor:
            self._check_open()
            owners = [*self._owners.values()]
            if member is not None or mask is not None:
                owners = [self._owner_of("end_streams", member)]
            elif len(owners) > 1:
                owners = [owner for owner in owners if owner.buffer.autoreset is not None]
            for owner in owners:
                if self._change_rows(owner, "end_streams", mask):
                    owner.final_obs.restart()

    def drop(self, mask: Any, *, member: str | None = None) -> None:
        """Give up the unfinished episodes of some envs, as `ReplayBuffer.drop` does. Prefetched
        batches are given up, too. Those of a folder have ended when it was opened, unless
        `continue_streams=True`.

        Args:
          mask: bool[E], True for the envs whose episode is given up.
          member: Name of the mixture's member that has them. Default: None, without a mixture.

        Raises:
          ValueError: As for `ReplayBuffer.drop`.
        """
        owner = self._owner_of("drop", member)
        with self._monitor:
            self._check_open()
            if self._change_rows(owner, "drop", mask):
                self._start_anew()

    def metrics(self) -> dict[str, float]:
        """Return the figures of `ReplayBuffer.metrics` as numbers; {} before the first `add`. Those
        of a mixture's members have names such as "online/size"."""
        figures = {}
        with self._monitor:
            for member, owner in self._owners.items():
                found = owner.ask(method("metrics")) if owner.has_example else {}
                prefix = "" if member is None else f"{member}/"
                figures |= {prefix + name: leaf for name, leaf in found.items()}
        return {name: leaf.item() for name, leaf in jax.device_get(figures).items()}

    def inspect(self, *, member: str | None = None, max_bytes: int = 2**28) -> Inspection:
        """Return an `Inspection` of the rows, as `jaxreplay.inspect` does.

        Other calls wait meanwhile.

        Args:
          member: Name of the mixture's member. Default: None, without a mixture.
          max_bytes: Most bytes of the steps' values that are read, from rows spread over the whole
            buffer. Default: 2**28.

        Raises:
          ValueError: Nothing was added yet.
        """
        owner = self._owner_of("inspect", member)
        with self._monitor:
            owner.check_begun("inspect")
            return inspect(*owner.whole, max_bytes=max_bytes)

    def save(
        self,
        path: Any,
        *,
        step: int | None = None,
        extras: Any = None,
        max_to_keep: int = 1,
        copy: bool = False,
    ) -> None:
        """Write a checkpoint of the state under a path, as `checkpoint.Checkpointer` does.

        Once it is complete, it replaces what is under that path. Other calls wait meanwhile. A save
        to the path of the last save or load writes only what is new. Give each run a path of its
        own. It needs `jaxreplay[checkpoint]`.

        Args:
          path: A folder, or a URL such as "gs://bucket/replay", or TensorStore's specification of a
            store.
          step: 64-bit integer that names the checkpoint, such as that of training. Default: one
            more than the last one.
          extras: Pytree to save with the rows, such as the parameters as NumPy arrays: one
            checkpoint has both, or neither. Default: none.
          max_to_keep: Number of newest checkpoints to keep. Default: 1.
          copy: With rows in files, write a copy of these, too. If not, the checkpoint has the index
            alone, and can be loaded while the folder is there. Default: False.

        Raises:
          ValueError: Nothing was added yet, or an extra is no array and no number.
          PathInUseError: Another run has saved to the path since the last save or load here.
        """
        with self._monitor:
            metadata = {
                "limiter": dataclasses.asdict(self._limiter) if self._limiter else None,
                "actors": {name or "": actors.state for name, actors in self._actors.items()},
            }
            ahead = [*map(self._owner.finished, self._ahead)]
            self._owner.save(path, metadata, step, extras, max_to_keep, copy, ahead)

    def load(self, path: Any, *, step: int | None = None, extras: Any = None) -> Any:
        """Replace the state by one that `save`, or a `Checkpointer`, wrote.

        The buffer adopts the saved rows, as `ReplayBuffer.adopt` does: it may have changed. In a
        replay without `example` and steps, later steps have the saved shapes, with dicts as
        pytrees: give `example`, if yours have others. If the load fails, the replay keeps its
        state. If memory cannot hold both states, all files are verified first, then the old state
        is freed; if a file breaks after that, the rows are lost. A load also recovers a replay
        whose rows were lost.

        Unfinished episodes continue with the next `add`, so restore the envs too. If you reset them
        instead, call `end_streams` after the load. Otherwise the last step before the save is
        paired with the first one after it.

        Args:
          path: A folder, or a URL such as "gs://bucket/replay", or TensorStore's specification of a
            store.
          step: Step of the checkpoint. Default: the newest intact one.
          extras: Pytree like the saved extras, which says what to read, as for
            `Checkpointer.restore`. Default: none.

        Returns:
          The extras, or None.

        Raises:
          ValueError: The files are of another buffer, or they are damaged
            (`CorruptCheckpointError`).
          FileNotFoundError: There is no checkpoint under the path, or none of that step.
          RuntimeError: The replay is closed.
        """
        with self._monitor:
            self._check_open()
            metadata, extras, ahead = self._changing(self._owner.load, path, step, extras)
            if self._limiter:
                self._limiter.resume(metadata.get("limiter"))
            self._saved_actors = saved_actors(metadata.get("actors"))
            for member, actors in self._actors.items():
                actors.resume(self._saved_actors.get(member or ""))
            self._start_anew()
            self._ahead.extend(ahead)
        return extras

    def close(self) -> None:
        """End every waiting call with a RuntimeError.

        Later calls that sample, change or load rows raise it too. The rows can still be saved.
        Those in files are complete then, and can be opened by another one.
        """
        with self._monitor:
            self._is_closed = True
            self._owner.close()
            self._monitor.notify_all()
        for actors in self._actors.values():
            actors.stop()

    def __enter__(self) -> "Replay":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Replay cannot be copied, pickled or sent to another process; save its rows with "
            "replay.save(path), or let other processes fill it: replay.start(act, num_actors)"
        )

    def _start_anew(self) -> None:
        """Drop the prefetched batches, and wake waiting calls. The next step follows no other."""
        self._ahead.clear()
        for owner in self._owners.values():
            owner.final_obs.restart()
        self._monitor.notify_all()

    def _change(self, owner: StateOwner, name: str, *given: Any, **options: Any) -> None:
        """Call a method of the buffer that changes an owner's state."""
        owner.check_begun(name)
        self._changing(owner.change, owner.place.method(name), *given, **options)

    def _change_rows(self, owner: StateOwner, name: str, *given: Any) -> bool:
        """Call a method if there are rows, and return whether there are."""
        with owner.opened() as has_rows:
            if has_rows:
                self._change(owner, name, *given)
        return has_rows

    def _changing(self, call: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except BaseException:
            self._monitor.notify_all()  # waiting calls check whether the rows are lost
            raise

    def _has_sample(self) -> bool:
        return bool(self._ahead) or self._may_sample()

    def _next(self, batch_size: int | None, options: Mapping[str, Any]) -> Sample | None:
        """Return a prefetched batch, or sample a new one; None if none can be sampled now."""
        if self._ahead and len(self._ahead[0].is_valid) == (batch_size or self.buffer.batch_size):
            return self._ahead.popleft()
        return self._draw(batch_size, options)

    def _draw(self, batch_size: int | None, options: Mapping[str, Any]) -> Sample | None:
        """Sample a batch, or return None if none can be sampled now."""
        if self._limiter is not None and not self._limiter.may_sample():
            return None
        batch = self._look(batch_size, options, consume=True)
        if batch is None:
            return None
        self._is_hungry = False
        if self._limiter is not None:
            self._limiter.num_samples += len(batch.is_valid)
            for actors in self._actors.values():
                actors.look()
        return batch

    def _look(
        self, batch_size: int | None, options: Mapping[str, Any], consume: bool = False
    ) -> Sample | None:
        """Sample a batch that counts for nothing, or return None if none can be sampled now."""
        size = self.buffer.batch_size if batch_size is None else operator.index(batch_size)
        batch = self._owner.draw(size, options, consume)
        return None if batch is None else self._owner.taken_out(batch)

    def _wait(self, where: str, get: Any, timeout: float | None, why: Any) -> Any:
        """Return what `get()` returns, once that is true, with the lock released meanwhile. After
        `timeout`, raise a TimeoutError with the text `why()`."""
        seconds, end = self._seconds(where, timeout), None
        while True:
            self._check_open()
            self._owner.check_not_lost()  # it may be lost meanwhile
            if found := get():
                return found
            if where == "sample" and self._actors and all(a.is_done for a in self._actors.values()):
                raise _NoMoreError(f"all actors are done: {why()}")
            self._is_hungry |= where == "sample"
            end = time.monotonic() + seconds if end is None else end
            left = end - time.monotonic()
            if left <= 0:
                after = f"after {seconds:g} s: " if seconds else ""
                raise TimeoutError(f"{where}: {after}{why()}")
            self._monitor.wait(min(left, 3600.0))

    def _seconds(self, where: str, timeout: float | None) -> float:
        """Return the seconds that a call waits: its own `timeout`, or the replay's."""
        if timeout is None:
            return self._timeout
        return checks.checked_seconds(where, timeout)

    def _may_insert(self, ahead: int = 0) -> bool:
        limiter = self._limiter
        return limiter is None or not self._owner.has_batch() or limiter.may_insert(ahead)

    def _may_sample(self) -> bool:
        return self._owner.has_batch() and (self._limiter is None or self._limiter.may_sample())

    def _why_no_sample(self) -> str:
        if self._owner.has_batch() and not self._may_sample():
            return "inserts lag behind: add, or raise samples_per_insert"
        owners = [*self._owners.items()]
        member, owner = next((own for own in owners if not own[1].has_batch()), owners[0])
        of, size = "" if member is None else f"{member} has ", owner.size()
        why = (
            f"{of}{size} rows of at least {owner.buffer.min_size}"
            if size < owner.buffer.min_size
            else f"{of}{size} rows, but none of a positive priority, or of the fractions asked for"
        )
        cure = "add steps first, or wait with timeout="
        if owner.place.outlasts and not owner.has_example:
            cure += "; the rows that the folder has need example="
        return f"no batch can be sampled yet, {why}: {cure}"

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this Replay is closed")
        for actors in self._actors.values():
            if (error := actors.failure) is not None:
                raise RuntimeError(f"the actors have stopped: {error}") from error


class _NoMoreError(TimeoutError):
    """The actors are done."""


_copied = jax.jit(lambda state: jax.tree.map(jax.numpy.copy, state))


def _index_of(index: Any) -> Any:
    """Return an index of a batch, or row numbers, as arrays of JAX or NumPy."""
    if isinstance(index, Index):
        given = {name: x for name, x in vars(index).items() if x is not None}
    elif isinstance(index, collections.abc.Mapping):
        given = {name: index[name] for name in ("row", "lap", "source") if name in index}
    else:
        given = {"row": index}
    own = {name: owned(f"index: {name}", x) for name, x in given.items()}
    return Index(**own) if len(own) > 1 else own["row"]


def _by_member(rows: Any, members: Mapping[str | None, Any]) -> list[Any]:
    """Return where the rows of each member lie."""
    if not isinstance(rows, dict):
        return [rows] * len(members)
    if None in members or not rows.keys() <= members.keys():
        raise ValueError(
            f"Replay: rows has the members {', '.join(map(repr, rows))}, but this Replay has "
            + ("one buffer" if None in members else ", ".join(map(repr, members)))
        )
    return [rows.get(member, "device") for member in members]


def _place_of(
    member: str | None,
    buffer: ReplayBuffer,
    rows: Any,
    device: Any,
    continue_streams: bool,
    ahead: bool,
) -> OnDevice:
    """Return where the rows of a buffer lie.

    Args:
      member: Its name in a mixture, or None.
      buffer: The buffer.
      rows: As for `Replay`, of one member; or a `Tiered`.
      device: As for `Replay`, as is `continue_streams`.
      ahead: Whether a thread gathers rows.
    """
    if isinstance(rows, str) and rows == "device":
        return OnDevice(buffer, device)
    if device is not None:
        raise ValueError(
            f"Replay: rows={rows!r} takes no device=: the index lies on JAX's default device"
        )
    if isinstance(rows, Replay):  # of `jaxreplay.open`
        rows = rows._owner.saved
    if not isinstance(rows, Tiered):
        rows = tiered(buffer, rows=rows, continue_streams=continue_streams)
    return OnHost(rows._of_member(member or ""), ahead)
