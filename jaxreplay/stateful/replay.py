"""A replay with a state of its own, for loops that are not jitted: PyTorch, NumPy, many threads."""

import collections
import dataclasses
import operator
import time
import warnings
from typing import Any

import jax
import numpy as np

from jaxreplay._util import checks
from jaxreplay._util.aliases import Framework, PyTree
from jaxreplay.buffers.jitted import method
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.inspection import Inspection, inspect
from jaxreplay.inspection.contents import resets_of
from jaxreplay.inspection.resets import ResetWatch
from jaxreplay.samplers import ConsumingSampler
from jaxreplay.stateful import host_arrays
from jaxreplay.stateful.host_arrays import as_stored
from jaxreplay.stateful.lock import Monitor
from jaxreplay.stateful.owner import StateOwner
from jaxreplay.stateful.rate_limiter import RatioLimiter
from jaxreplay.types import Index, Sample

_WAIT = 60.0  # seconds, where threads wait for each other


class Replay:
    """Owns the state, the key and a lock of a `ReplayBuffer`: `add`, `sample`, `update_priorities`
    from any thread.

    Args:
      buffer: what `jaxreplay.uniform`, `prioritized`, `sequences`, ... made.
      example: one env's step, or item; by default the first `add` is the example.
      seed: of what is drawn.
      framework: what batches are made of: "jax", "numpy" (read-only views) or "torch" (not to be
        written to).
      device: what holds the rows: a `jax.Device`, or a platform such as "cpu" for the host's
        memory; sampled batches go to JAX's default device. None: that one.
      prefetch: batches that are drawn ahead, as each `sample` ends: the device works on them while
        the caller learns. Their priorities are older by as many batches; they count as drawn, so
        that what was not yet handed out is not in a saved file: rows too, of a sampler that hands
        out each once.
      samples_per_insert: items drawn for each step inserted; who is ahead waits. None: nobody does.
      timeout: seconds that a call waits for other threads; by default 60 where `samples_per_insert`
        is given, else 0.

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

    def __init__(
        self,
        buffer: ReplayBuffer,
        *,
        example: PyTree = None,
        seed: int = 0,
        framework: Framework = "jax",
        device: Any = None,
        prefetch: int = 0,
        samples_per_insert: float | None = None,
        timeout: float | None = None,
    ):
        checks.check_part("Replay", "buffer", buffer, ReplayBuffer, "jaxreplay.uniform(...)")
        if framework not in host_arrays.NAMES:
            raise ValueError(
                f"Replay: framework must be one of {host_arrays.NAMES}, got {framework!r}"
            )
        host_arrays.to_framework(framework, ())  # says at once which extra is missing
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"Replay: prefetch must be an int of at least 0, got {prefetch!r}")
        self.framework: Framework = framework
        self._owner = StateOwner(buffer, seed, device)
        self._limiter = (
            None
            if samples_per_insert is None
            else RatioLimiter(samples_per_insert, buffer.batch_size)
        )
        self._timeout = _WAIT if self._limiter else 0.0
        self._timeout = self._seconds("Replay", timeout)
        self._monitor = Monitor("this Replay")
        self._watch = ResetWatch()
        self._is_closed = False
        self._prefetch = prefetch
        # ahead; or by calls that were interrupted, of samplers that consume
        self._drawn: collections.deque[Sample] = collections.deque()
        if example is not None:
            self._owner.init(example)

    @property
    def buffer(self) -> ReplayBuffer:
        return self._owner.buffer

    def add(
        self,
        step: PyTree = None,
        *,
        env: int | None = None,
        mask: Any = None,
        priority: Any = None,
        timeout: Any = None,
        **fields: Any,
    ):
        """Append one step of every env, of one env, or a block of steps. Arrays are copied: their
        owner may use them again.

        Args:
          step: a `Step`, or a mapping, dataclass or NamedTuple with its fields; an item; or the
            fields as keywords. Leaves `[num_envs, ...]`, or `[time, num_envs, ...]`: a block. Of
            one env: leaves `[...]`; say which by `env`, where there are several.
          mask: bool[num_envs], or bool[time, num_envs]: the envs that took a step.
          priority: float[num_envs], float[time, num_envs], or one of one env.
          timeout: seconds to wait while samples lag behind inserts.

        Warns once if episodes do not reset where `autoreset` says.

        Raises:
          TimeoutError: samples lagged behind too long; nothing was added.
        """
        if (step is None) == (not fields):
            raise ValueError(
                "add: give a step, or its fields as keywords: add(obs=..., action=..., ...)"
            )
        step = host_arrays.own(
            "add", as_stored("add", self.buffer, fields if step is None else step)
        )
        own = host_arrays.own("add", {"mask": mask, "priority": priority})
        with self._monitor:
            self._check_open()
            is_first = self._owner.state is None
            try:
                num_steps, calls = self._owner.calls_of(step, env, **own)
                self._wait(
                    "add",
                    self._may_insert,
                    timeout,
                    lambda: "samples lag behind: sample, or lower samples_per_insert",
                )
                for call in calls:
                    self._changing(self._owner.change, *call)
            except BaseException:
                if is_first:  # what was refused is no example for others
                    self._owner.forget()
                raise
            if self._limiter is not None and self._owner.has_batch():
                self._limiter.num_inserts += num_steps
            self._monitor.notify_all()
            problem = self._watch.after_add(num_steps, lambda: resets_of(self._owner.state))
        if problem is not None:
            warnings.warn(f"add: {problem}", stacklevel=2)

    def sample(
        self,
        batch_size: int | None = None,
        timeout: float | None = None,
        *,
        beta: float | None = None,
    ) -> Sample:
        """A batch, in the arrays of the framework.

        Args:
          batch_size: by default the buffer's. timeout: seconds to wait while nothing can be drawn.
          beta: how far weights correct the bias of prioritized draws, in [0, 1]; by default the
            sampler's. A batch that was drawn ahead has that of the call which drew it.

        Raises:
          TimeoutError: nothing could be drawn in time.
        """
        batch = None
        try:
            with self._monitor:
                if self._prefetch and batch_size not in (None, self.buffer.batch_size):
                    raise ValueError(
                        "sample: with prefetch every batch has the buffer's "
                        f"{self.buffer.batch_size} items, not {batch_size}"
                    )
                self._wait("sample", self._has_sample, timeout, self._why_no_sample)
                batch = self._next(batch_size, beta)
                while len(self._drawn) < self._prefetch and self._may_sample():
                    self._drawn.append(self._draw(None, beta))
                self._monitor.notify_all()
            return host_arrays.to_framework(self.framework, batch)
        except BaseException:
            if batch is not None and isinstance(self.buffer.sampler, ConsumingSampler):
                self._drawn.appendleft(batch)  # its rows are handed out by the next call
            raise

    def update_priorities(self, index: Any, priority: Any) -> None:
        """Give drawn rows new priorities, such as absolute TD errors. Rows overwritten since are
        ignored.

        Args:
          index: a batch's, or a mapping with its `row` and `lap`. priority: float[B], at least 0.
        """
        if not isinstance(index, Index):
            index = Index(row=index["row"], lap=index["lap"])
        given = {"row": index.row, "lap": index.lap, "priority": priority}
        own = host_arrays.own(
            "update_priorities",
            {name: np.array(x) if isinstance(x, list | tuple) else x for name, x in given.items()},
        )
        with self._monitor:
            self._check_open()
            given = self._owner.put((Index(row=own["row"], lap=own["lap"]), own["priority"]))
            self._changing(self._owner.change, method("update_priorities"), *given)
            self._monitor.notify_all()

    def __len__(self) -> int:
        """Rows that can be drawn."""
        with self._monitor:
            return self._owner.size()

    def can_sample(self) -> bool:
        """Whether a batch could be drawn now."""
        with self._monitor:
            return not self._is_closed and self._has_sample()

    def clear(self) -> None:
        """Forget every row, and what was drawn ahead."""
        with self._monitor:
            self._check_open()
            if self._owner.state is not None:
                self._changing(self._owner.change, method("clear"))
            self._start_anew()

    def metrics(self, *, beta: float | None = None) -> dict[str, float]:
        """Return the figures of `ReplayBuffer.metrics`; before the first `add`, none."""
        with self._monitor:
            if self._owner.state is None:
                return {}
            found = self._owner.ask(method("metrics"), beta=beta)
        return {name: leaf.item() for name, leaf in jax.device_get(found).items()}

    def inspect(self, *, max_bytes: int = 2**28) -> Inspection:
        """Inspect the rows, as `jaxreplay.inspect` does. Other calls wait meanwhile.

        Args:
          max_bytes: of the steps' values that are read, from rows spread over the whole buffer.
        """
        with self._monitor:
            if self._owner.state is None:
                raise ValueError("inspect: nothing was added yet, so there is nothing to see")
            return inspect(self.buffer, self._owner.state, max_bytes=max_bytes)

    def save(self, path: Any) -> None:
        """Write everything under a path, as `checkpoint.Checkpointer` does; what was there is
        replaced once that is whole.

        Calls wait meanwhile. A save to the path of the one before, or of the last load, writes only
        what is new. Needs `jaxreplay[checkpoint]`.

        Args:
          path: a folder, or a URL.

        Raises:
          PathInUseError: another replay, or a Checkpointer, is writing there.
        """
        with self._monitor:
            self._owner.save(
                path, {"limiter": dataclasses.asdict(self._limiter) if self._limiter else None}
            )

    def load(self, path: Any) -> None:
        """Take everything that `save`, or a Checkpointer, wrote for an equal buffer. What the
        replay held is gone then, also what was lost.

        A load that fails leaves it as it was. Where memory has no room for both, the files are all
        read first, to see that they are whole. Episodes that were being written go on with the next
        `add`: restore the envs too. Where they are reset instead, save after a step that ends every
        episode; else the last step before is paired with the first one after.
        """
        with self._monitor:
            self._check_open()
            metadata = self._changing(self._owner.load, path)
            if self._limiter:
                self._limiter.resume(metadata.get("limiter"))
            self._start_anew()

    def close(self) -> None:
        """End every call that waits, with a RuntimeError. The rows can still be saved."""
        with self._monitor:
            self._is_closed = True
            self._monitor.notify_all()

    def __enter__(self) -> "Replay":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Replay is not copied or pickled, nor sent to another process; replay.save(path) "
            "writes its rows to a file"
        )

    def _start_anew(self) -> None:
        """Without what was drawn before."""
        self._drawn.clear()
        self._monitor.notify_all()

    def _changing(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except BaseException:
            self._monitor.notify_all()  # what waits learns that the rows are lost, if they are
            raise

    def _has_sample(self) -> bool:
        return bool(self._drawn) or self._may_sample()

    def _next(self, batch_size: int | None, beta: float | None) -> Sample:
        """A batch that was drawn before, or a new one."""
        if self._drawn and len(self._drawn[0].is_valid) == (batch_size or self.buffer.batch_size):
            return self._drawn.popleft()
        return self._draw(batch_size, beta)

    def _draw(self, batch_size: int | None, beta: float | None) -> Sample:
        size = self.buffer.batch_size if batch_size is None else operator.index(batch_size)
        batch = self._owner.draw(size, beta)
        if self._limiter is not None:
            self._limiter.num_samples += size
        return batch

    def _wait(self, where: str, is_ready: Any, timeout: float | None, why: Any) -> None:
        """Until something is so, or a TimeoutError that says why not; the lock is free
        meanwhile."""
        seconds, end = self._seconds(where, timeout), None
        while True:
            self._check_open()
            _ = self._owner.state  # RuntimeError if it was lost meanwhile
            if is_ready():
                return
            end = time.monotonic() + seconds if end is None else end
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"after {seconds:g} s: {why()}")
            self._monitor.wait(min(left, 3600.0))

    def _seconds(self, where: str, timeout: float | None) -> float:
        """What a call waits for others: what it says, or else the replay's own."""
        if timeout is None:
            return self._timeout
        return checks.checked_seconds(where, timeout)

    def _may_insert(self) -> bool:
        return self._limiter is None or not self._owner.has_batch() or self._limiter.may_insert()

    def _may_sample(self) -> bool:
        return self._owner.has_batch() and (self._limiter is None or self._limiter.may_sample())

    def _why_no_sample(self) -> str:
        if self._owner.has_batch():
            return "inserts lag behind: add, or raise samples_per_insert"
        return (
            f"nothing can be drawn yet, {len(self)} rows of at least {self.buffer.min_size}: "
            "add steps first, or wait with timeout="
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this Replay is closed")
