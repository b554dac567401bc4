"""Arrays to tensors and back: shared memory is the same memory, copies are independent, and no
number is narrowed silently."""

import copy
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import thorough
from tests.support.compilations import count_programs
from tests.support.refusals import refused

torch = pytest.importorskip("torch", reason="the torch extra is not installed")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from jaxreplay.torch import from_torch, to_torch  # noqa: E402

FLOATS = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
BOTH_KNOW = f"bool uint8 uint16 uint32 int8 int16 int32 complex64 float32 float16 bfloat16 {FLOATS}"
WIDE = ["int64", "uint64", "float64", "complex128"]
NO_TYPE = (
    f"is {{}}, which does not go from JAX {jax.__version__} to torch {torch.__version__}; write "
    "x.astype(jnp.int8), or another dtype of at least 8 bits"
)
SHAPES = [(3, 4), (), (1,), (0, 3), (2, 1, 5)]


def array(dtype, shape=(3, 4)):
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2
    # the last of these types has no 0
    return jax.device_put((numbers + (dtype == "float8_e8m0fnu")).astype(jnp.dtype(dtype)))


def goes(dtype):
    """Return whether these versions of both libraries have a dtype: older ones lack some."""
    try:
        return hasattr(torch, dtype) and bool(torch.from_dlpack(array(dtype)).dtype)
    except (TypeError, RuntimeError):
        return False


def raw(x):
    """Return the bytes of a tensor or an array."""
    x = x.contiguous().view(torch.uint8).numpy() if isinstance(x, torch.Tensor) else x
    return np.asarray(x).tobytes()


@pytest.mark.no_xla
@pytest.mark.parametrize("dtype", BOTH_KNOW.split())
def test_there_and_back_are_the_same_numbers(dtype):
    """To a tensor in the same memory, and back to a copy."""
    if dtype in FLOATS.split() and not goes(dtype):  # older versions lack these
        with refused(
            "which does not go from JAX|is not a valid JAX array type", (ValueError, TypeError)
        ):
            to_torch(array(dtype))
        return
    for shape in SHAPES:
        x = array(dtype, shape)
        tensor = to_torch(x)
        assert (tuple(tensor.shape), str(tensor.dtype)) == (shape, f"torch.{dtype}")
        assert tensor.is_contiguous()
        back = from_torch(tensor)
        assert (back.shape, back.dtype) == (x.shape, x.dtype)
        assert raw(back) == raw(x)
        if x.size:
            assert x.unsafe_buffer_pointer() == tensor.data_ptr() != back.unsafe_buffer_pointer()
    tensor = tensor.clone()
    copied, before = from_torch(tensor), raw(tensor)
    tensor.view(torch.uint8).fill_(7)
    assert raw(copied) == before != raw(tensor)


@pytest.mark.parametrize("dtype", WIDE)
def test_64_bit_numbers_go_whole_where_jax_has_them(dtype):
    with jax.enable_x64(True):
        x = jax.device_put(np.arange(6).reshape(2, 3).astype(dtype) + 2**40)
    tensor = to_torch(x)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.data_ptr() == x.unsafe_buffer_pointer()
    with jax.enable_x64(True):
        for back in (from_torch(tensor), from_torch(tensor, cast=True)):
            assert (back.dtype, raw(back)) == (x.dtype, raw(x))


