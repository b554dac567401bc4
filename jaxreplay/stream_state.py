"""What streams of rows hold, and what a write did to them: `streams.py` says how they are read and written."""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp


class Heads(flax.struct.PyTreeNode):
    """Of each stream. Streams that always step together have equal ones: a GPU counts a whole step in one kernel where all of it is [E]."""

    position: jax.Array  # int32[E], in [0, length): of the next write
    filled: jax.Array  # int32[E], in [0, length]: rows written
    lap: jax.Array  # uint32[E]: how often the head went round


class StreamState(flax.struct.PyTreeNode):
    """N = num_envs * length rows, E streams."""

    steps: Any  # the stored leaves, [N, ...]: a Step whose done flags live in `flags`, or an item as it came
    flags: jax.Array | None  # uint8[N], bits of `autoreset`; None, and so the next, for plain items
    rank: jax.Array | None  # uint32[N], modulo 2^32: anchors of the stream before each row
    heads: Heads
    last: jax.Array | None  # uint8[E]: flags of the newest row
    count: jax.Array | None  # uint32[E], modulo 2^32: anchors ever written; the rank of the next row
    phase: jax.Array | None  # int32[E], in [0, stride): transitions from the newest anchor to the next row; None where every one is
    history: jax.Array | None  # uint32[E]: the fingerprint of all rows that were ever written (`fingerprint.py`); None if it is not kept
    newest: jax.Array | None  # uint32[E]: the newest row's own part of it, where that row may be taken back; else None
    together: bool = flax.struct.field(pytree_node=False)  # static: whether all streams always step together

    @property
    def head(self) -> jax.Array:
        """The position of the next write: int32[E], or int32[] where all step together."""
        return self._of_all(self.heads.position)

    @property
    def filled(self) -> jax.Array:
        """Rows written: as `head`."""
        return self._of_all(self.heads.filled)

    @property
    def lap(self) -> jax.Array:
        """How often the head went round: uint32[], or as `head`."""
        return self._of_all(self.heads.lap)

    def _of_all(self, per_stream: jax.Array) -> jax.Array:
        return per_stream[0] if self.together else per_stream

    def with_heads(self, **heads: Any) -> "StreamState":
        """With other ones, of each stream or for all: `position`, `filled` and `lap`."""
        new = {
            name: jnp.broadcast_to(jnp.asarray(value, old.dtype), old.shape)
            for name, value in heads.items()
            for old in (getattr(self.heads, name),)
        }
        return self.replace(heads=self.heads.replace(**new))


class Written(NamedTuple):
    """The rows that one call wrote, in the order of time. K rows a stream at the most."""

    row: jax.Array  # int32[K, E]; capacity where nothing is written
    is_written: jax.Array  # bool[K, E]
    flags: jax.Array | None  # uint8[K, E]; None for plain items
    age: jax.Array  # int32[K, E]: rows of its stream written after it
    num_rows: jax.Array  # int32[E]: rows written in each stream
    rank: jax.Array | None = None  # uint32[K, E]; None for plain items
