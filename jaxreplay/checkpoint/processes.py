"""Communication between the processes that save or restore one sharded buffer together.

All of them call the same methods in the same order, since each method waits for all. It goes
through one device of each process, so that no program waits for a part of itself.
"""

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxreplay._util import pow2

_T = TypeVar("_T")


class Processes:
    """One process among others.

    Args:
      devices: A device of each process. Default: none, for one process alone.
      index: Place of this process's device. Default: 0.
    """

    def __init__(self, devices: Sequence[Any] = (), index: int = 0):
        self.num, self.index, self._devices = max(len(devices), 1), index, [*devices]
        self._known: Exception | None = None  # the last error, which all processes raise

    def told(self, value: _T) -> list[_T]:
        """Return the values of all processes, in order."""
        return [value] if self.num == 1 else [*map(pickle.loads, self._sent(value, _all))]

    def first(self, function: Callable[[], _T]) -> _T:
        """Call a function in the first process, and return its result in all."""
        if self.num == 1:
            return function()
        return pickle.loads(self._sent(function() if self.index == 0 else None, _first))

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise an error in all processes if the block raises one in any.

        Where a process has left the block by an error, the others get it when they next call a
        method, or leave the block. If several fail at once, all raise the first one's error.
        """
        try:
            yield
            self.told(None)
        except Exception as error:
            if self.num > 1 and error is not self._known:
                self._sent(error, _all)
            raise

    def _sent(self, value: Any, program: Any) -> Any:
        """Send values, and return what a program makes of those of all processes, pickled. An error
        is raised in all."""
        is_error = isinstance(value, Exception)
        content = np.frombuffer(pickle.dumps(_sendable(value) if is_error else value), np.uint8)
        failed, sizes = self._run(_all, np.array([is_error, len(content)])).T
        if failed.any():  # only errors are sent
            program, sizes, content = _all, sizes * failed, content[: len(content) * is_error]
        padded = np.zeros(pow2.power_above(int(sizes.max())), np.uint8)  # few programs are compiled
        padded[: len(content)] = content
        found = self._run(program, padded)
        if failed.any():
            nth = int(failed.argmax())
            error = value if nth == self.index else pickle.loads(found[nth])
            if error is not value:
                error.add_note(f"an error of process {self._devices[nth].process_index}")
            self._known = error
            raise error
        return found

    def _run(self, program: Any, values: np.ndarray) -> np.ndarray:
        mesh = Mesh(np.array(self._devices), ("process",))
        own = jax.device_put(values[None], self._devices[self.index])
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


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
