"""The memory of a run before it begins: bytes of every leaf, what storing each next observation
would take, and what fits."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxreplay._util.aliases import Autoreset, PyTree
from jaxreplay.buffers import memory
from jaxreplay.buffers.memory import Memory
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.storage import platforms

_MOST_ROWS = 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes of a buffer beside those of the machine. `str()` gives a table."""

    memory: Memory
    naive: int  # bytes of the same rows with each next observation stored beside its observation
    free_host: int | None  # bytes that the system can hand out; None where it does not say
    free_device: int | None  # bytes of the default device
    device: str  # its kind
    largest_capacity: int | None  # rows that fit there; None where it does not say

    @property
    def fits(self) -> bool | None:
        """Whether the default device has room for it; None where it does not say."""
        return None if self.free_device is None else self.memory.total <= self.free_device

    def __str__(self) -> str:
        def row(name: str, value: int | None, unit: str = "bytes") -> str:
            return f"{name:32}" + ("not known" if value is None else f"{value:>20,} {unit}")

        lines = [
            str(self.memory),
            "",
            row("total", self.memory.total),
            row("with next observations stored", self.naive),
            row("free in this machine", self.free_host),
            row(f"free on the device ({self.device})", self.free_device),
            row("largest capacity that fits", self.largest_capacity, "rows"),
        ]
        return "\n".join(
            [
                *lines,
                {
                    True: "It fits.",
                    False: "It does not fit.",
                    None: "Whether it fits is not known.",
                }[self.fits],
            ]
        )


def plan(buffer: ReplayBuffer, example: PyTree) -> Plan:
    """What a buffer will take, and whether this machine has it. Nothing is allocated.

    Args:
      example: as for `init`: one env's step, or item.

    Example:
      >>> import jax, jax.numpy as jnp, jaxreplay as jr
      >>> made = jr.plan(
      ...     jr.items(capacity=1000, batch_size=8), jax.ShapeDtypeStruct((100,), jnp.uint8)
      ... )
      >>> made.memory.total, made.fits
      (100016, True)
    """
    if not isinstance(buffer, ReplayBuffer):
        raise ValueError(
            f"plan: expected a ReplayBuffer, got {type(buffer).__name__}; "
            "print(rollout.memory(example)) tells of a rollout"
        )
    taken, free = buffer.memory(example), memory.free_bytes()
    return Plan(
        memory=taken,
        naive=taken.total + _obs_bytes(buffer, example),
        free_host=memory.free_host_bytes(),
        free_device=free,
        device=platforms.default_device().device_kind,
        largest_capacity=None if free is None else _largest_capacity(buffer, example, free),
    )


def _obs_bytes(buffer: ReplayBuffer, example: PyTree) -> int:
    """Of the observations of all rows."""
    if buffer.autoreset is None:
        return 0
    names = [name for name in buffer.memory(example).leaves if name.startswith("streams.steps.obs")]
    return sum(buffer.memory(example).leaves[name] for name in names)


def _largest_capacity(buffer: ReplayBuffer, example: PyTree, free: int) -> int:
    """By bisection: trees grow in steps."""

    def takes(length: int) -> int:
        return dataclasses.replace(buffer, capacity=length * buffer.num_envs).memory(example).total

    low, high = buffer.min_length, _MOST_ROWS // buffer.num_envs
    if takes(low) > free:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if takes(middle) <= free else (low, middle - 1)
    return low * buffer.num_envs


def step_of(obs: PyTree, action: PyTree, autoreset: Autoreset) -> dict[str, Any]:
    """An example from the specs of an observation and an action, with scalar rewards."""
    flag = jax.ShapeDtypeStruct((), bool)
    return {
        "obs": obs,
        "action": action,
        "reward": jax.ShapeDtypeStruct((), np.float32),
        "terminated": flag,
        "truncated": flag,
        "final_obs": obs if autoreset == "same_step" else None,
    }
