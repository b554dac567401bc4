"""Communication between the processes that save or restore one sharded buffer together.

All of them call the same methods in the same order, since each method waits for all. It goes
through one device of each process, so that no program waits for a part of itself.
"""

import contextlib
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxreplay._util import pow2

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Processes:
    """One process among others.

    Attributes:
      devices: A device of each process. Default: none, for one process alone.
      index: Place of this process's device. Default: 0.
    """

    devices: tuple[Any, ...] = ()
    index: int = 0

    @property
    def num(self) -> int:
        """Number of processes."""
        return max(len(self.devices), 1)

    def told(self, value: _T) -> list[_T]:
        """Return the values of all processes, in order."""
        return [value] if self.num == 1 else [*map(pickle.loads, self._sent(value, _all))]

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise an error in all processes if the block raises one in any."""
        if self.num == 1:
            yield
            return
        error = None
        try:
            yield
        except Exception as own:
            error = own
        for nth, other in enumerate(self.told(_sendable(error))):
            if error is None and other is not None:
                error = other
                error.add_note(f"an error of process {self.devices[nth].process_index}")
        if error is not None:
            raise error

    def first(self, function: Callable[[], _T]) -> _T:
        """Call a function in the first process, and return its result in all."""
        if self.num == 1:
            return function()
        found: Any = None
        with self.agreed():
            if self.index == 0:
                found = function()
        return pickle.loads(self._sent(found, _first))

    def _sent(self, value: Any, program: Any) -> Any:
        """Pickle values of all processes, and return what a program makes of them."""
        content = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self._run(_all, np.array([len(content)]))
        padded = np.zeros(pow2.power_above(int(sizes.max())), np.uint8)  # few programs are compiled
        padded[: len(content)] = content
        return self._run(program, padded)

    def _run(self, program: Any, values: np.ndarray) -> np.ndarray:
        mesh = Mesh(np.array(self.devices), ("process",))
        own = jax.device_put(values[None], self.devices[self.index])
        sharding = NamedSharding(mesh, P("process"))
        shape = self.num, *values.shape
        whole = jax.make_array_from_single_device_arrays(shape, sharding, [own])
        return np.asarray(jax.jit(program, out_shardings=NamedSharding(mesh, P()))(whole))


def gathered(leaf: jax.Array) -> np.ndarray:
    """Return all values of an array over several devices, in all of their processes."""
    if not leaf.is_fully_addressable:
        sharding: Any = leaf.sharding
        everywhere = NamedSharding(sharding.mesh, P())
        # all devices finish before the next program begins
        leaf = jax.block_until_ready(jax.jit(_all, out_shardings=everywhere)(leaf))
    return np.asarray(leaf)


def _all(values: jax.Array) -> jax.Array:
    return values


def _first(values: jax.Array) -> jax.Array:
    return values[0]


def _sendable(error: Exception | None) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
