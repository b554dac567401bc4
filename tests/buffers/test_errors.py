"""Errors of bad input name what is wrong and the fix; nothing is broadcast, and nothing is lost."""

import collections
import copy
import dataclasses
import functools
import itertools
import re

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.samplers.prioritized import Prioritized
from jaxreplay.samplers.uniform import Uniform
from jaxreplay.views.item import Item
from jaxreplay.views.transition import TransitionView

SHARED = {"capacity": 8, "num_envs": 2, "batch_size": 4}
FLAGS = jnp.zeros(2, bool)


def step(**changes):
    zeros = jnp.zeros(2)
    fields = {
        "obs": {"a": zeros, "b": jnp.zeros((2, 3))},
        "action": zeros,
        "reward": zeros,
        "terminated": zeros > 0,
        "truncated": zeros > 0,
    }
    return {**fields, **changes}


def example(**changes):
    return jax.tree.map(lambda x: x[0], step(**changes))


def test_autoreset_has_no_default():
    for wrong in (None, "same-step", True):
        with pytest.raises(
            ValueError,
            match=r"(?s)autoreset=.*next_step.*Gymnasium >= 1.0.*same_step.*final_obs.*many "
            r"pure-JAX wrappers",
        ):
            jr.uniform(**SHARED, autoreset=wrong)


@pytest.mark.parametrize(("capacity", "nearest"), [(9, "8 and 10"), (7, "6 and 8"), (1, "2")])
def test_a_capacity_that_does_not_divide_names_the_nearest(capacity, nearest):
    with pytest.raises(
        ValueError,
        match=f"capacity={capacity} rows do not divide into num_envs=2 equal streams; the nearest "
        f"that do: {nearest}",
    ):
        jr.items(capacity=capacity, num_envs=2, batch_size=4)


@pytest.mark.parametrize("wrong", [0, -2, 8.0, True])
def test_sizes_must_be_positive_ints(wrong):
    with pytest.raises(ValueError, match="capacity must be an int of at least 1"):
        jr.items(capacity=wrong, batch_size=4)
    with pytest.raises(ValueError, match="num_envs must be an int of at least 1"):
        jr.items(capacity=8, num_envs=wrong, batch_size=4)
    with pytest.raises(ValueError, match="batch_size must be an int of at least 1"):
        jr.items(capacity=8, batch_size=wrong)


def test_a_stream_must_hold_one_window():
    with pytest.raises(ValueError, match="one window needs 6; the smallest capacity is 12"):
        jr.uniform(**SHARED, autoreset="next_step", n_step=5)
    jr.uniform(**SHARED, autoreset="same_step_no_final_obs", n_step=3)
    with pytest.raises(ValueError, match="one window needs 5; the smallest capacity is 10"):
        # a final row may follow each step
        jr.uniform(**SHARED, autoreset="same_step", n_step=3)


def test_a_number_of_steps_is_an_int():
    for wrong in (2.0, True, "2"):
        with pytest.raises(ValueError, match="n_step must be an int of at least 1"):
            jr.uniform(**SHARED, autoreset="next_step", n_step=wrong)


def test_a_reward_is_one_array():
    with pytest.raises(ValueError, match="reward must be one array, got dict"):
        jr.uniform(**SHARED, autoreset="next_step").init(
            {**example(), "reward": {"a": jnp.zeros(())}}
        )


def test_narrow_row_numbers_are_taken():
    replay = jr.items(capacity=1000, batch_size=4)
    state = replay.extend(replay.init(jnp.zeros(())), jnp.zeros((9, 1)))
    for dtype in (jnp.int8, jnp.uint8, jnp.int16, jnp.uint32):
        assert replay.get(state, jnp.arange(4, dtype=dtype)).is_valid.all()


def test_a_leaf_without_elements_is_stored():
    replay = jr.items(**SHARED)
    state = replay.init({"none": jnp.zeros((0,)), "one": jnp.zeros(())})
    state = replay.add(state, {"none": jnp.zeros((2, 0)), "one": jnp.ones(2)})
    assert replay.sample(state, jax.random.key(0)).experience["none"].shape == (4, 0)


def test_too_many_rows_are_refused():
    with pytest.raises(ValueError, match="must be at most 1073741824"):
        jr.items(capacity=2**30 + 1, batch_size=4)


