"""Arrays to tensors and back: shared memory is the same memory, copies are independent, and no
number is narrowed silently."""

import copy
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr

torch = pytest.importorskip("torch", reason="the torch extra is not installed")
from jaxreplay.torch import ReplayDataset, from_torch, to_tensordict, to_torch  # noqa: E402

BOTH_KNOW = [
    *(
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "int8",
        "int16",
        "int32",
        "float16",
        "bfloat16",
        "float32",
        "complex64",
    ),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
SIXTY_FOUR = ["int64", "uint64", "float64", "complex128"]
SHAPES = [(3, 4), (), (1,), (0, 3), (2, 1, 5)]


def array(dtype, shape=(3, 4)):
    return jnp.asarray(
        np.arange(int(np.prod(shape))).reshape(shape) % 2 + (dtype == "float8_e8m0fnu"), dtype
    )


def raw(x):
    """Return the bytes of a tensor or an array."""
    return (
        x.contiguous().view(torch.uint8).numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
    ).tobytes()


@pytest.mark.parametrize("dtype", BOTH_KNOW)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back_is_the_same_memory(dtype, shape):
    x = array(dtype, shape)
    tensor = to_torch(x)
    assert (tuple(tensor.shape), str(tensor.dtype), tensor.is_contiguous()) == (
        shape,
        f"torch.{dtype}",
        True,
    )
    back = from_torch(tensor, share=True)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert raw(back) == raw(x)
    if x.size:
        assert x.unsafe_buffer_pointer() == tensor.data_ptr() == back.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", BOTH_KNOW)
def test_by_default_a_tensor_is_copied(dtype):
    tensor = to_torch(array(dtype)).clone()
    got = from_torch(tensor)
    assert got.unsafe_buffer_pointer() != tensor.data_ptr()
    before = raw(got)
    tensor.view(torch.uint8).fill_(7)
    assert raw(got) == before


X64 = """
import jax, jax.numpy as jnp, numpy as np, torch
from jaxreplay.torch import from_torch, to_torch
for dtype in ("int64", "uint64", "float64", "complex128"):
    x = jnp.asarray(np.arange(6).reshape(2, 3) + 2**40, dtype)
    tensor = to_torch(x)
    assert tensor.data_ptr() == x.unsafe_buffer_pointer() and str(tensor.dtype) == "torch." + dtype
    for back in (from_torch(tensor, share=True), from_torch(tensor), from_torch(tensor, cast=True)):
        assert back.dtype == x.dtype and (np.asarray(back) == np.asarray(x)).all()
"""


def test_64_bit_numbers_go_whole_where_jax_has_them():
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", X64], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("dtype", SIXTY_FOUR)
def test_64_bit_numbers_are_never_cut_without_a_word(dtype):
    tensor = torch.arange(3).to(getattr(torch, dtype))
    # JAX's own behavior: it narrows silently.
    assert jax.dlpack.from_dlpack(tensor).dtype.itemsize == tensor.element_size() // 2
    with pytest.raises(
        ValueError,
        match=rf"from_torch:\n  action: is torch.{dtype}, which JAX would cut to 32 bits; pass "
        r"cast=True",
    ):
        from_torch({"action": tensor})
    got = from_torch({"action": tensor}, cast=True)["action"]
    assert (got.dtype.itemsize, got.real.tolist()) == (tensor.element_size() // 2, [0, 1, 2])
    with pytest.raises(ValueError, match="a cast makes a copy"):
        from_torch(tensor, share=True, cast=True)


def test_any_strides_gradients_and_lazy_conjugates_are_copied_as_they_look():
    x = torch.arange(12.0).reshape(3, 4)
    parameter = torch.ones(3, requires_grad=True)
    for tensor in (
        x.T,
        x[:, ::2],
        x[1:],
        x.flip(0),
        x[0, 0].expand(5),
        parameter,
        parameter * 2,
        torch.complex(x, x).conj(),
        x[:, :0],
    ):
        got = from_torch(tensor)
        np.testing.assert_array_equal(np.asarray(got), tensor.detach().resolve_conj().numpy())
        assert got.shape == tuple(tensor.shape)


def test_what_is_shared_must_be_an_arrays_memory():
    x = torch.arange(64.0).reshape(8, 8)
    strided = [x.T, x.reshape(4, 2, 8).permute(2, 0, 1)]
    if is_old := jax.__version_info__ < (0, 10, 2):  # which reads them in another order
        for tensor in strided:
            with pytest.raises(ValueError, match="JAX cannot share its memory"):
                from_torch(tensor, share=True)
    for tensor in (
        x,
        *([] if is_old else strided),
        x[2:4],
        torch.ones(3, requires_grad=True),
    ):
        got = from_torch(tensor, share=True)
        assert got.unsafe_buffer_pointer() == tensor.data_ptr()
        np.testing.assert_array_equal(np.asarray(got), tensor.detach().numpy())
    for tensor in (x[:, ::2], x[0, 0].expand(5), torch.complex(x, x).conj()):
        with pytest.raises(ValueError, match="JAX cannot share its memory; leave out share=True"):
            from_torch(tensor, share=True)
    # JAX's own behavior: it copies silently.
    assert (
        jax.dlpack.from_dlpack(x.reshape(-1)[1:]).unsafe_buffer_pointer()
        != x.reshape(-1)[1:].data_ptr()
    )
    with pytest.raises(
        ValueError, match="obs: begins 4 bytes past a multiple of 64: JAX would copy it"
    ):
        from_torch({"obs": x.reshape(-1)[1:]}, share=True)


def test_a_tensor_that_is_written_to_corrupts_what_shares_it_and_nothing_else():
    """JAX's `copy=True` shares the memory all the same, since 0.10.2 at least."""
    tensor = torch.zeros(1000)
    asked = jax.dlpack.from_dlpack(tensor, copy=True)
    shared, owned = from_torch(tensor, share=True), from_torch(tensor)
    tensor.fill_(1)
    assert float(shared.sum()) == 1000
    assert float(asked.sum()) == 1000 or jax.__version_info__ < (0, 10, 2)
    assert float(owned.sum()) == 0


def test_a_tensor_that_holds_a_leaf_makes_each_add_a_copy_or_an_error_so_that_states_are_refused():
    replay = jr.items(capacity=1 << 16, batch_size=4)
    add = jax.jit(replay.add, donate_argnums=0)
    state = add(replay.init(jnp.zeros(())), jnp.ones(1))
    pointer = state.streams.steps.unsafe_buffer_pointer()
    state = add(state, jnp.ones(1))
    assert state.streams.steps.unsafe_buffer_pointer() == pointer
    with pytest.raises(
        ValueError,
        match=r"to_torch:\n  mine: is a ReplayState: while tensors share its leaves, each add "
        r"would copy them, or fail on a GPU",
    ):
        to_torch({"mine": state})
    view = torch.from_dlpack(state.streams.steps)
    if view.is_cuda:
        with pytest.raises(ValueError, match="external reference"):
            add(state, jnp.ones(1))
        return
    state = add(state, jnp.ones(1))
    assert state.streams.steps.unsafe_buffer_pointer() != pointer  # the add copied the leaf
    assert view[:3].tolist() == [1, 1, 0]
    batch = jax.jit(replay.sample)(state, jax.random.key(0))
    assert to_torch(batch).experience.tolist() == [1.0] * 4


def test_a_batch_outlives_its_arrays():
    tensor = to_torch(jnp.arange(100_000) * 2)
    assert tensor[:3].tolist() == [0, 2, 4]
    jnp.ones(100_000).block_until_ready()
    assert int(tensor[-1]) == 199_998


def test_what_has_no_tensor_is_named_with_the_way_out():
    gone = jnp.arange(8.0)
    jax.jit(lambda x: x + 1, donate_argnums=0)(gone)
    tree = {
        "gone": gone,
        "key": jax.random.key(0),
        "narrow": jnp.zeros(3, jnp.int4),
        "numpy": np.zeros(3),
        "number": 3.0,
        "rare": jnp.zeros(3, jnp.float8_e4m3b11fnuz),
        "none": None,
        "good": jnp.zeros(3),
    }
    with pytest.raises(ValueError, match="to_torch") as error:
        to_torch(tree)
    lines = str(error.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "to_torch",
        "gone",
        "key",
        "narrow",
        "number",
        "numpy",
        "rare",
    ]
    assert "pass jax.random.key_data(key)" in lines[2]
    assert "int4, which torch does not have; write x.astype" in lines[3]
    with pytest.raises(ValueError, match="is being traced; return it from the jitted function"):
        jax.jit(to_torch)(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"the leaf: is a ndarray, not a torch.Tensor"):
        from_torch(np.zeros(3))
    with pytest.raises(ValueError, match=r"torch.sparse_coo, not dense; write x.to_dense\(\)"):
        from_torch(torch.eye(3).to_sparse())


SHARDED = """
import jax, jax.numpy as jnp
from jaxreplay.torch import to_torch

mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.device_put(
    jnp.arange(8.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
)
try:
    to_torch(x)
except ValueError as error:
    assert "lies on 2 devices; take one with x.addressable_shards[i].data" in str(error), error
else:
    raise AssertionError("a sharded array was taken")
assert to_torch(x.addressable_shards[1].data).tolist() == [4, 5, 6, 7]
"""


def test_an_array_on_several_devices_is_refused():
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    environment = os.environ | devices
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", SHARDED],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-3000:]


WITHOUT = """
import sys
sys.modules["torch"] = None  # as where it is not installed
import jaxreplay
try:
    import jaxreplay.torch
except ImportError as error:
    assert "jaxreplay.torch needs PyTorch: pip install 'jaxreplay[torch]'" in str(error), error
else:
    raise AssertionError
"""


def test_the_library_works_without_torch_and_the_bridge_says_what_to_install():
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    result = subprocess.run(
        [sys.executable, "-c", "import sys, jaxreplay; assert 'torch' not in sys.modules"],
        check=False,
    )
    assert result.returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU that JAX and torch share")
def test_the_streams_of_a_card_wait_for_each_other():
    big = jnp.ones((4096, 4096))
    for _ in range(20):
        result = to_torch(big @ big)  # still being computed when it is passed on
        assert float(result.min()) == 4096
        assert float(from_torch(result * 2).max()) == 8192


# Batches for training loops.


def replay_of(framework="torch", **options):
    replay = jr.Replay(
        jr.prioritized(
            capacity=64, num_envs=2, batch_size=6, autoreset="next_step", n_step=2, **options
        ),
        framework=framework,
    )
    for t in range(12):
        done = np.full(2, t % 5 == 4)
        obs = {"image": np.full((2, 3), t, np.uint8), "vector": np.full((2, 2), t / 4, np.float32)}
        extras = {"count": np.full(2, t)}
        replay.add(
            obs=obs,
            action=np.full(2, t),
            reward=np.full(2, t / 2),
            terminated=done,
            truncated=done & False,
            extras=extras,
        )
    return replay


def test_a_loader_hands_on_what_the_replay_draws():
    expected, replay = replay_of(), replay_of()
    loader = torch.utils.data.DataLoader(ReplayDataset(replay, num_batches=3), batch_size=None)
    for _ in range(2):  # passes
        batches = list(loader)
        assert len(batches) == 3
        for batch in batches:
            for x, y in zip(
                jax.tree.leaves(batch), jax.tree.leaves(expected.sample()), strict=True
            ):
                assert torch.equal(x, y)
    endless = iter(ReplayDataset(replay, transform=lambda batch: batch.experience.reward))
    assert [next(endless).shape for _ in range(20)] == [(6,)] * 20
    with pytest.raises(ValueError, match=r'takes a jaxreplay.Replay with framework="torch"'):
        ReplayDataset(replay_of("numpy"))
    with pytest.raises(ValueError, match=r'takes a jaxreplay.Replay with framework="torch"'):
        ReplayDataset(replay.buffer)
    with pytest.raises(TypeError, match=r"a Replay cannot be copied, pickled.*replay.save"):
        copy.deepcopy(replay)


def test_a_loader_hands_on_tensordicts():
    tensordict = pytest.importorskip("tensordict", reason="the tensordict extra is not installed")
    data = ReplayDataset(replay_of(), num_batches=2, transform=to_tensordict)
    batches = list(
        torch.utils.data.DataLoader(data, batch_size=None, collate_fn=lambda batch: batch)
    )
    assert [(type(batch), batch.batch_size) for batch in batches] == [
        (tensordict.TensorDict, (6,))
    ] * 2


def test_names_that_a_batch_has_of_its_own_are_refused():
    pytest.importorskip("tensordict", reason="the tensordict extra is not installed")

    def replay(**obs):
        replay = jr.Replay(
            jr.uniform(capacity=8, num_envs=1, batch_size=3, autoreset="same_step_no_final_obs"),
            framework="torch",
        )
        replay.add(
            obs=obs,
            action=np.ones(1),
            reward=np.ones(1),
            terminated=np.ones(1, bool),
            truncated=np.zeros(1, bool),
        )
        return replay

    for name in ("action", "index", "next", "is_valid", "reward", "done"):
        with pytest.raises(
            ValueError, match=f"to_tensordict: {name}: reserved for the TensorDict's own"
        ):
            to_tensordict(replay(fine=np.ones(1), **{name: np.ones(1)}).sample())
    items = jr.Replay(jr.items(capacity=8, num_envs=1, batch_size=3), framework="torch")
    items.add({"probability": np.ones(1)})
    with pytest.raises(ValueError, match="to_tensordict: probability"):
        to_tensordict(items.sample())


def test_a_worker_process_is_refused(monkeypatch):
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: object())
    with pytest.raises(
        RuntimeError, match=r"use DataLoader\(num_workers=0\) and Replay\(prefetch=n\)"
    ):
        next(iter(ReplayDataset(replay_of())))


@pytest.mark.parametrize("framework", ["torch", "jax", "numpy"])
def test_a_tensordict_has_the_keys_of_torchrl(framework):
    pytest.importorskip("tensordict", reason="the tensordict extra is not installed")
    replay = replay_of(framework)
    batch = replay.sample()
    got, items = (
        to_tensordict(batch),
        batch.experience
        if framework == "torch"
        else to_torch(jax.tree.map(jnp.asarray, batch.experience)),
    )
    assert got.batch_size == (6,)
    assert set(got.keys()) == {
        "image",
        "vector",
        "action",
        "next",
        "steps_to_next_obs",
        "extras",
        "index",
        "probability",
        "is_valid",
    }
    assert torch.equal(got["image"], items.obs["image"])
    assert framework == "numpy" or got["image"].data_ptr() == items.obs["image"].data_ptr()
    assert torch.equal(got["next", "vector"], items.next_obs["vector"])
    assert torch.equal(got["next", "reward"], items.reward[:, None])
    assert torch.equal(got["next", "terminated"], items.discount[:, None] == 0)
    assert torch.equal(got["next", "done"], got["next", "terminated"])
    assert torch.equal(got["steps_to_next_obs"], items.num_steps[:, None])
    assert torch.equal(got["extras", "count"], items.extras["count"])
    assert got[:2]["next", "image"].shape == (2, 3)
    replay.update_priorities(got["index"], got["probability"] + 1)
    assert int(replay._owner.state.sampler.num_stale_updates) == 0


def test_a_tensordict_of_other_items():
    pytest.importorskip("tensordict", reason="the tensordict extra is not installed")
    replay = jr.Replay(jr.items(capacity=8, num_envs=2, batch_size=3), framework="torch")
    replay.add({"pair": (np.zeros((2, 4)), np.ones(2)), "flag": np.ones(2, bool)})
    got = to_tensordict(replay.sample())
    assert (got["pair", "0"].shape, got["pair", "1"].tolist(), got["flag"].dtype) == (
        (3, 4),
        [1, 1, 1],
        torch.bool,
    )
    one = jr.Replay(
        jr.uniform(capacity=8, num_envs=1, batch_size=3, autoreset="same_step_no_final_obs"),
        framework="torch",
    )
    one.add(
        obs=np.zeros((1, 4)),
        action=np.ones(1),
        reward=np.ones(1),
        terminated=np.ones(1, bool),
        truncated=np.zeros(1, bool),
    )
    assert to_tensordict(one.sample())["next", "observation"].shape == (3, 4)


def test_without_tensordict_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxreplay\[tensordict\]'"):
        to_tensordict(replay_of().sample())
