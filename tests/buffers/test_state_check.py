"""A buffer accepts only its own states: for any other state, each method names the difference."""

import dataclasses
import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
import jaxreplay.compat.flax
from tests.support.buffers import CATALOG

SHARED = {"capacity": 64, "num_envs": 2, "batch_size": 8}
FLAG, ZERO = jnp.zeros(2, bool), jnp.zeros(2)
STEP = jr.Step(obs=jnp.zeros((2, 3)), action=ZERO, reward=ZERO, terminated=FLAG, truncated=FLAG)
EXAMPLE = jax.tree.map(lambda leaf: leaf[0], STEP)
KEY = jax.random.key(0)
INDEX = jr.types.Index(row=jnp.zeros(8, jnp.int32), lap=jnp.zeros(8, jnp.uint32))
ROWS = jnp.arange(8)


def uniform(**changes):
    return jr.uniform(**{**SHARED, "autoreset": "next_step", **changes})


METHODS = {
    "add": lambda replay, state: replay.add(state, STEP),
    "extend": lambda replay, state: replay.extend(
        state, jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), STEP)
    ),
    "sample": lambda replay, state: replay.sample(state, KEY),
    "get": lambda replay, state: replay.get(state, ROWS),
    "update_priorities": lambda replay, state: replay.update_priorities(state, INDEX, jnp.ones(8)),
    "metrics": lambda replay, state: replay.metrics(state),
    "size": lambda replay, state: replay.size(state),
    "can_sample": lambda replay, state: replay.can_sample(state),
    "age": lambda replay, state: replay.age(state, INDEX),
    "clear": lambda replay, state: replay.clear(state),
    "episode_table": lambda replay, state: replay.episode_table(state).steps_to_end(ROWS),
    "rerank": lambda replay, state: replay.rerank(state),
    "pop": lambda replay, state: replay.pop(state, KEY),
    "can_add": lambda replay, state: replay.can_add(state),
}


def buffer_for(method, **sizes):
    """Return a buffer that has the method."""
    made = {**SHARED, "autoreset": "next_step", "track_episodes": True, **sizes}
    if method in ("pop", "can_add"):
        return jr.transitions(**made, sampler=jr.Queue())
    if method == "rerank":
        return jr.transitions(**made, sampler=jr.RankBased())
    return jr.prioritized(**made, normalize_weights="buffer")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_refuses_a_state_of_another_capacity(method):
    small, large = buffer_for(method), buffer_for(method, capacity=128)
    call, state = METHODS[method], small.init(EXAMPLE)
    jax.eval_shape(call, small, state)
    for run in (call, jax.jit(call, static_argnums=0)):
        with pytest.raises(
            ValueError,
            match=r"this state is not of this buffer: (.|\n)*length: the state's is 32, this "
            r"buffer's 64",
        ):
            run(large, state)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_step": 3}, "after: the state's is 3, this buffer's 1"),
        (
            {"autoreset": "same_step_no_final_obs"},
            "autoreset: the state's is 'same_step_no_final_obs', this buffer's 'next_step'",
        ),
        ({"num_envs": 4}, "num_envs: the state's is 4, this buffer's 2"),
        ({"allow_mask": True}, "allow_mask: the state's is True, this buffer's False"),
    ],
)
def test_what_differs_is_named_though_all_shapes_be_alike(change, named):
    state = uniform(**change).init(EXAMPLE)
    with pytest.raises(
        ValueError,
        match="sample: this state is not of this buffer: it was made with another "
        f"configuration(.|\n)*{named}",
    ):
        uniform().sample(state, KEY)


