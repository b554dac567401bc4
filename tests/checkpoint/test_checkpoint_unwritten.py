"""Tests of uninitialized memory for restores: rows that a restore does not fill are zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.buffers import bits
from tests.support.checkpointed_run import EXAMPLE, added, items

pytest.importorskip("tensorstore", reason="the checkpoint extra is not installed")

from jaxreplay import checkpoint
from jaxreplay.checkpoint import rows, unwritten

on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the host's memory alone")


@on_a_cpu
def test_the_memory_is_xlas_and_is_taken_over_in_place():
    """Allocate large and small arrays of several dtypes: they keep what is written to them, and a
    donated large array is reused in place."""
    assert unwritten._is_there()  # supported with the tested versions
    large = unwritten._LARGE
    like = {
        "bytes": jax.ShapeDtypeStruct((large // 64, 64), jnp.uint8),
        "floats": jax.ShapeDtypeStruct((large // 4 + 1,), jnp.float32),
        "again": jax.ShapeDtypeStruct((large // 64, 64), jnp.uint8),
        "flags": jax.ShapeDtypeStruct((large,), bool),
        "halves": jax.ShapeDtypeStruct((large, 2), jnp.bfloat16),
        "small": jax.ShapeDtypeStruct((3,), jnp.int32),
        "scalar": jax.ShapeDtypeStruct((), jnp.float32),
        "nothing": jax.ShapeDtypeStruct((5, 0), jnp.float32),
    }
    arrays = unwritten.like(like)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), arrays) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), like
    )
    assert len({leaf.unsafe_buffer_pointer() for leaf in arrays.values() if leaf.size}) == 7
    for leaf in arrays.values():
        place = rows.memory_of(leaf)
        assert place is not None
        place[...] = np.ones((), place.dtype)
    begin = jax.jit(
        lambda leaf: leaf.at[:1].set(jnp.zeros((), leaf.dtype)) if leaf.ndim else leaf,
        donate_argnums=0,
    )
    pointers = {
        name: leaf.unsafe_buffer_pointer() for name, leaf in arrays.items() if leaf.nbytes >= large
    }
    arrays = {name: begin(leaf) for name, leaf in arrays.items()}
    assert {name: arrays[name].unsafe_buffer_pointer() for name in pointers} == pointers
    for name, leaf in arrays.items():
        if leaf.ndim and leaf.size:
            assert not np.asarray(leaf[0]).any(), name
            assert (np.asarray(leaf[1:]) == 1).all(), name


@on_a_cpu
@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("count", [0, 1, 11, 16, 21])
def test_what_is_not_filled_is_zero(is_there, count, tmp_path, monkeypatch):
    """Restore streams that are empty, partly filled or full, and streams filled after a clear."""
    buffer = items(capacity=64)
    state = added(buffer, buffer.init(EXAMPLE), 0, count)
    cleared = added(buffer, buffer.clear(jax.tree.map(jnp.copy, state)), count, 5)
    monkeypatch.setattr(unwritten, "_LARGE", 1)
    if not is_there:
        monkeypatch.setattr(unwritten, "_is_there", lambda: False)
    allocated = unwritten._allocated

    def garbage(described):
        arrays = allocated(described)
        for leaf in arrays:
            rows.memory_of(leaf)[...] = np.ones((), leaf.dtype) * 77
        return arrays

    monkeypatch.setattr(unwritten, "_allocated", garbage)
    assert bool(is_there) == bool((np.asarray(unwritten.like(jnp.zeros(9))) == 77).all())
    for number, one in enumerate((state, cleared)):
        checkpoint.save(tmp_path / str(number), buffer, one)
        got = checkpoint.restore(tmp_path / str(number), buffer, EXAMPLE)
        assert bits(rows.split(got)[1]) == bits(rows.split(one)[1])
        written = np.asarray(one.streams.is_written(jnp.arange(64)))
        for leaf, other in zip(
            jax.tree.leaves(rows.split(got)[0]), jax.tree.leaves(rows.split(one)[0]), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(leaf)[written], np.asarray(other)[written])
            assert not np.asarray(leaf)[~written].any()


def test_an_unknown_version_gets_zeros(monkeypatch):
    unwritten._is_there.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(unwritten, "_KNOWN", ((0, 1), (0, 2)))
        assert not unwritten._is_there()
        patch.setattr(unwritten, "_LARGE", 1)
        assert not np.asarray(unwritten.like(jnp.ones(9))).any()
    unwritten._is_there.cache_clear()