def test_min_size_must_be_reachable():
    with pytest.raises(ValueError, match="min_size=9 exceeds capacity=8"):
        jr.items(capacity=8, batch_size=4, min_size=9)


@pytest.mark.parametrize("array", [jnp.float32(0.9), np.array(0.9)])
def test_an_array_in_the_configuration_is_refused(array):
    for make in (
        lambda: jr.uniform(**SHARED, autoreset="next_step", gamma=array),
        lambda: jr.prioritized(**SHARED, autoreset="next_step", alpha=array),
    ):
        with pytest.raises(
            ValueError,
            match=r"(gamma|alpha) is an? [^,]+, but a configuration holds plain Python values",
        ):
            make()
    with pytest.raises(ValueError, match="batch_size is a"):
        jr.items(capacity=8, batch_size=array)


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="n_step must be an int of at least 1, got 0"):
        TransitionView(n_step=0)
    with pytest.raises(ValueError, match=r"gamma must be in \[0, 1\], got 1.5"):
        TransitionView(gamma=1.5)
    for alpha in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="alpha must be a finite number of at least 0"):
            Prioritized(alpha=alpha)


def test_items_have_no_episodes():
    for wrong in ({"autoreset": "next_step"}, {"autoreset": None, "track_episodes": True}):
        with pytest.raises(ValueError, match="stores items, which have no episodes"):
            ReplayBuffer(**SHARED, sampler=Uniform(), view=Item(), **wrong)


def test_a_step_must_have_its_fields():
    replay = jr.uniform(**SHARED, autoreset="same_step_no_final_obs")
    incomplete = {key: value for key, value in step().items() if key != "truncated"}
    with pytest.raises(
        ValueError, match=r"init: the step's keys are wrong: missing truncated; unknown done"
    ):
        replay.init({**incomplete, "done": False})
    with pytest.raises(
        ValueError,
        match=r"must be a jaxreplay\.Step, or a mapping, dataclass or NamedTuple with its fields, "
        r"got list",
    ):
        replay.init([1, 2])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "done",
            "done is two flags here: terminated, if the task itself ended, so that the value",
        ),
        ("next_obs", "leave out the next observation: it is the obs of the next row"),
        ("observations", "the observation is called obs"),
        ("mask", "mask and priority are arguments of add and extend"),
    ],
)
def test_a_name_of_another_library_is_explained(name, hint):
    replay = jr.uniform(**SHARED, autoreset="same_step_no_final_obs")
    with pytest.raises(
        ValueError, match=f"(?s)init: the step's keys are wrong: unknown {name}.*{hint}"
    ):
        replay.init({**example(), name: False})
    with pytest.raises(ValueError, match=f"(?s)add: .*unknown {name}, foo.*{hint}") as caught:
        replay.add(replay.init(example()), {**step(), name: FLAGS, "foo": FLAGS})
    assert str(caught.value).count(hint) == 1


@pytest.mark.parametrize("make", [jr.uniform, jr.prioritized])
def test_an_example_with_the_env_axis_is_told_so(make):
    """Passing the first step of all envs in place of one env's is the commonest mistake."""
    replay = make(**SHARED, autoreset="same_step_no_final_obs")
    with pytest.raises(
        ValueError,
        match=r"(?s)init:.*terminated: got bool\[2\], expected bool\[\].*an example is one env's "
        r"step",
    ) as caught:
        replay.init(step())
    assert "astype" not in str(caught.value)
    with pytest.raises(
        ValueError,
        match=r"(?s)truncated: got float32\[2\].*an example is one env's step.*x.astype\(bool\)",
    ):
        replay.init(step(truncated=jnp.zeros(2)))
    with pytest.raises(ValueError, match="an example is one env's step"):
        jr.rollout(length=3, num_envs=2, autoreset="same_step_no_final_obs").init(step())


def test_done_flags_must_be_bool():
    replay = jr.uniform(**SHARED, autoreset="same_step_no_final_obs")
    with pytest.raises(
        ValueError, match=r"(?s)terminated: got float32\[\], expected bool\[\].*x.astype\(bool\)"
    ):
        replay.init(example(terminated=jnp.zeros(2)))
    state = replay.init(example())
    with pytest.raises(ValueError, match=r"truncated: got int32\[2\], expected bool\[2\]"):
        replay.add(state, step(truncated=jnp.zeros(2, jnp.int32)))