@pytest.mark.parametrize("sampler", [jr.Prioritized, jr.RankBased])
def test_priorities_under_another_alpha_are_not_read(sampler):
    """States store priority ** alpha, which does not reveal alpha."""
    one, other = (
        jr.transitions(**SHARED, autoreset="next_step", sampler=sampler(alpha=alpha))
        for alpha in (4.0, 0.0)
    )
    state = one.init(EXAMPLE)
    for run in (
        METHODS["sample"],
        METHODS["update_priorities"],
        jax.jit(METHODS["sample"], static_argnums=0),
    ):
        with pytest.raises(
            ValueError,
            match=r"this state is not of this buffer(.|\n)*alpha: the state's is 4.0, this "
            r"buffer's 0.0",
        ):
            run(other, state)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_a_state_of_numpy_arrays(method):
    """`jax.device_get` and `flax.serialization.from_bytes` return such states."""
    replay, call = buffer_for(method), METHODS[method]
    state = jax.jit(METHODS["extend"], static_argnums=0)(replay, replay.init(EXAMPLE))
    on_host = jax.device_get(state)
    if method == "sample":
        on_host = flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))
    wanted = jax.tree.leaves(jax.jit(call, static_argnums=0)(replay, state))
    for leaf, expected in zip(jax.tree.leaves(call(replay, on_host)), wanted, strict=True):
        assert isinstance(leaf, jax.Array)
        np.testing.assert_array_equal(leaf, expected)
    if method in ("add", "update_priorities", "sample"):
        np.testing.assert_array_equal(jax.tree.leaves(call(jr.jit(replay), on_host))[0], wanted[0])


def test_a_rollout_takes_a_state_of_numpy_arrays():
    rollout = jr.rollout(length=4, num_envs=2, autoreset="next_step")
    state = rollout.add(rollout.init(EXAMPLE), STEP)
    values = jnp.zeros((4, 2)), jnp.zeros(2)
    for call in (
        rollout.steps,
        rollout.clear,
        lambda s: rollout.add(s, STEP),
        lambda s: rollout.bootstrap(s, *values),
        rollout.can_add,
    ):
        for leaf, expected in zip(
            *(jax.tree.leaves(call(one)) for one in (jax.device_get(state), state)), strict=True
        ):
            assert isinstance(leaf, jax.Array)
            np.testing.assert_array_equal(leaf, expected)


def test_an_extend_by_a_buffer_of_another_capacity_pairs_no_wrong_rows():
    """Restoring with another library into a changed configuration keeps the old state's arrays."""
    small, large = (uniform(capacity=capacity) for capacity in (64, 128))
    state = flax.serialization.from_bytes(
        large.init(EXAMPLE), flax.serialization.to_bytes(small.init(EXAMPLE))
    )
    with pytest.raises(
        ValueError,
        match=r"extend: .*: its stored steps have 64 rows, but the buffer has capacity=128",
    ):
        METHODS["extend"](large, state)
    other = flax.serialization.from_bytes(
        uniform(n_step=2).init(EXAMPLE),
        flax.serialization.to_bytes(uniform(n_step=2).init(EXAMPLE)),
    )
    jax.jit(METHODS["extend"], static_argnums=0)(uniform(n_step=2), other)


@pytest.mark.parametrize(
    ("sampler", "named"),
    [
        (jr.Uniform(), "alpha: the state's is None, this buffer's 0.6"),
        (
            jr.Prioritized(fan_out=4),
            r"sampler.tree.sums.1: got float32\[16\], expected float32\[8\]",
        ),
        (jr.Prioritized(normalize_weights="buffer"), "sampler.tree.minima.0: unexpected"),
        (jr.RankBased(alpha=0.6), "sampler.priority: unexpected"),
        (jr.RankBased(), "alpha: the state's is 0.7, this buffer's 0.6"),
        (jr.Prioritized(alpha=1.0), "alpha: the state's is 1.0, this buffer's 0.6"),
    ],
)
def test_a_state_of_another_sampler_is_refused(sampler, named):
    replay = jr.transitions(**SHARED, autoreset="next_step", sampler=jr.Prioritized())
    state = dataclasses.replace(replay, sampler=sampler).init(EXAMPLE)
    with pytest.raises(ValueError, match=f"size: this state is not of this buffer: (.|\n)*{named}"):
        replay.size(state)


def test_what_does_not_change_a_state_s_meaning_may_differ():
    state = uniform().init(EXAMPLE)
    for other in (
        uniform(batch_size=3, min_size=2, gamma=0.5),
        dataclasses.replace(uniform(), sampler=jr.Recent(decay=0.5)),
    ):
        assert jax.eval_shape(other.sample, state, KEY).is_valid.shape == (other.batch_size,)


