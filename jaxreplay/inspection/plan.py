"""The memory of a buffer before it is allocated: bytes of each leaf, bytes with next observations
stored twice, and the largest capacity that fits."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxreplay._util import checks
from jaxreplay._util.aliases import Autoreset, PyTree
from jaxreplay.buffers import memory
from jaxreplay.buffers.memory import Memory
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.distributed import Sharded
from jaxreplay.distributed.local import shard_of
from jaxreplay.storage import platforms

_MOST_ROWS = 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
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
    """

    memory: Memory
    naive: int
    free_host: int | None
    free_device: int | None
    device: str
    largest_capacity: int | None
    num_devices: int = 1

    @property
    def fits(self) -> bool | None:
        """True if the buffer, or its part, fits on the default device; None if its free memory is
        not known."""
        return None if self.free_device is None else self.memory.total <= self.free_device

    def __str__(self) -> str:
        def row(name: str, value: int | None, unit: str = "bytes") -> str:
            return f"{name:32}" + ("not known" if value is None else f"{value:>20,} {unit}")

        lines = [f"each of {self.num_devices} devices holds"] * (self.num_devices > 1) + [
            str(self.memory),
            "",
            row("total", self.memory.total),
            row("with next observations stored", self.naive),
            row("free in this machine", self.free_host),
            row(f"free on the device ({self.device})", self.free_device),
            row("largest capacity that fits", self.largest_capacity, "rows"),
        ]
        fits = {True: "It fits.", False: "It does not fit.", None: "Whether it fits is not known."}
        return "\n".join([*lines, fits[self.fits]])


def plan(buffer: ReplayBuffer | Sharded, example: PyTree, devices: int = 1) -> Plan:
    """Compute the memory that a buffer will take, and whether it fits. Nothing is allocated.

    Args:
      buffer: A `ReplayBuffer`, or a sharded one.
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
    if isinstance(buffer, Sharded):
        return _plan(buffer.local.buffer, example, buffer.num_shards)
    if not isinstance(buffer, ReplayBuffer):
        raise ValueError(
            f"plan: expected a ReplayBuffer, got {type(buffer).__name__}; "
            "for a rollout, use print(rollout.memory(example))"
        )
    checks.check_size("plan", "devices", devices)
    return _plan(buffer if devices == 1 else shard_of("plan", buffer, devices), example, devices)


def _plan(buffer: ReplayBuffer, example: PyTree, num_devices: int) -> Plan:
    """Return the plan of one of several devices, each of which holds a buffer."""
    taken, free = buffer.memory(example), memory.free_bytes()
    obs = [size for name, size in taken.leaves.items() if name.startswith("rows.steps.obs")]
    return Plan(
        memory=taken,
        naive=taken.total + (sum(obs) if buffer.autoreset else 0),
        free_host=memory.free_host_bytes(),
        free_device=free,
        device=platforms.default_device().device_kind,
        largest_capacity=None
        if free is None
        else num_devices * _largest_capacity(buffer, example, free),
        num_devices=num_devices,
    )


def _largest_capacity(buffer: ReplayBuffer, example: PyTree, free: int) -> int:
    """Return the largest capacity whose state takes at most `free` bytes; 0 if none does.

    By bisection: trees grow in steps, so bytes are no linear function of the capacity.
    """

    def takes(length: int) -> int:
        return dataclasses.replace(buffer, capacity=length * buffer.num_envs).memory(example).total

    low = max(buffer.min_length, -(-buffer.min_size // buffer.num_envs))
    high = _MOST_ROWS // buffer.num_envs
    if takes(low) > free:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if takes(middle) <= free else (low, middle - 1)
    return low * buffer.num_envs


def step_of(obs: PyTree, action: PyTree, autoreset: Autoreset) -> dict[str, Any]:
    """Return an example of a step from the specs of an observation and an action. Rewards are
    scalar."""
    flag = jax.ShapeDtypeStruct((), bool)
    return {
        "obs": obs,
        "action": action,
        "reward": jax.ShapeDtypeStruct((), np.float32),
        "terminated": flag,
        "truncated": flag,
        "final_obs": obs if autoreset == "same_step" else None,
    }
