"""The layout of a state depends on its platform alone, not on the backend that traces. That all
layouts return the same values is in `test_oracle_streams.py`."""

import dataclasses
import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.storage import platforms, stored_arrays, tiles
from tests.support.buffers import KINDS, bits

SHAPES = [(1,), (3,), (48,), (49,), (3, 5), (64,), (100,), (127,), (128,), (129,), (376,), (31,)]
SHAPES += [(5, 7, 9), (84, 84, 4), (2, 1024), (33, 32)]
# Tiles depend on the size of an element: other dtypes of the same size are tested in two shapes.
MANY = ("float32", "float16", "uint8")
OTHERS = ("int32", "uint32", "bfloat16", "int16", "int8", "bool", "float8_e4m3fn", "int4", "uint4")
GROUPS = {dtype: [(shape, dtype) for shape in SHAPES] for dtype in MANY}
GROUPS["others"] = [(shape, dtype) for dtype in OTHERS for shape in ((49,), (5, 7, 9))]
PRIORITIZED = next(case for case in KINDS if case.name == "prioritized same_step, 3 steps")


@jax.jit
def there_and_back(values, rows, kept):
    """Write rows into tiles, and read them in every way, for each leaf."""

    def of_leaf(values):
        empty = stored_arrays.zeros(
            9, jax.ShapeDtypeStruct(values.shape[1:], values.dtype), has_tiles=True
        )
        leaf = stored_arrays.write(empty, rows, values)
        plain = stored_arrays.read_plain({"x": leaf}, kept)
        return (
            leaf,
            stored_arrays.read(leaf, kept),
            jax.vmap(lambda row: stored_arrays.read(leaf, row))(kept),
            stored_arrays.read(leaf, jnp.array([1, 8])),
            plain,
            stored_arrays.write_plain({"x": empty}, kept, plain),
        )

    return list(map(of_leaf, values))


@pytest.mark.parametrize("group", GROUPS)
def test_a_row_comes_out_of_its_parts_as_it_went_in(group):
    r, rows = np.random.default_rng(0), np.array([6, 0, 9, 3, 4])
    chosen = np.array([0, 1, 3, 4])  # the third is dropped
    values = []
    for shape, dtype in GROUPS[group]:
        most = 2 if dtype == "bool" else 7
        values.append(r.integers(0, most, (5, *shape)).astype(jnp.dtype(dtype)))
    found = there_and_back(values, rows, rows[chosen])
    for value, results in zip(values, found, strict=True):
        leaf, got, one_by_one, untouched, plain, again = results
        assert (leaf.shape, leaf.dtype) == ((9, *value.shape[1:]), value.dtype)
        wanted = value[chosen]
        for read in (got, one_by_one):
            assert read.dtype == value.dtype
            assert bits(read) == bits(wanted)
        assert bits(untouched) == bits(np.zeros_like(wanted[:2]))
        assert bits(again) == bits({"x": leaf})
        spec = lambda one: (one.shape[1:], one.dtype)
        plain_specs = stored_arrays.plain_specs({"x": leaf})
        assert jax.tree.map(spec, plain_specs) == jax.tree.map(spec, plain)


