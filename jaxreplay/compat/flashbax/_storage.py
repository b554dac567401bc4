"""Storage of all buffers, and their sizes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._util import checks
from jaxreplay._util.aliases import PyTree
from jaxreplay._util.names import kind_of
from jaxreplay._util.struct import Node, Static
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.buffers.state_checks import as_arrays
from jaxreplay.buffers.step_checks import check_block
from jaxreplay.compat._stacked import for_each
from jaxreplay.samplers import Prioritized, Uniform
from jaxreplay.storage import ring, stored_arrays
from jaxreplay.storage.layout import Window
from jaxreplay.storage.state import ReplayState
from jaxreplay.views import RowReader, View


class State(Node):
    """State of a buffer of E envs.

    Attributes:
      replay: The stored rows, as jaxreplay keeps them.
    """

    replay: ReplayState

    @property
    def experience(self) -> PyTree:
        """Stored rows: pytree with leaves [E, max_length_time_axis, ...]; 0 where none is written.

        Outside of `jit` it is a copy of all rows.
        """
        return for_each(_stored, self)

    def replace(self, **changes: Any) -> Any:
        """Return a state with other rows, or with other values of other fields.

        Args:
          changes: `experience`, as the property has it, which costs O(capacity); or fields.

        Raises:
          ValueError: A leaf of `experience` has another shape or dtype, or a name is not a field.
        """
        state, fields = self, {field.name for field in dataclasses.fields(self)}
        if "experience" in changes:
            experience = changes.pop("experience")
            expected = jax.eval_shape(lambda: self.experience)
            checks.check_leaves("replace", experience, expected, "as state.experience has them")
            state = for_each(_with_experience, self, experience)
        if others := changes.keys() - fields:
            raise ValueError(
                f"replace: {', '.join(sorted(others))} of a {type(self).__name__} is counted as "
                "steps are added, and cannot be set. Make a state with buffer.init, and add steps"
            )
        return dataclasses.replace(state, **changes)


class Sequence(View[PyTree]):
    """Read `length` rows, the sampled one first."""

    length: int

    @property
    def window(self) -> Window:
        return Window(after=self.length - 1)

    @property
    def needs_steps(self) -> bool:
        return False

    def read(self, reader: RowReader) -> PyTree:
        return reader.item(ring.arange(self.length))


class Storage(Static):
    """Storage of all buffers: steps [E, T, ...] go to E streams."""

    storage: ReplayBuffer
    has_envs: bool = True
    has_time: bool = True
    is_flat: bool = False  # one stream for the steps of all envs, however many

    def _extend(self, state: Any, batch: PyTree) -> ReplayState:
        if not isinstance(state, State):
            raise ValueError(
                f"add: the state must be one that init or add returned, got {kind_of(state)}"
            )
        first = jax.tree.leaves(batch)[:1]
        given = iter(jnp.shape(first[0]) if first else ())
        envs = (next(given, 0),) if self.has_envs else ()
        time = (next(given, 0),) if self.has_time else ()
        if self.has_envs and not self.is_flat:
            envs = (self.storage.num_envs,)
        names = ["add_batch_size"] * self.has_envs + ["time"] * self.has_time
        check_block(
            "add",
            batch,
            state.replay.rows.steps,
            (*envs, *time),
            f"steps with leaves [{', '.join([*names, '...'])}]",
        )

        def by_time(leaf: Any) -> jax.Array:
            """Return leaves [T, E, ...]."""
            leaf = jnp.asarray(leaf)
            own = leaf.shape[len(envs) + len(time) :]
            if self.is_flat:
                return leaf.reshape((-1, 1, *own))
            leaf = leaf.reshape((*(envs or (1,)), *(time or (1,)), *own))
            return leaf.swapaxes(0, 1)

        block = jax.tree.map(by_time, batch)
        return self.storage.extend(
            state.replay, block, priority=self._priority(state, len(jax.tree.leaves(block)[0]))
        )

    def _priority(self, state: Any, num_steps: int) -> jax.Array | None:
        """Return the priorities of new rows: float32[T, E]; None for those of the sampler."""
        del state, num_steps


def read(view: View, state: ReplayState, row: jax.Array) -> PyTree:
    """Return what a view reads at rows int32[B]: leaves [B, ...]."""
    return jax.vmap(lambda one: view.read(RowReader(state, one)))(row)


def storage_of(
    where: str,
    num_envs: int,
    length: int,
    batch_size: int,
    view: View,
    exponent: float | None = None,
) -> ReplayBuffer:
    if exponent is not None and not 0 <= exponent <= 1:
        raise ValueError(f"{where}: priority_exponent must be in [0, 1], got {exponent}")
    return ReplayBuffer(
        capacity=checked(where, "add_batch_size", num_envs) * length,
        num_envs=num_envs,
        batch_size=checked(where, "sample_batch_size", batch_size),
        sampler=Uniform() if exponent is None else Prioritized(alpha=exponent),
        view=view,
    )


def checked(where: str, name: str, size: Any) -> int:
    """Return a size as an int. Raise a ValueError unless it is one of at least 1."""
    checks.check_size(where, name, size)
    return int(size)


def length_of(where: str, num_envs: int, max_size: int | None, length: int | None) -> int:
    """Return the number of time steps that are kept."""
    if (max_size is None) == (length is None):
        raise ValueError(
            f"{where}: give one of max_size and max_length_time_axis, got max_size={max_size} and "
            f"max_length_time_axis={length}"
        )
    if max_size is not None:
        length = max_size // checked(where, "add_batch_size", num_envs)
    return checked(where, "max_length_time_axis", length)


def flat_sizes(
    where: str, max_length: int, min_length: int, num_envs: int | None
) -> tuple[int, int]:
    """Return the number of time steps that are kept, and that from which on a flat buffer can be
    sampled."""
    num_envs = 1 if num_envs is None else checked(where, "add_batch_size", num_envs)
    length = checked(where, "max_length", max_length) // num_envs
    if length < 2:
        raise ValueError(
            f"{where}: max_length={max_length} has no room for 2 steps of each of {num_envs} envs"
        )
    return length, least(where, length, min_length // num_envs + 1, 2)


def least(where: str, length: int, minimum: int, num_steps: int) -> int:
    """Return the number of time steps from which on a buffer can be sampled."""
    minimum = max(minimum, num_steps)
    if minimum > length:
        raise ValueError(
            f"{where}: {minimum} time steps are needed before a sample, but {length} are kept"
        )
    return minimum


def _stored(state: Any) -> PyTree:
    replay = state.replay

    def by_env(leaf: Any) -> jax.Array:
        axes = (replay.layout.num_envs, replay.layout.length)
        return stored_arrays.values(leaf).reshape((*axes, *leaf.shape[1:]))

    return stored_arrays.tree_map(by_env, replay.rows.steps)


def _with_experience(state: State, experience: PyTree) -> State:
    replay = as_arrays(state.replay)

    def put(leaf: Any, values: Any) -> Any:
        values = jnp.asarray(values).reshape((-1, *leaf.shape[1:]))
        return stored_arrays.write(leaf, ring.arange(len(values)), values)

    steps = stored_arrays.tree_map(put, replay.rows.steps, experience)
    return dataclasses.replace(state, replay=replay.replace(rows=replay.rows.replace(steps=steps)))
