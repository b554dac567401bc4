"""Ragged trajectories in one stream: their rows, learning as from each alone, and the cost."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

import jaxreplay as jr
from jaxreplay import Rollout
from tests.conftest import ALL, SOAK
from tests.support.compilations import count_programs
from tests.support.replays import output_of

LENGTH = 40
# Bytes of a row of `trajectory_of`: obs, action, reward, flags, extras and the mask
ROW_BYTES = 8 + 4 + 4 + 1 + 1 + 4 + 1
ROLLOUT = Rollout(length=LENGTH, num_envs=1, autoreset="next_step")
DISCOUNT, DECAY = 0.9, 0.7


def trajectory_of(num_steps, end="", final=True, seed=0):
    """Return a random trajectory, where the first number of an observation is its value.

    `end` is "T" if it is terminated, "C" if truncated, "TC" if both, "" if the worker cut it.
    """
    r = np.random.default_rng(seed)
    flags = np.zeros((2, num_steps), bool)
    flags[:, -1:] = [["T" in end], ["C" in end]]
    rows = num_steps + final
    return {
        "obs": {"x": r.normal(size=(rows, 2)).astype(np.float32)},
        "action": r.integers(0, 9, num_steps),  # int64, NumPy's default
        "reward": r.normal(size=num_steps),  # float64
        "terminated": flags[0],
        "truncated": flags[1],
        "extras": r.normal(size=rows if seed % 2 else num_steps).astype(np.float32),
    }


def example_of(trajectory):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), trajectory)


# A compiled `init`; outside of `jit` each array is a program.
init = jax.jit(lambda: ROLLOUT.init(example_of(trajectory_of(3))))


def written(many, state=None, chunk_rows=7):
    """Return the state after some trajectories were written, as NumPy arrays."""
    state = init() if state is None else state
    return jax.device_get(
        ROLLOUT.from_trajectories(state, many, chunk_bytes=chunk_rows * ROW_BYTES)
    )


def expected_rows(trajectory):
    """Return (obs, reward, terminated, truncated, mask, extras) of each row of a trajectory."""
    x, reward, extras = trajectory["obs"]["x"], trajectory["reward"], trajectory["extras"]
    num_steps, terminated = len(reward), bool(trajectory["terminated"][-1:].any())
    # Without a final observation, the last observation becomes the final row; its step is dropped.
    if len(x) == num_steps and not terminated:
        num_steps -= 1
    rows = [[x[t], reward[t], False, False, True, extras[t]] for t in range(num_steps)]
    if rows:
        rows[-1][2:4] = [terminated, bool(trajectory["truncated"][-1:].any()) or not terminated]
        if len(x) > num_steps:
            final_extras = extras[num_steps] if len(extras) > num_steps else 0.0
            rows.append([x[num_steps], None, False, False, False, final_extras])
    return rows


ragged = st.lists(
    st.tuples(
        st.integers(0, 9), st.sampled_from(["", "T", "C", "TC"]), st.booleans(), st.integers(0, 99)
    ),
    max_size=4,
).map(lambda many: [trajectory_of(*one) for one in many])


@jax.jit
def learn(state):
    value = ROLLOUT.steps(state).obs["x"][..., 0]
    found, _ = ROLLOUT.advantages(state, value, jnp.zeros(1), gamma=DISCOUNT, lambda_=DECAY)
    return found.advantage[:, 0]


# A program for each size of a chunk.
chunks = st.integers(1, 45) if ALL else st.sampled_from((1, 7, 45))


@settings(max_examples=400 if SOAK else 60)
@example([], 7)
@example(
    [trajectory_of(0), trajectory_of(0, "", False), trajectory_of(1, "C", False)], 7
)  # no rows
@given(ragged, chunks)
def test_each_trajectory_is_its_steps_and_its_final_observation(many, chunk_rows):
    """Learning is as from each trajectory alone."""
    state = written(many, chunk_rows=chunk_rows)
    expected = [row for trajectory in many for row in expected_rows(trajectory)]
    steps, advantage, later = state.steps, learn(state), 0.0
    assert state.position == len(expected)
    assert state.mask[:, 0].tolist() == [row[4] for row in expected] + [False] * (
        LENGTH - len(expected)
    )
    for t, (x, reward, terminated, truncated, is_step, extras) in reversed([*enumerate(expected)]):
        np.testing.assert_array_equal(steps.obs["x"][t, 0], x)
        assert (steps.terminated[t, 0], steps.truncated[t, 0]) == (terminated, truncated)
        assert steps.extras[t, 0] == np.float32(extras)
        if is_step:
            assert steps.reward[t, 0] == np.float32(reward)
            beyond = 0.0 if terminated else float(expected[t + 1][0][0])
            later *= DISCOUNT * DECAY * (not terminated and not truncated)
            later += reward + DISCOUNT * beyond - float(x[0])
            np.testing.assert_allclose(advantage[t], later, atol=1e-4)


def test_a_second_batch_takes_the_place_of_the_first():
    state = written([trajectory_of(20, seed=3), trajectory_of(15)])
    assert written(iter([])).position == 0
    state = written([trajectory_of(4, "T", final=False)], state)
    assert state.mask[:, 0].tolist() == [True] * 4 + [False] * 36
    # The next added step begins an episode: it is not taken for a final observation.
    step = jax.tree.map(lambda x: x[:1], jr.Step(**trajectory_of(1)))
    mask = np.asarray(jr.jit(ROLLOUT).add(state, step).mask)
    assert mask[:6, 0].tolist() == [True] * 5 + [False]


def test_the_longest_that_fits_fits():
    # A Step, JAX arrays and a generator are taken, too.
    second = jr.Step(**jax.tree.map(jax.device_put, trajectory_of(10, "T")))
    many = [trajectory_of(LENGTH - 12, seed=5), second]
    assert written(one for one in many).position == LENGTH


def test_every_dtype_is_kept():
    names = [
        "bool",
        "uint8",
        "int16",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "int4",
        "float4_e2m1fn",
    ]
    values = np.random.default_rng(0).integers(0, 3, (len(names), 9, 2))
    obs = {name: x.astype(jnp.dtype(name)) for name, x in zip(names, values, strict=True)}
    trajectory = {**trajectory_of(9, "T"), "obs": obs}
    state = jax.jit(lambda: ROLLOUT.init(example_of(trajectory)))()
    state = ROLLOUT.from_trajectories(state, [trajectory] * 2, chunk_bytes=200)
    for name, leaf in jax.device_get(jax.jit(ROLLOUT.steps)(state)).obs.items():
        assert leaf.dtype.name == name
        np.testing.assert_array_equal(leaf[9:18, 0].astype(float), obs[name].astype(float))


def test_one_compilation_serves_all_lengths():
    with count_programs("_write_chunk") as compiled:
        for lengths in ((30,), (1, 2, 3), (17, 0, 9, 5), ()):
            written([trajectory_of(n, seed=n) for n in lengths], chunk_rows=9)
    assert compiled() == 1


def test_rows_are_copied_into_the_memory_of_the_old_state():
    """A backend may read an aligned array in place after the call has returned: a chunk is filled
    again, or an array changed by its owner, only after that."""
    many = [
        {
            **trajectory_of(n, "T", final=False),
            "obs": np.random.default_rng(n).random((n, 256), np.float32),
        }
        for n in (9_000, 1, 11_000)
    ]
    rollout = Rollout(length=20_001, num_envs=1, autoreset="next_step")
    state = rollout.init(example_of(many[0]))
    expected = np.concatenate([one["obs"] for one in many])
    arrays = lambda: jax.tree.leaves((state.steps, state.mask))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in arrays()]
    for _ in range(3):
        old = arrays()
        state = rollout.from_trajectories(state, many, chunk_bytes=1 << 20)
        assert all(leaf.is_deleted() for leaf in old)
        assert [leaf.unsafe_buffer_pointer() for leaf in arrays()] == pointers
        np.testing.assert_array_equal(np.asarray(state.steps.obs)[:, 0], expected)
    many[0]["obs"][:] = -1
    np.testing.assert_array_equal(np.asarray(state.steps.obs)[:, 0], expected)


def test_of_a_bad_trajectory_nothing_is_written():
    state, bad = init(), {**trajectory_of(5), "truncated": np.zeros(5)}
    with pytest.raises(ValueError, match="trajectory 1:\n  truncated: got float32"):
        ROLLOUT.from_trajectories(state, [trajectory_of(5), bad])
    assert not np.asarray(state.mask).any()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


MEASURE = """
import json, re, sys
import jax, numpy as np
from jaxreplay import Rollout

