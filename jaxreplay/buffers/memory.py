"""What a buffer takes, before anything is allocated."""

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
    """Bytes of a buffer's state, leaf by leaf. `str()` gives a table."""

    leaves: dict[str, int]  # key path in the state -> bytes
    capacity: int  # rows

    @property
    def total(self) -> int:
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
    """The bytes of a state, or of the shapes of one (`jax.eval_shape`)."""
    whole = named(state, is_leaf=lambda node: isinstance(node, TiledArray))
    return Memory(
        {name: sum(map(_num_bytes, jax.tree.leaves(leaf))) for name, leaf in whole}, capacity
    )


def check_fits(where: str, memory: Memory) -> None:
    """Raise a MemoryError where the default device cannot hold the state beside what it holds
    already."""
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
    """Free bytes of the default device; None where it does not say."""
    device = platforms.default_device()
    stats = device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return free_host_bytes() if device.platform == "cpu" else None


def free_host_bytes() -> int | None:
    """What the system can hand out without swapping, and this container may take; or all there is,
    where the system does not say."""
    known = [size for size in (_free_in_system(), _free_in_container()) if size is not None]
    return min(known, default=None)


def _free_in_container() -> int | None:
    """Of a control group of Linux, version 2, that has a limit; files that it only caches do not
    count."""
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
    except (OSError, KeyError, ValueError):  # there is none, or its limit is "max"
        return None


def _free_in_system() -> int | None:
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
