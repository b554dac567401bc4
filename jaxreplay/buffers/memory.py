"""Memory that a buffer needs, known before anything is allocated."""

import dataclasses
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np

from jaxreplay._util.names import named
from jaxreplay.storage import platforms
from jaxreplay.storage.stored_arrays import TiledArray


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory in bytes of a buffer's state, leaf by leaf. `str()` returns a table.

    Attributes:
      leaves: Bytes of each leaf, by its key path in the state, such as "rows.steps.obs".
      capacity: Number of rows.
    """

    leaves: dict[str, int]
    capacity: int

    @property
    def total(self) -> int:
        """Bytes of all leaves together."""
        return sum(self.leaves.values())

    def __str__(self) -> str:
        width = max(map(len, self.leaves), default=5)
        lines = [f"{'leaf':{width}}  {'bytes':>16}  {'bytes/row':>10}"]
        lines += [
            f"{path:{width}}  {size:>16,}  {size / self.capacity:>10.2f}"
            for path, size in [*self.leaves.items(), ("total", self.total)]
        ]
        return "\n".join(lines)


def memory_of(state: Any, capacity: int) -> Memory:
    """Return the memory of a state, or of its shapes (`jax.eval_shape`)."""
    whole = named(state, is_leaf=lambda node: isinstance(node, TiledArray))
    return Memory(
        {name: sum(map(_num_bytes, jax.tree.leaves(leaf))) for name, leaf in whole}, capacity
    )


def check_fits(where: str, memory: Memory) -> None:
    """Raise a MemoryError if the state exceeds the free memory of the default device."""
    free = free_bytes()
    if free is not None and memory.total > free:
        largest = sorted(memory.leaves.items(), key=lambda item: -item[1])[:3]
        fits = int(memory.capacity * free / memory.total)
        raise MemoryError(
            f"{where}: the buffer takes {memory.total:,} bytes "
            f"({memory.total / memory.capacity:.1f} a row), but the device has "
            f"{free:,} free. Largest leaves: "
            f"{', '.join(f'{path} {size:,}' for path, size in largest)}. About {fits:,} rows fit; "
            "see buffer.memory(example)."
        )


def _num_bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def free_bytes() -> int | None:
    """Return the free bytes of the default device, or None if it does not report them."""
    device = platforms.default_device()
    stats = device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return free_host_bytes() if device.platform == "cpu" else None


def free_host_bytes() -> int | None:
    """Return the bytes that this process can allocate without swapping, within the limit of its
    container; None if unknown. If the system reports no free memory, its total memory counts."""
    known = [size for size in (_free_in_system(), _free_in_container()) if size is not None]
    return min(known, default=None)


def _free_in_container() -> int | None:
    """Return the free bytes under the limit of a Linux control group (version 2), or None if it
    has no limit. Its inactive file cache counts as free."""
    try:
        limit, used = (
            pathlib.Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip()
            for name in ("max", "current")
        )
        cached = dict(
            line.split()
            for line in pathlib.Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
        )["inactive_file"]
        return max(int(limit) - int(used) + int(cached), 0)
    except (OSError, KeyError, ValueError):  # no control group, or its limit is "max"
        return None


def _free_in_system() -> int | None:
    """Return the system's available bytes, else its total bytes, or None if both are unknown."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