total_bytes, chunk_bytes = int(sys.argv[1]), int(sys.argv[2])
WIDTH = 64
row_bytes = 4 * WIDTH + 4 + 4 + 1 + 1 + 1
weight = np.random.default_rng(0).uniform(0.1, 2, 64)
lengths = (weight / weight.sum() * total_bytes / row_bytes).astype(int)

def trajectory(n, seed):
    flags = np.zeros((2, n), bool)
    obs, action = np.full((n + 1, WIDTH), seed, np.float32), np.full(n, seed, np.int32)
    return {"obs": obs, "action": action, "reward": np.ones(n, np.float32),
            "terminated": flags[0], "truncated": flags[1]}

def process(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

many = [trajectory(n, seed) for seed, n in enumerate(lengths)]
rollout = Rollout(length=int(lengths.sum()) + 64, num_envs=1, autoreset="next_step")
state = rollout.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), many[0]))
# compiles, and touches the first pages
state = rollout.from_trajectories(state, [trajectory(3, 0)], chunk_bytes=chunk_bytes)
state = rollout.from_trajectories(state, many, chunk_bytes=chunk_bytes)
start = np.cumsum([0, *(lengths[:-1] + 1)])
firsts, lasts = state.steps.obs[start, 0, 0], state.steps.action[start + lengths - 1, 0]
correct = bool((firsts == np.arange(64)).all() & (lasts == np.arange(64)).all())

device = jax.devices()[0].memory_stats()
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark begins anew
before = process("VmRSS")
state = jax.block_until_ready(rollout.from_trajectories(state, many, chunk_bytes=chunk_bytes))
extra = process("VmHWM") - before
taken = rollout.memory(jax.tree.map(lambda x: x[0], many[0])).total
on_device = device and device["peak_bytes_in_use"] - taken
figures = {"extra": extra, "on_device": on_device, "correct": correct}
print(json.dumps({**figures, "rows": int(lengths.sum())}))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the high-water mark of a process is Linux's"
)
def test_it_takes_one_chunk_of_memory():
    total_bytes, chunk_bytes = (10**9, 2**26) if SOAK else (10**8, 2**24)
    figures = json.loads(output_of(MEASURE, str(total_bytes), str(chunk_bytes)))
    assert figures["correct"]
    assert figures["extra"] <= 1.05 * chunk_bytes, figures
    assert figures["on_device"] is None or figures["on_device"] <= 1.05 * chunk_bytes, figures