def test_every_bad_leaf_is_named_at_once():
    replay = jr.uniform(**SHARED, autoreset="same_step_no_final_obs")
    state = replay.init(example())
    bad = step(obs={"a": jnp.zeros((2, 1)), "c": jnp.zeros(2)}, reward=jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="add:") as error:
        replay.add(state, bad)
    for line in (
        "obs.a: got float32[2, 1], expected float32[2]",
        "obs.b: missing, expected float32[2, 3]",
        "obs.c: unexpected, got float32[2]",
        "reward: got int32[2], expected float32[2]",
    ):
        assert line in str(error.value)


def test_a_scalar_is_not_broadcast():
    replay = jr.uniform(**SHARED, autoreset="same_step_no_final_obs")
    state = replay.init(example())
    with pytest.raises(ValueError, match=r"reward: got float32\[\], expected float32\[2\]"):
        replay.add(state, step(reward=0.0))
    with pytest.raises(ValueError, match=r"reward: got float32\[1\], expected float32\[2\]"):
        replay.add(state, step(reward=jnp.zeros(1)))


@pytest.mark.parametrize(
    "make",
    [
        lambda form: jr.uniform(**SHARED, autoreset=form),
        lambda form: jr.rollout(length=4, num_envs=2, autoreset=form),
    ],
    ids=["uniform", "rollout"],
)
def test_final_obs_comes_with_same_step_and_must(make):
    replay = make("same_step")
    final = example(final_obs=step()["obs"])
    for call in (
        lambda: replay.init(example()),
        lambda: replay.add(replay.init(final), step()),
        lambda: replay.extend(replay.init(final), step()),
    ):
        with pytest.raises(ValueError, match=r"needs the final_obs of every step(.|\n)*") as caught:
            call()
        for name in ('info["final_observation"]', 'info["final_obs"]', 'extras["next_obs"]'):
            assert name in str(caught.value)
    with pytest.raises(ValueError, match=r"final_obs.b: missing"):
        replay.add(replay.init(final), step(final_obs={"a": jnp.zeros(2)}))
    with pytest.raises(
        ValueError, match=r"(?s)final_obs.*final_obs is an observation: the same leaves as obs"
    ):
        replay.init(example(final_obs=jnp.zeros(2)))


def test_a_final_obs_that_would_not_be_read_is_refused():
    """A given final_obs most likely means that the form is wrong: the next episode's first
    observation would be taken for the final one."""
    for make, form in itertools.product(
        (
            lambda form: jr.uniform(**SHARED, autoreset=form),
            lambda form: jr.rollout(length=4, num_envs=2, autoreset=form),
        ),
        ("next_step", "same_step_no_final_obs"),
    ):
        replay = make(form)
        with pytest.raises(
            ValueError,
            match=r"init: final_obs was given.*returns the final observation separately, use "
            r"autoreset=\"same_step\"",
        ):
            replay.init(example(final_obs=step()["obs"]))
        with pytest.raises(ValueError, match="add: final_obs was given"):
            replay.add(replay.init(example()), step(final_obs=step()["obs"]))


def test_a_mask_must_be_asked_for():
    mask = jnp.ones(2, bool)
    replay = jr.uniform(**SHARED, autoreset="same_step_no_final_obs")
    with pytest.raises(ValueError, match="made without allow_mask=True"):
        replay.add(replay.init(example()), step(), mask)
    replay = jr.uniform(**SHARED, autoreset="same_step_no_final_obs", allow_mask=True)
    with pytest.raises(ValueError, match=r"mask: got float32\[2\], expected bool\[2\]"):
        replay.add(replay.init(example()), step(), jnp.ones(2))
    with pytest.raises(ValueError, match=r"mask: got bool\[1\], expected bool\[2\]"):
        replay.add(replay.init(example()), step(), mask[:1])


def test_priorities_need_a_sampler_that_has_them():
    replay = jr.uniform(**SHARED, autoreset="same_step_no_final_obs")
    state = replay.init(example())
    with pytest.raises(
        ValueError, match=r"add: the sampler Uniform has no priorities; use jaxreplay\.prioritized"
    ):
        replay.add(state, step(), priority=jnp.ones(2))
    with pytest.raises(ValueError, match="update_priorities: the sampler Uniform"):
        replay.update_priorities(state, replay.sample(state, jax.random.key(0)).index, jnp.ones(4))


