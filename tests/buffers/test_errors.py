"""Errors of bad input: nothing is broadcast, and nothing is lost. Most errors are in the tables of
`test_newcomer_errors.py`."""

import collections
import copy
import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.buffers import jitted
from tests.support.refusals import refused
from tests.support.steps import nth, plain_step

SHARED = {"capacity": 8, "num_envs": 2, "batch_size": 4}
ZEROS, FLAGS = np.zeros(2, np.float32), np.zeros(2, bool)
STEP = plain_step(ZEROS)
EXAMPLE = nth(STEP, 0)
UNIFORM = jr.uniform(**SHARED, autoreset="same_step_no_final_obs")
ITEMS = jr.items(**SHARED)


def error_of(call):
    """Return the text of the ValueError that a function raises while it is traced."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        jax.eval_shape(call)
    return str(caught.value)


@pytest.mark.no_xla
def test_what_nearly_is_a_mistake_is_taken():
    jr.uniform(**SHARED, autoreset="same_step_no_final_obs", n_step=3)  # the longest window
    jr.transform(UNIFORM, lambda item, key, scale=2: item)
    # A stack around random goals could read past the write head; these could not.
    reward_fn = lambda achieved, goal, step: jnp.float32(-1)
    jr.frame_stack(jr.hindsight(UNIFORM, reward_fn), 2)
    jr.hindsight(jr.frame_stack(UNIFORM, 2), reward_fn, strategy="random")


@pytest.mark.no_xla
def test_a_hint_is_given_once_and_only_where_it_helps():
    add = lambda step: error_of(lambda: UNIFORM.add(UNIFORM.init(EXAMPLE), step))
    assert "astype" not in error_of(lambda: UNIFORM.init(STEP))
    assert add(STEP.replace(reward=np.zeros((2, 1)))).endswith(
        "those of the example given to init."
    )
    fields = {field.name: getattr(STEP, field.name) for field in dataclasses.fields(STEP)}
    assert add({**fields, "done": FLAGS, "dones": FLAGS}).count("done is two flags here") == 1


def test_narrow_row_numbers_and_leaves_without_elements_are_taken():
    buffer, dtypes = (
        jr.items(capacity=1000, batch_size=4),
        (jnp.int8, jnp.uint8, jnp.int16, jnp.uint32),
    )

    @jax.jit
    def run():
        state = buffer.init({"none": np.zeros(0), "one": 0.0})
        state = buffer.extend(state, {"none": np.zeros((9, 1, 0)), "one": np.zeros((9, 1))})
        return [buffer.get(state, jnp.arange(4, dtype=dtype)) for dtype in dtypes]

    for batch in run():
        assert np.asarray(batch.is_valid).all()
        assert batch.experience["none"].shape == (4, 0)


@pytest.fixture(scope="module")
def owner():
    jitted.options_here()
    return jr.Replay(ITEMS, example={"a": {"x": 0.0}})


LOST = {
    "np.array(['a', 'b'])": "an array of <U1 cannot be stored, only numbers of JAX's dtypes",
    "np.array([None, 1])": "an array of object cannot be stored",
    "np.zeros(2, [('x', float)])": "cannot be stored, only numbers",
    "np.zeros(2, 'M8[s]')": "an array of datetime64[s] cannot be stored",
    "np.zeros(2, np.longdouble)": "cannot be stored, only numbers",
    "np.ma.array([1.0, 2.0], mask=[0, 1], dtype=np.float32)": (
        "a masked array would lose its mask: write x.filled(value)"
    ),
    "np.array([7, 2**40 + 5])": "1099511627781 cannot be stored as int32, which is what JAX has",
    "np.array([7, 2**63], np.uint64)": "9223372036854775808 cannot be stored as uint32",
    "np.zeros(2, '>f4')": "its byte order is not native",
}


@pytest.mark.parametrize("typed", LOST)
@pytest.mark.no_xla
def test_what_would_be_lost_is_named_on_every_way_in(typed, owner):
    leaf, reason = eval(typed), LOST[typed]
    item, block = {"a": {"x": leaf}}, {"a": {"x": leaf[None]}}
    init = lambda given=0.0: ITEMS.init({"a": {"x": given}})
    calls = [("init", lambda: init(leaf))]
    for buffer in (ITEMS, jr.jit(ITEMS)):
        calls.append(("add", lambda buffer=buffer: buffer.add(init(), item)))
        calls.append(("extend", lambda buffer=buffer: buffer.extend(init(), block)))
    for way, call in calls:
        said = error_of(call)
        assert said.startswith(f"{way}:")
        assert "a.x: " in said
        assert reason in said
    if leaf.dtype != np.dtype(">f4"):  # a Replay corrects the byte order
        with refused(r"add: *.*a.x: ") as caught:
            owner.add(item)
        assert reason in str(caught.value)


@pytest.mark.no_xla
def test_a_buffer_that_does_not_fit_is_refused_before_it_is_allocated():
    buffer = jr.items(capacity=2**30, batch_size=4)
    spec = {"image": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
    with refused(
        r"takes 4,294,967,296,000,\d+ bytes .*Largest leaves: rows.steps.image .* rows "
        r"fit",
        MemoryError,
    ):
        buffer.init(spec)
    assert buffer.memory(spec).leaves["rows.steps.image"] == 4_000_000 * 2**30
    jax.eval_shape(buffer.init, spec)  # no error, since nothing is allocated


@pytest.mark.no_xla
def test_numpy_input_of_64_bits_is_taken_as_jax_takes_it():
    wide = jax.tree.map(lambda leaf: leaf if leaf.dtype == bool else leaf.astype(float), STEP)
    state = jax.eval_shape(lambda: UNIFORM.add(UNIFORM.init(EXAMPLE), wide))
    assert {leaf.dtype for leaf in (state.rows.steps.reward, state.rows.steps.obs)} == {
        np.dtype(np.float32)
    }


FIELDS = {"obs": ZEROS + 1, "action": np.zeros(2, np.int32), "reward": ZEROS + 1}
FIELDS |= {"terminated": FLAGS, "truncated": ~FLAGS}
TheirStep = dataclasses.make_dataclass("TheirStep", FIELDS)
FlaxStep = flax.struct.dataclass(
    type("FlaxStep", (), {"__annotations__": dict.fromkeys(FIELDS, object)})
)
KINDS = (jr.Step, dict, TheirStep, collections.namedtuple("Named", FIELDS), FlaxStep)


def test_a_step_may_be_of_any_class_with_the_fields():
    examples = [kind(**{name: leaf[0] for name, leaf in FIELDS.items()}) for kind in KINDS]
    steps, buffer = [kind(**FIELDS) for kind in KINDS], jr.jit(UNIFORM)
    made = jax.jit(
        lambda: [UNIFORM.add(UNIFORM.init(e), s) for e, s in zip(examples, steps, strict=True)]
    )()
    for example, step in zip(examples, steps, strict=True):
        owner = jr.Replay(UNIFORM)
        owner.add(step)
        made += [buffer.add(buffer.init(example), step), owner._owner.state]
    for got in made:
        jax.tree.map(np.testing.assert_array_equal, got, made[0])


@pytest.mark.no_xla
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_of_steps_may_be_of_any_class_with_the_fields(kind):
    block = kind(**{name: np.stack([leaf] * 3) for name, leaf in FIELDS.items()})
    state = jax.eval_shape(UNIFORM.init, {name: leaf[0] for name, leaf in FIELDS.items()})
    assert jax.eval_shape(lambda state: UNIFORM.extend(state, block), state) == state


@pytest.mark.no_xla
def test_a_batch_can_be_copied_and_has_no_other_names():
    batch = jax.eval_shape(lambda: UNIFORM.sample(UNIFORM.init(EXAMPLE), jax.random.key(0)))
    assert not hasattr(batch, "items")
    assert copy.deepcopy(batch) == batch