def test_a_leaf_of_another_shape_or_dtype_is_named():
    replay = uniform()
    state = replay.init(EXAMPLE)
    steps = state.streams.steps
    for streams, named in (
        (
            state.streams.replace(flags=jnp.zeros(64, jnp.int32)),
            r"streams.flags: got int32\[64\], expected uint8\[64\]",
        ),
        (
            state.streams.replace(stored_counters=jnp.zeros((5, 5), jnp.uint32)),
            r"streams.stored_counters: got uint32\[5, 5\], expected uint32\[6, 2\]",
        ),
        (
            state.streams.replace(steps=steps.replace(reward=jnp.zeros(32))),
            "its stored steps have 32 and 64 rows",
        ),
        (
            state.streams.replace(steps=steps.replace(reward=jnp.zeros(()))),
            "its stored steps have none and 64 rows",
        ),
    ):
        with pytest.raises(ValueError, match=named):
            replay.add(state.replace(streams=streams), STEP)


def test_what_is_no_state_is_refused():
    replay = uniform()
    state = replay.init(EXAMPLE)
    for wrong, named in (
        ((state, KEY), "a tuple of 2"),
        (None, "a NoneType"),
        (STEP, "a Step"),
        ({"replay": state}, "a dict of 1"),
    ):
        with pytest.raises(
            ValueError,
            match=f"sample: the state must be a ReplayState, .*, got {named}; the state comes "
            "first",
        ):
            replay.sample(wrong, KEY)


@pytest.mark.parametrize("case", CATALOG, ids=lambda case: case.name)
def test_states_of_every_buffer_are_their_own(case):
    """A buffer accepts its state alone, in a vmap, and under eval_shape; buffers of items and of
    steps refuse each other's."""
    replay = case.replay()
    state = case.filled(replay)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    np.testing.assert_array_equal(jax.vmap(replay.size)(stacked), [int(replay.size(state))] * 2)
    jax.eval_shape(functools.partial(replay.add, mask=None), state, case.step())
    for other in CATALOG:
        if other.is_items != case.is_items:
            with pytest.raises(ValueError, match="this state is not of this buffer"):
                other.replay().can_sample(state)


def test_a_state_that_was_handed_over_says_so():
    replay = jr.prioritized(**SHARED, autoreset="next_step")
    buffer = jr.jit(replay)
    state = buffer.init(EXAMPLE)
    buffer.add(state, STEP)
    names = (
        "add",
        "extend",
        "sample",
        "get",
        "update_priorities",
        "size",
        "can_sample",
        "age",
        "clear",
    )
    for which in (replay, buffer):
        for name in names:
            with pytest.raises(
                ValueError,
                match=f"{name}: this state was donated to an earlier call, .*Use that one: state =",
            ):
                METHODS[name](which, state)
    mixture = jr.mix(a=(replay, 4))
    with pytest.raises(ValueError, match="sample: this state was donated to an earlier call"):
        jr.jit(mixture).sample({"a": state}, KEY)


def test_a_state_of_another_rollout_is_refused():
    steps = jax.tree.map(lambda leaf: leaf[None], STEP)
    rollout, longer = (
        jr.rollout(length=length, num_envs=2, autoreset="same_step_no_final_obs")
        for length in (4, 8)
    )
    state = rollout.init(EXAMPLE)
    for call in (
        longer.steps,
        longer.clear,
        lambda s: longer.add(s, STEP),
        lambda s: longer.extend(s, steps),
    ):
        with pytest.raises(
            ValueError,
            match=r"(?s)steps.obs: got float32\[4, 2, 3\], expected float32\[8, 2, 3\].*not of "
            r"this rollout",
        ):
            call(state)
    with pytest.raises(ValueError, match=r"last: unexpected"):
        rollout.add(jr.rollout(length=4, num_envs=2, autoreset="next_step").init(EXAMPLE), STEP)
    with pytest.raises(
        ValueError,
        match="add: the state must be a RolloutState, as init and add return it, got a Step",
    ):
        rollout.add(STEP, state)
    buffer = jr.jit(rollout)
    buffer.add(state, STEP)
    with pytest.raises(ValueError, match="extend: this state was donated to an earlier call"):
        buffer.extend(state, steps)


def test_an_error_of_another_kind_stays_what_it_is():
    buffer = jr.jit(uniform())
    with pytest.raises(ValueError, match="add: a step must be"):
        buffer.add(buffer.init(EXAMPLE), [1, 2])