def test_priorities_must_be_one_a_row():
    replay = jr.prioritized(**SHARED, autoreset="same_step_no_final_obs")
    state = replay.init(example())
    index = replay.sample(state, jax.random.key(0)).index
    with pytest.raises(
        ValueError, match=r"update_priorities: priority: got float32\[4, 1\], expected float32\[4\]"
    ):
        replay.update_priorities(state, index, jnp.ones((4, 1)))
    with pytest.raises(ValueError, match=r"priority: got float32\[\], expected float32\[2\]"):
        replay.add(state, step(), priority=1.0)
    with pytest.raises(ValueError, match="cannot tell whether the row was overwritten"):
        replay.update_priorities(state, index.row, jnp.ones(4))


def test_an_index_must_be_integers():
    replay = jr.uniform(**SHARED, autoreset="same_step_no_final_obs")
    state = replay.init(example())
    with pytest.raises(
        ValueError, match=r"index must be a jaxreplay\.types\.Index or integer rows, got float32"
    ):
        replay.get(state, jnp.ones(3))
    with pytest.raises(ValueError, match="batch_size must be an int of at least 1, got 0"):
        replay.sample(state, jax.random.key(0), 0)


def test_leaves_that_cannot_be_stored_are_named():
    replay = jr.items(**SHARED)
    with pytest.raises(ValueError, match=r"init: a.key: .*jax.random.key_data"):
        replay.init({"a": {"key": jax.random.key(0)}})
    with pytest.raises(ValueError, match=r"init: a: a str cannot be stored, only numbers"):
        replay.init({"a": "text"})
    with pytest.raises(ValueError, match="init: the example has no leaves"):
        replay.init({})


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (np.array(["a", "b"]), "an array of <U1 cannot be stored, only numbers of JAX's dtypes"),
        (np.array([None, 1]), "an array of object cannot be stored"),
        (np.zeros(2, [("x", float)]), "cannot be stored, only numbers"),
        (np.zeros(2, "M8[s]"), r"an array of datetime64\[s\] cannot be stored"),
        (np.zeros(2, np.longdouble), "cannot be stored, only numbers"),
        (
            np.ma.array([1.0, 2.0], mask=[0, 1], dtype=np.float32),
            r"a masked array would lose its mask: write x.filled\(value\)",
        ),
        (np.zeros(2, ">f4"), "its byte order is not native"),
    ],
)
def test_what_would_be_lost_is_named_on_every_way_in(leaf, reason):
    replay = jr.items(**SHARED)
    example = {"a": {"x": jnp.zeros(())}}
    state = replay.init(example)
    ways = (
        lambda: replay.init({"a": {"x": leaf}}),
        lambda: replay.add(state, {"a": {"x": leaf}}),
        lambda: replay.extend(state, {"a": {"x": leaf[None]}}),
        lambda: jr.jit(replay).add(jax.tree.map(jnp.copy, state), {"a": {"x": leaf}}),
        lambda: jr.jit(replay).extend(jax.tree.map(jnp.copy, state), {"a": {"x": leaf[None]}}),
        lambda: jr.Replay(replay, example=example).add({"a": {"x": leaf}}),
    )
    # a Replay corrects the byte order
    for way in ways[: -1 if leaf.dtype == np.dtype(">f4") else None]:
        with pytest.raises(ValueError, match=rf"(?s)(init|add|extend): *.*a.x: .*{reason}"):
            way()


def test_a_masked_array_in_a_trajectory_is_refused():
    rollout = jr.rollout(length=8, num_envs=1, autoreset="next_step")
    trajectory = {
        name: leaf[:, 0]
        for name, leaf in jax.tree.map(lambda x: np.asarray(x)[None], step()).items()
        if name != "obs"
    }
    trajectory["obs"] = np.ma.array(np.zeros((1, 2)), mask=True)
    state = rollout.init({**example(), "obs": jnp.zeros(2)})
    with pytest.raises(
        ValueError, match=r"(?s)trajectory 0:.*obs: a masked array would lose its mask"
    ):
        rollout.from_trajectories(state, [trajectory])