def columns_of(part):
    """Return the number of columns that a TPU holds for each row: 1, 2, 4 or a multiple of 8."""
    width = int(np.prod(part.shape))
    return next((few for few in (1, 2, 4) if width <= few), -(-width // 8) * 8)


@pytest.mark.parametrize("dtype", MANY)
def test_parts_are_in_place_and_small(dtype):
    dtype = np.dtype(dtype)
    for size in [*range(1, 700), 784, 7056, 9216, 12288, 28224]:
        rule = tiles.tiles_of((size,), dtype) or (tiles.Tile(size, (size,)),)
        assert sum(part.size for part in rule) == size
        for part in rule:
            if len(part.shape) == 2:
                assert dtype.itemsize == 1
                assert part.shape[1] == 128
                assert part.shape[0] % 8 == 0
            else:
                assert part.is_words == (dtype.itemsize == 1)
                width = math.prod(part.shape)
                assert part.shape != (1,)  # it would be copied
                assert width <= 48 or width % 128 == 0
        held = sum(columns_of(part) * tiles.stored_dtype(part, dtype).itemsize for part in rule)
        assert size < 31 or held <= 1.35 * size * dtype.itemsize, (size, held)


def test_a_scalar_and_what_no_part_serves_lie_as_they_are():
    for shape, dtype in [
        ((), "uint8"),
        ((), "float32"),
        ((0, 3), "float32"),
        ((4,), "complex64"),
        ((8,), "float32"),
        ((128,), "int16"),
    ]:
        spec = jax.ShapeDtypeStruct(shape, dtype)
        assert isinstance(stored_arrays.zeros(4, spec, has_tiles=True), jax.Array)
    assert isinstance(stored_arrays.zeros(4, jax.ShapeDtypeStruct((84, 84), "uint8")), jax.Array)
    assert [name for name, traits in platforms.TRAITS.items() if traits.has_tiles] == ["tpu"]


@pytest.mark.parametrize(("platform", "width"), [("cpu", 8), ("gpu", 32), ("tpu", 128)])
def test_a_tree_is_as_wide_as_its_platform_wants_it_whatever_traces(platform, width):
    buffer = dataclasses.replace(PRIORITIZED.replay(), platform=platform)
    shape = jax.eval_shape(buffer.init, PRIORITIZED.example())
    assert shape.sampler.tree.sums[-1].shape == (width,)
    assert shape.layout.platform == platform


def test_a_state_stays_what_it_was_made_for():
    """A buffer without a platform accepts states of all platforms; a buffer with one names the
    difference."""
    case, buffer = PRIORITIZED, PRIORITIZED.replay()
    on_tpu, on_gpu = (dataclasses.replace(buffer, platform=name) for name in ("tpu", "gpu"))
    state = jax.eval_shape(on_tpu.init, case.example())
    state = jax.eval_shape(buffer.add, state, case.step())
    assert state.layout.platform == "tpu"
    with pytest.raises(ValueError, match="platform: the state's is 'tpu', this buffer's 'gpu'"):
        jax.eval_shape(on_gpu.size, state)


def test_programs_are_exported_by_the_leaves_of_a_state():
    case, buffer = PRIORITIZED, PRIORITIZED.replay()
    leaves, structure = jax.tree.flatten(case.filled(buffer))
    sample = lambda leaves, seed: jax.tree.leaves(
        buffer.sample(jax.tree.unflatten(structure, leaves), jax.random.key(seed))
    )
    exported = jax.export.export(jax.jit(sample), platforms=("cpu", "cuda", "tpu"))(leaves, 1)
    again = jax.export.deserialize(exported.serialize())
    assert bits(again.call(leaves, 1)) == bits(jax.jit(sample)(leaves, 1))


def test_toolkits_are_known_by_name():
    assert jr.items(capacity=4, batch_size=1, platform="cuda").platform == "gpu"


def test_the_default_is_that_of_the_device_that_new_arrays_go_to():
    assert platforms.platform_of(jax.devices()[0]) == jax.devices()[0].platform
    with jax.default_device(jax.devices("cpu")[0]):
        buffer = jr.items(capacity=4, batch_size=1)
        assert buffer.init({"x": jnp.zeros(())}).layout.platform == platforms.default()


def test_memory_is_told_by_the_leaves_that_were_given():
    example = {
        "image": jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8),
        "wide": jax.ShapeDtypeStruct((100,), jnp.float32),
    }
    plain, tiled = (
        jr.items(capacity=64, batch_size=1, platform=name).memory(example)
        for name in ("cpu", "tpu")
    )
    assert list(plain.leaves) == list(tiled.leaves)
    assert plain.total < tiled.total < 1.05 * plain.total
