"""Communication between the processes that save or restore one sharded buffer together.

All of them call the same methods in the same order, since each method waits for all. It goes
through one device of each process, so that no program waits for a part of itself.
"""

import contextlib
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxreplay._util import pow2

_T = TypeVar("_T")
_PIECE = 2**24  # bytes of each process that are sent at a time


class Processes:
    """One process among those that save or restore together.

    Args:
      devices: A device of each process. Default: none, for one process alone.
      index: Place of this process's device. Default: 0.
    """

    def __init__(self, devices: Sequence[Any] = (), index: int = 0):
        self.num, self.index, self._devices = max(len(devices), 1), index, [*devices]
        self._depth = 0  # of blocks of `agreed`
        self._known: Exception | None = None  # raised in all processes; None outside of blocks

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
        self._depth += 1
        try:
            yield
            self.told(None)
        except Exception as error:
            if self.num > 1 and not self.is_known(error):
                self._sent(error, _all)
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._known = None

    def is_known(self, error: Exception) -> bool:
        """Return whether all processes raise an error, which one of them has sent."""
        return error is self._known

    def gathered(self, leaf: jax.Array) -> np.ndarray:
        """Return all values of an array, of which each process may have a part, in all of them."""
        own = [(x.index, np.asarray(x.data)) for x in leaf.addressable_shards if not x.replica_id]
        values = np.empty(leaf.shape, leaf.dtype)
        for index, part in itertools.chain(*self.told(own)):
            values[index] = part
        return values

    def _sent(self, value: Any, program: Any) -> Any:
        """Return what a program makes of the pickled values of all processes, uint8[processes, n].
        An error is sent as any value, and raised in all."""
        is_error = isinstance(value, Exception)
        content = np.frombuffer(pickle.dumps(_sendable(value) if is_error else value), np.uint8)
        # in pieces of few sizes, so that they take little memory and few programs are compiled
        head = is_error, min(len(content), _PIECE), -(-len(content) // _PIECE)
        failed, sizes, nums = self._run(_all, np.array(head, np.int32)).T
        if failed.any():  # only errors are sent
            program, sizes, nums = _all, sizes * failed, nums * failed
            content = content[: len(content) * is_error]
        size = pow2.power_above(int(sizes.max()))
        padded = np.zeros(int(nums.max()) * size, np.uint8)
        padded[: len(content)] = content
        pieces = [self._run(program, piece) for piece in padded.reshape(-1, size)]
        found = np.concatenate(pieces, axis=-1)
        self._known = None
        if failed.any():
            nth = int(failed.argmax())
            error = value if nth == self.index else _loaded(found[nth])
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


def _all(values: jax.Array) -> jax.Array:
    return values


def _first(values: jax.Array) -> jax.Array:
    return values[0]


def _loaded(content: Any) -> Exception:
    """Return the error that another process has sent, or one about it if it cannot be read here."""
    try:
        return pickle.loads(content)
    except Exception as error:
        return RuntimeError(f"an error that cannot be read in this process: {error}")


def _sendable(error: Exception) -> Exception:
    """Return an error, or its text as a RuntimeError if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
