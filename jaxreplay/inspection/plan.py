"""The memory of a buffer before it is allocated: bytes of each leaf, bytes with next observations
stored twice, and the largest capacity that fits."""

import dataclasses
from collections.abc import Callable

from jaxreplay._util import checks
from jaxreplay._util.aliases import PyTree
from jaxreplay.buffers import memory
from jaxreplay.buffers.jitted import buffer_of, unjitted
from jaxreplay.buffers.memory import Memory
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.step_checks import newest_waits
from jaxreplay.buffers.tiered import Tiered
from jaxreplay.distributed import Sharded
from jaxreplay.distributed.shard import shard_of
from jaxreplay.storage import platforms

_MOST_ROWS = 2**30


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Memory of a buffer, compared with the free memory of the machine. `str()` gives a table.

    Attributes:
      memory: Bytes of the buffer's state, leaf by leaf.
      naive: Bytes of the same rows if each next observation were stored beside its observation.
      free_host: Free bytes of the host, or None if the system does not report them.
      free_device: Free bytes of the default device, or None if the device does not report them.
      device: Kind of the default device, such as "cpu".
      largest_capacity: Largest capacity in rows, of all devices, of which each part fits on a
        device like the default one, or None if its free memory is not known.
      num_devices: Number of devices that the buffer is divided among. The bytes are those of one.
        Default: 1.
      place: Where the rows lie: "device", "host", or the path of a folder. Default: "device".
      rows: Bytes of the rows there; on the device they are in `memory`. Default: 0.
      free_place: Free bytes there, or None if the system does not report them. Default: None.
    """

    memory: Memory
    naive: int
    free_host: int | None
    free_device: int | None
    device: str
    largest_capacity: int | None
    num_devices: int = 1
    place: str = "device"
    rows: int = 0
    free_place: int | None = None

    @property
    def fits(self) -> bool | None:
        """True if the buffer, or its part, fits on the default device, and rows that lie elsewhere
        there; None if the free memory is not known."""
        if self.free_device is None or (self.rows and self.free_place is None):
            return None
        has_room = self.rows <= (self.free_place or 0)
        return self.memory.total <= self.free_device and has_room

    def __str__(self) -> str:
        def row(name: str, value: int | None, unit: str = "bytes") -> str:
            return f"{name:32}" + ("not known" if value is None else f"{value:>20,} {unit}")

        where = self.place if self.place in ("device", "host") else "disk"
        lines = [f"each of {self.num_devices} devices holds"] * (self.num_devices > 1) + [
            str(self.memory),
            "",
            row("total", self.memory.total),
            *[row(f"rows, on the {where}", self.rows)] * (where != "device"),
            row("with next observations stored", self.naive),
            row("free in this machine", self.free_host),
            *[row("free on its disk", self.free_place)] * (where == "disk"),
            row(f"free on the device ({self.device})", self.free_device),
            row("largest capacity that fits", self.largest_capacity, "rows"),
        ]
        fits = {True: "It fits.", False: "It does not fit.", None: "Whether it fits is not known."}
        return "\n".join([*lines, fits[self.fits]])


def plan(buffer: ReplayBuffer | Sharded | Tiered, example: PyTree, devices: int = 1) -> MemoryPlan:
    """Compute the memory that a buffer will take, and whether it fits. Nothing is allocated.

    Args:
      buffer: A `ReplayBuffer`, a sharded one, or a `jaxreplay.tiered` one, of which the device has
        the index.
      example: One env's step, without the env axis, or one item, as for `init`: a pytree of arrays
        or `jax.ShapeDtypeStruct`s. Only structure, shapes and dtypes are read.
      devices: Number of devices that `jaxreplay.sharded` will divide the buffer among; a sharded
        buffer has its own. The plan is that of one device. Default: 1.

    Returns:
      Bytes that the buffer takes and that are free. `print` shows a table.

    Raises:
      ValueError: `buffer` is not a `ReplayBuffer`, or cannot be divided among the devices.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> made = jr.plan(
      ...     jr.items(capacity=1000, batch_size=8), jax.ShapeDtypeStruct((100,), jnp.uint8)
      ... )
      >>> made.memory.total, made.fits
      (100016, True)
    """
    buffer = unjitted(buffer)
    if isinstance(buffer, Sharded):
        return _plan(buffer.local.buffer, example, buffer.num_shards)
    if isinstance(buffer, Tiered):
        if devices != 1:
            raise ValueError("plan: a buffer whose rows lie on the host has one device")
        return _plan(buffer.buffer, example, 1, buffer)
    buffer = buffer_of("plan", buffer, "; for a rollout, use print(rollout.memory(example))")
    checks.check_size("plan", "devices", devices)
    return _plan(buffer if devices == 1 else shard_of("plan", buffer, devices), example, devices)


def _plan(
    buffer: ReplayBuffer, example: PyTree, num_devices: int, tier: Tiered | None = None
) -> MemoryPlan:
    """Return the plan of one of several devices, each of which holds a buffer; or, with `tier`, the
    index of one."""
    whole, free = buffer.memory(example), memory.free_bytes()
    taken = whole if tier is None else tier.index.memory(example)
    place = {}
    if tier is not None:
        where = tier.place if tier.is_in_files else "host"
        place = {"place": where, "free_place": tier.free_bytes()}
    obs = [size for name, size in whole.leaves.items() if name.startswith("rows.steps.obs")]

    def fits(length: int) -> bool:
        assert free is not None
        sizes = {"capacity": length * buffer.num_envs}
        its_whole = dataclasses.replace(buffer, **sizes).memory(example).total
        if tier is None:
            return its_whole <= free
        index = dataclasses.replace(tier.index, **sizes).memory(example).total
        has_room = place["free_place"] is None or its_whole - index <= place["free_place"]
        return index <= free and has_room

    return MemoryPlan(
        memory=taken,
        naive=whole.total + (sum(obs) if buffer.autoreset else 0),
        free_host=memory.free_host_bytes(),
        free_device=free,
        device=platforms.default_device().device_kind,
        largest_capacity=None if free is None else num_devices * _largest_capacity(buffer, fits),
        num_devices=num_devices,
        rows=whole.total - taken.total,
        **place,
    )


def _largest_capacity(buffer: ReplayBuffer, fits: Callable[[int], bool]) -> int:
    """Return the largest capacity that fits, with so many rows for each env; 0 if none does.

    By bisection: trees grow in steps, so bytes are no linear function of the capacity.
    """
    low = -(-buffer.min_size // buffer.num_envs) + newest_waits(buffer)
    low = max(buffer.min_length, low)
    high = _MOST_ROWS // buffer.num_envs
    if not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * buffer.num_envs