def test_a_buffer_that_does_not_fit_is_refused_before_it_is_allocated():
    replay = jr.items(capacity=2**30, batch_size=4)
    spec = {"image": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
    with pytest.raises(
        MemoryError,
        match=r"takes 4,294,967,296,000,\d+ bytes .*Largest leaves: streams.steps.image .* rows "
        r"fit",
    ):
        replay.init(spec)
    assert replay.memory(spec).leaves["streams.steps.image"] == 4_000_000 * 2**30
    jax.eval_shape(replay.init, spec)  # no error, since nothing is allocated


def test_numpy_input_of_64_bits_is_taken_as_jax_takes_it():
    replay = jr.uniform(**SHARED, autoreset="same_step_no_final_obs")
    state = replay.add(replay.init(example()), step(reward=np.zeros(2, np.float64)))
    assert state.streams.steps.reward.dtype == jnp.float32


GOAL = {"achieved_goal": jnp.zeros(2), "desired_goal": jnp.zeros(2)}


def relabel(reward, reward_fn, **options):
    """Return a sample with new goals, from steps whose rewards have the dtype of `reward`."""
    replay = jr.hindsight(
        jr.uniform(capacity=8, num_envs=1, batch_size=2, autoreset="next_step"),
        reward_fn,
        relabel_fraction=1.0,
        **options,
    )
    state = replay.init(
        jr.Step(
            GOAL, jnp.int32(0), jnp.asarray(reward), terminated=jnp.bool_(0), truncated=jnp.bool_(0)
        )
    )
    return jax.jit(replay.sample)(state, jax.random.key(0))


def minus_one(achieved, goal, step):
    return jnp.float32(-1)


def test_a_new_reward_that_the_stored_dtype_cannot_hold_is_refused():
    relabel(0.0, minus_one)
    relabel(0.0, lambda *_: -1)
    for reward in (0, np.uint8(0), False):
        with pytest.raises(
            ValueError,
            match=r"Hindsight: minus_one gave float32\[\] for one step, but stored is .*which "
            r"cannot hold it",
        ):
            relabel(reward, minus_one)
    with pytest.raises(ValueError, match=r"gave int32\[\] for one step, but stored is uint8\[\]"):
        relabel(np.uint8(0), lambda *_: -1)
    with pytest.raises(ValueError, match=r"gave float32\[\] for one step, but stored is bool\[\]"):
        relabel(
            0.0,
            minus_one,
            terminated_fn=lambda achieved, goal, step: jnp.sum(jnp.abs(achieved - goal)),
        )
    with pytest.raises(
        ValueError, match=r"partial.* gave float32\[3\] for one step, but stored is float32\[\]"
    ):
        relabel(0.0, functools.partial(lambda x, *_: jnp.full(x, 0.0), 3))


def test_functions_and_keys_of_goals_are_checked():
    replay = jr.uniform(capacity=8, num_envs=1, batch_size=2, autoreset="next_step")
    with pytest.raises(
        ValueError,
        match=r"Hindsight: reward_fn must be a function, called as reward_fn\(achieved, goal, "
        r"step\), got None",
    ):
        jr.hindsight(replay, None)  # pyright: ignore
    with pytest.raises(
        ValueError, match=r"Hindsight: terminated_fn must be a function, .* got True"
    ):
        jr.hindsight(replay, minus_one, terminated_fn=True)  # pyright: ignore
    with pytest.raises(ValueError, match="Hindsight: achieved_key and desired_key are both 'x'"):
        jr.hindsight(replay, minus_one, achieved_key="x", desired_key="x")
    with pytest.raises(
        ValueError,
        match=r"Transformed: transform must be a function, called as transform\(item, key\), got "
        r"None",
    ):
        jr.transform(replay, None)  # pyright: ignore
    with pytest.raises(ValueError, match=r"frame_stack: takes a ReplayBuffer, got a Rollout$"):
        jr.frame_stack(jr.rollout(length=4, num_envs=1, autoreset="next_step"), 2)  # pyright: ignore


def test_functions_of_other_arguments_are_refused():
    replay = jr.uniform(**SHARED, autoreset="next_step")
    with pytest.raises(
        ValueError,
        match=r"reward_fn must accept the call reward_fn\(achieved, goal, step\): too many",
    ):
        jr.hindsight(replay, lambda achieved, goal: 0.0)  # pyright: ignore
    with pytest.raises(
        ValueError,
        match=r"transform must accept the call transform\(item, key\): missing a required "
        r"argument: 'more'",
    ):
        jr.transform(replay, lambda item, key, more: item)  # pyright: ignore
    jr.transform(replay, lambda item, key, scale=2: item)


def test_parts_are_instances():
    with pytest.raises(
        ValueError,
        match=r"sampler must be an instance of a jaxreplay.samplers.Sampler, such as "
        r"jaxreplay.Uniform\(\), got <class",
    ):
        jr.transitions(**SHARED, autoreset="next_step", sampler=jr.Queue)  # pyright: ignore
    with pytest.raises(
        ValueError,
        match=r"view must be an instance of a jaxreplay.views.View, such as "
        r"jaxreplay.views.Item\(\), got 'item'",
    ):
        ReplayBuffer(**SHARED, sampler=Uniform(), view="item", autoreset=None)  # pyright: ignore
    with pytest.raises(
        ValueError, match=r"jit: takes a buffer, .*to compile a function use jax.jit"
    ):
        jr.jit(step)
    with pytest.raises(
        AttributeError,
        match=r"jaxreplay.jit\(buffer\) has no memory: it is on the buffer itself, buffer.memory",
    ):
        jr.jit(jr.uniform(**SHARED, autoreset="next_step")).memory(example())  # pyright: ignore


def test_what_a_view_does_not_find_is_named():
    stacked = jr.frame_stack(jr.uniform(**SHARED, autoreset="next_step"), 2, key="image")
    with pytest.raises(ValueError, match="FrameStack: obs has no leaf 'image'; it has a, b"):
        stacked.init(example())
    with pytest.raises(
        ValueError, match="FrameStack: obs has no leaf 'image'; it is one array: leave out key"
    ):
        stacked.init(example(obs=jnp.zeros(3)))
    with pytest.raises(
        ValueError,
        match=r"axis=5 is not in the stacks of obs, whose frames are \(3,\): it must be in -2 .. 1",
    ):
        jr.frame_stack(jr.uniform(**SHARED, autoreset="next_step"), 2, axis=5).init(
            example(obs=jnp.zeros((2, 3)))
        )
    recurrent = jr.sequences(
        capacity=64,
        num_envs=2,
        batch_size=1,
        length=3,
        autoreset="next_step",
        recurrent_state_key="h",
    )
    with pytest.raises(
        ValueError,
        match=r"recurrent_state_key='h' is no key of the step's extras: they are not a mapping; "
        r"store it",
    ):
        recurrent.init(example())
    with pytest.raises(
        ValueError, match=r"extras: they have flag; store it with each step, as extras=\{'h': ...\}"
    ):
        recurrent.init(example(extras={"flag": jnp.zeros(2)}))
    with pytest.raises(ValueError, match="got no mapping"):
        jr.hindsight(jr.uniform(**SHARED, autoreset="next_step"), minus_one).init(
            example(obs=jnp.zeros(3))
        )


def test_stacks_go_inside_of_goals_from_anywhere():
    """A stack around such goals could read past the write head."""
    replay = jr.uniform(capacity=8, num_envs=1, batch_size=2, autoreset="next_step")
    anywhere = jr.hindsight(replay, minus_one, strategy="random")
    with pytest.raises(
        ValueError,
        match=r"FrameStack: inner reads random rows.*put the stack inside: "
        r"jaxreplay.hindsight\(jaxreplay.fr",
    ):
        jr.frame_stack(jr.transform(anywhere, lambda item, key: item), 2)
    jr.frame_stack(jr.hindsight(replay, minus_one), 2)
    jr.hindsight(jr.frame_stack(replay, 2), minus_one, strategy="random")


@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_float_flags_name_the_cure(name):
    replay = jr.uniform(capacity=8, num_envs=2, batch_size=2, autoreset="same_step_no_final_obs")
    zero, flag = jnp.zeros(2), jnp.zeros(2, bool)
    step = jr.Step(zero, zero, zero, terminated=flag, truncated=flag)
    state = replay.init(jax.tree.map(lambda leaf: leaf[0], step))
    match = (
        rf"add:\n  {name}: got float32\[2\], expected bool\[2\]\n.*\nwrite done flags as "
        r"bool: x.astype\(bool\)"
    )
    with pytest.raises(ValueError, match=match):
        replay.add(state, step.replace(**{name: zero}))
    with pytest.raises(ValueError, match=r"those of the example given to init\.$"):
        replay.add(state, step.replace(reward=jnp.zeros((2, 1))))


@dataclasses.dataclass
class TheirStep:
    obs: object
    action: object
    reward: object
    terminated: object
    truncated: object


@flax.struct.dataclass
class FlaxStep:
    obs: object
    action: object
    reward: object
    terminated: object
    truncated: object


def test_a_step_may_be_of_any_class_with_the_fields():
    replay = jr.uniform(capacity=8, num_envs=2, batch_size=2, autoreset="same_step_no_final_obs")
    flag = np.zeros(2, bool)
    fields = {
        "obs": np.ones(2, np.float32),
        "action": np.zeros(2, np.int32),
        "reward": np.ones(2, np.float32),
    }
    fields |= {"terminated": flag, "truncated": ~flag}
    kinds = (jr.Step, dict, TheirStep, collections.namedtuple("Named", fields), FlaxStep)
    made = []
    for kind in kinds:
        example = kind(**{name: leaf[0] for name, leaf in fields.items()})
        made.append(jax.tree.leaves(replay.add(replay.init(example), kind(**fields))))
        owner = jr.Replay(replay)
        owner.add(kind(**fields))
        made.append(jax.tree.leaves(owner._owner.state))
        buffer = jr.jit(replay)
        made.append(jax.tree.leaves(buffer.add(buffer.init(example), kind(**fields))))
    for leaves in made:
        for got, expected in zip(leaves, made[0], strict=True):
            np.testing.assert_array_equal(got, expected)
    with pytest.raises(
        ValueError,
        match=r"a step must be a jaxreplay.Step, or a mapping, dataclass or NamedTuple .* got int",
    ):
        replay.add(replay.init(example), 3)
    with pytest.raises(
        ValueError, match=r"the step's keys are wrong: missing reward; unknown rewards"
    ):
        replay.add(
            replay.init(example),
            collections.namedtuple("Named", "obs action rewards terminated truncated")(
                *fields.values()
            ),
        )


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: jr.uniform(**SHARED, discount=0.9), "takes no discount; did you mean gamma"),
        (lambda: jr.uniform(**SHARED, n_steps=3), "takes no n_steps; did you mean n_step"),
        (lambda: jr.items(max_length=9), "takes no max_length; did you mean capacity"),
        (lambda: jr.items(**SHARED, batch_siz=2), "takes no batch_siz; did you mean batch_size"),
        (lambda: jr.Prioritized(exponent=1.0), "Prioritized takes no exponent; did you mean alpha"),
        (lambda: jr.Uniform(x=1), "Uniform takes no x; it takes no arguments"),
        (lambda: jr.items(**SHARED).sample(32), r"buffer.sample\(state, jax.random.key\(0\)\)"),
        (lambda: jr.jit(jr.items(**SHARED)).sample(32), r"jaxreplay.Replay\(buffer\) keeps both"),
    ],
)
def test_the_words_of_other_libraries_are_answered(call, hint):
    with pytest.raises(TypeError, match=hint):
        call()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("items", "did you mean batch.experience?"),
        ("obs", "did you mean batch.experience.obs?"),
        ("num_steps", "did you mean batch.experience.num_steps?"),
        ("indices", "did you mean batch.index?"),
        ("weights", "did you mean batch.weight?"),
        ("mask", "did you mean batch.is_valid?"),
        ("nothing", "a Sample has no nothing"),
    ],
)
def test_a_batch_answers_the_names_of_other_libraries(name, hint):
    replay = jr.uniform(**SHARED, autoreset="same_step_no_final_obs")
    batch = jax.eval_shape(replay.sample, replay.init(example()), jax.random.key(0))
    with pytest.raises(AttributeError, match=re.escape(hint)):
        getattr(batch, name)
    assert not hasattr(batch, name)
    assert copy.deepcopy(batch) == batch


def test_a_name_that_the_items_have_is_theirs():
    """`mask` is another library's `is_valid`, but sequences have a `mask` of their own."""
    buffer = jr.sequences(**{**SHARED, "capacity": 64}, length=2, autoreset="next_step")
    batch = jax.eval_shape(buffer.sample, buffer.init(example()), jax.random.key(0))
    with pytest.raises(AttributeError, match=re.escape("did you mean batch.experience.mask?")):
        _ = batch.mask
