"""One stored leaf: zeros, a masked write of rows in place, and a read of rows, for every dtype.

XLA on a CPU computes on few of the narrow dtypes: it widens the whole array before a scatter into bfloat16, an 8-bit float or int4, and
narrows it after, so that every write would cost O(capacity). These are stored as their bits, and only the rows that go in or come
out are converted.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

_PLAIN_FLOATS = (np.dtype("float16"), np.dtype("float32"), np.dtype("float64"))


class Narrow(flax.struct.PyTreeNode):
    """An array of a dtype that XLA does not scatter into in place."""

    bits: jax.Array  # [N, ...]
    dtype: Any = flax.struct.field(pytree_node=False)  # of the values

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape


def zeros(num_rows: int, row: Any) -> jax.Array | Narrow:
    """`num_rows` rows of zeros, like `row`, which has a shape and a dtype."""
    shape, dtype = (num_rows, *row.shape), np.dtype(row.dtype)
    bits = carrier(dtype)
    return jnp.zeros(shape, dtype) if bits is None else Narrow(jnp.zeros(shape, bits), dtype)


def put(leaf: jax.Array | Narrow, row: jax.Array, values: jax.Array) -> Any:
    """Write `values`, `[*row.shape, ...]`, to distinct rows; those past the end are dropped."""
    if isinstance(leaf, Narrow):
        return leaf.replace(bits=put(leaf.bits, row, _encode(values, leaf.bits.dtype)))
    values = values.reshape((row.size, *leaf.shape[1:]))
    return leaf.at[row.reshape(-1)].set(values, unique_indices=True, mode="drop")


def take(leaf: jax.Array | Narrow, row: jax.Array) -> jax.Array:
    """Read rows, which must be in bounds: `[*row.shape, ...]`."""
    if isinstance(leaf, Narrow):
        return _decode(take(leaf.bits, row), leaf.dtype)
    return leaf.at[row].get(mode="promise_in_bounds")


def take_elements(leaf: jax.Array | Narrow, row: jax.Array, place: jax.Array) -> jax.Array:
    """Read some elements of rows, which must be in bounds: `[K, P]`. `row`: int32[K]. `place`: int32[K, P], in the flat row."""
    if isinstance(leaf, Narrow):
        return _decode(take_elements(leaf.bits, row, place), leaf.dtype)
    return leaf.reshape((leaf.shape[0], -1)).at[row[:, None], place].get(mode="promise_in_bounds")


def stored_leaves(tree: Any) -> list[Any]:
    """`jax.tree.leaves` of stored leaves."""
    return jax.tree.leaves(tree, is_leaf=is_narrow)


def tree_map(function: Any, stored: Any, *rest: Any) -> Any:
    """`jax.tree.map` over stored leaves, and over the values that belong to each."""
    return jax.tree.map(function, stored, *rest, is_leaf=is_narrow)


def spec_text(shape: tuple[int, ...], dtype: Any) -> str:
    """As errors, files and tables write it: `float32[3, 4]`."""
    return f"{np.dtype(dtype).name}{list(shape)}"


def carrier(dtype: np.dtype) -> Any:
    """The dtype that holds the bits, or None where XLA works on the dtype itself."""
    if jnp.issubdtype(dtype, jnp.floating) and dtype not in _PLAIN_FLOATS:
        bits = jnp.finfo(dtype).bits
        return {16: jnp.uint16, 8: jnp.uint8}.get(bits, jnp.float16)  # below a byte: widened, which is exact
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
    return None


def is_narrow(leaf: Any) -> bool:
    """Whether a node of a tree is a stored leaf that has leaves of its own."""
    return isinstance(leaf, Narrow)


def _encode(values: jax.Array, carrier: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, carrier) if _is_bitcast(values.dtype) else values.astype(carrier)


def decode_on_host(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values that are held as such bits, without a device."""
    return bits.view(dtype) if _is_bitcast(dtype) else bits.astype(dtype)


def _decode(bits: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, dtype) if _is_bitcast(dtype) else bits.astype(dtype)


def _is_bitcast(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits >= 8