@pytest.mark.parametrize("dtype", WIDE)
def test_64_bit_numbers_are_never_cut_without_a_word(dtype):
    tensor = torch.arange(3).to(getattr(torch, dtype))
    message = (
        rf"from_torch:\n  action: is torch.{dtype}, which JAX would cut to 32 bits; pass cast=True"
    )
    with refused(message):
        from_torch({"action": tensor})
    got = from_torch({"action": tensor}, cast=True)["action"]
    assert (got.dtype.itemsize, np.asarray(got).tolist()) == (tensor.element_size() // 2, [0, 1, 2])


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


def test_a_tensor_that_holds_a_leaf_makes_each_add_a_copy_or_an_error_so_that_states_are_refused():
    replay = jr.items(capacity=1 << 16, batch_size=4)
    add, one = jax.jit(replay.add, donate_argnums=0), np.ones(1, np.float32)
    pointer = lambda state: state.rows.steps.unsafe_buffer_pointer()
    state = add(replay.init(np.float32(0)), one)
    before = pointer(state)
    state = add(state, one)
    assert pointer(state) == before
    message = (
        r"to_torch:\n  mine: is a ReplayState: while tensors share its leaves, each add would copy "
        "them, or fail on a GPU"
    )
    with refused(message):
        to_torch({"mine": state})
    view = torch.from_dlpack(state.rows.steps)
    if view.is_cuda:
        with refused("external reference"):
            add(state, one)
        return
    copied = pointer(add(state, one)) != before
    assert copied or jax.__version_info__ < (0, 5)
    # a JAX that does not copy writes into the tensor
    assert view[:3].tolist() == [1, 1, 0 if copied else 1]


def test_a_batch_outlives_its_arrays():
    tensor = to_torch(jax.device_put(np.arange(100_000) * 2))
    assert tensor[:3].tolist() == [0, 2, 4]
    jax.device_put(np.ones(100_000)).block_until_ready()
    assert int(tensor[-1]) == 199_998


def test_what_has_no_tensor_is_named_with_the_way_out():
    gone = array("float32")
    gone.delete()
    reasons = {
        "gone": (gone, "was deleted, such as by donation"),
        "key": (jax.random.key(0), "pass jax.random.key_data(key)"),
        "narrow": (array("int4"), NO_TYPE.format("int4")),
        "number": (3.0, "is a float, not a jax.Array"),
        "numpy": (np.zeros(3), "is a ndarray, not a jax.Array"),
        "rare": (array("float8_e4m3b11fnuz"), NO_TYPE.format("float8_e4m3b11fnuz")),
    }
    tree = {"none": None, "good": array("int32"), **{name: x for name, (x, _) in reasons.items()}}
    with refused("to_torch") as error:
        to_torch(tree)
    _, *lines = str(error.value).splitlines()
    for line, (name, (_, reason)) in zip(lines, reasons.items(), strict=True):
        assert line.strip().startswith(f"{name}: ")
        assert reason in line
    with refused("is being traced; return it from the jitted function"):
        jax.eval_shape(to_torch, array("int32"))
    with refused(r"the leaf: is a ndarray, not a torch.Tensor"):
        from_torch(np.zeros(3))
    with refused(r"torch.sparse_coo, not dense; write x.to_dense\(\)"):
        from_torch(torch.eye(3).to_sparse())
    with refused("x: is torch.bits8, which JAX .* does not take; cast it before"):
        from_torch({"x": torch.empty(2, dtype=torch.bits8)})


def test_a_replay_is_not_copied():
    with refused(r"a Replay cannot be copied, pickled.*replay.save", TypeError):
        copy.deepcopy(jr.Replay(jr.items(capacity=8, batch_size=2)))


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU that JAX and torch share")
def test_the_streams_of_a_card_wait_for_each_other():
    big = jnp.ones((4096, 4096))
    for _ in range(20):
        result = to_torch(big @ big)  # still being computed when it is passed on
        assert float(result.min()) == 4096
        assert float(from_torch(result * 2).max()) == 8192


NUM_ENVS = 64
COPIES = {"copy_", "_to_copy", "clone", "cat", "stack", "contiguous"}


class Copies(TorchDispatchMode):
    """Lists PyTorch's operations that copy."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.found += [name] * (name in COPIES)
        return function(*args, **kwargs or {})


@pytest.fixture
def waits(monkeypatch):
    """Return a list, to which each read of an array by the host is added."""
    found, kind = [], type(jnp.zeros(()))
    for name in ("__bool__", "__int__", "__float__", "__index__", "__array__", "block_until_ready"):
        own = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, own=own: found.append(own) or own(*args))
    return found


def loop_of(sampler, dtype=torch.float32, **options):
    """Return a replay of steps that a GPU simulator would give, and one such step."""
    buffer = jr.ReplayBuffer(
        capacity=NUM_ENVS * 16,
        num_envs=NUM_ENVS,
        batch_size=128,
        view=jr.views.TransitionView(),
        sampler=sampler,
        autoreset=jr.autoreset.ISAAC_LAB,
    )
    obs, no = torch.rand(NUM_ENVS, 8).to(dtype), torch.zeros(NUM_ENVS, dtype=torch.bool)
    step = {"obs": obs, "action": obs[:, :2], "reward": obs[:, 0]}
    step |= {"terminated": no, "truncated": no}
    replay = jr.Replay(buffer, **{"framework": "torch", **options})
    for _ in range(6):
        replay.add(**step)
    return replay, step


@pytest.mark.thorough
def test_an_add_copies_a_tensor_once_and_a_batch_none():
    replay, step = loop_of(jr.Uniform(), torch.bfloat16)  # these cross as those of a GPU do
    replay.sample()
    with Copies() as copies:
        replay.add(**step)
    of_numbers = [name for name, leaf in step.items() if leaf.dtype == torch.bfloat16]
    assert copies.found == ["copy_"] * len(of_numbers)
    with Copies() as copies:
        batch = replay.sample()
    assert batch.experience.obs.dtype == torch.bfloat16
    assert not copies.found


@pytest.mark.parametrize("sampler", [jr.Uniform(), thorough(jr.Prioritized())])
def test_a_loop_waits_for_the_device_only_to_know_whether_it_can_sample(sampler, waits):
    replay, step = loop_of(sampler, framework="jax")
    for turn in range(6):
        with count_programs() as programs:
            replay.add(**step)
            assert not waits
            batch = replay.sample()
            assert len(waits) == 1
            waits.clear()
            if replay.buffer.sampler.has_priorities:
                replay.update_priorities(batch.index, batch.weight)
                assert not waits
        assert turn < 3 or not programs()


@pytest.mark.thorough
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_batches_are_computed_before_they_are_asked_for(prefetch):
    batches, enough = [], threading.Event()

    def note(reward):
        batches.append(len(reward))
        if len(batches) > prefetch:
            enough.set()
        return reward

    replay, _ = loop_of(jr.Uniform(), prefetch=prefetch)
    noted = lambda item, key: item.replace(
        reward=jax.pure_callback(note, item.reward, item.reward, vmap_method="expand_dims")
    )
    replay = jr.Replay(jr.transform(replay.buffer, noted), state=replay.state, prefetch=prefetch)
    jax.block_until_ready(replay.sample())
    assert enough.wait(10)
    jax.effects_barrier()
    assert len(batches) == prefetch + 1
