"""Ragged trajectories in one stream: their rows, learning as from each alone, and the cost."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxreplay as jr
from jaxreplay import Rollout, gae
from jaxreplay.buffers import trajectories
from tests.conftest import SOAK

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


def empty():
    return ROLLOUT.init(example_of(trajectory_of(3)))


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
            rows.append(
                [
                    x[num_steps],
                    None,
                    False,
                    False,
                    False,
                    extras[num_steps] if len(extras) > num_steps else 0.0,
                ]
            )
    return rows


ragged = st.lists(
    st.tuples(
        st.integers(0, 9), st.sampled_from(["", "T", "C", "TC"]), st.booleans(), st.integers(0, 99)
    ),
    max_size=4,
).map(lambda many: [trajectory_of(*one) for one in many])


@settings(max_examples=400 if SOAK else 60)
@given(ragged, st.integers(1, 45))
def test_each_trajectory_is_its_steps_and_its_final_observation(many, chunk_rows):
    state = ROLLOUT.from_trajectories(empty(), many, chunk_bytes=chunk_rows * ROW_BYTES)
    expected = [row for trajectory in many for row in expected_rows(trajectory)]
    steps = ROLLOUT.steps(state)
    assert int(state.position) == len(expected)
    assert state.mask[:, 0].tolist() == [row[4] for row in expected] + [False] * (
        LENGTH - len(expected)
    )
    for t, (x, reward, terminated, truncated, _, extras) in enumerate(expected):
        np.testing.assert_array_equal(steps.obs["x"][t, 0], x)
        assert (bool(steps.terminated[t, 0]), bool(steps.truncated[t, 0])) == (
            terminated,
            truncated,
        )
        assert float(steps.extras[t, 0]) == np.float32(extras)
        assert reward is None or float(steps.reward[t, 0]) == np.float32(reward)
    assert int(ROLLOUT.num_steps(state)) == sum(row[4] for row in expected)


@jax.jit
def learn(state):
    steps = ROLLOUT.steps(state)
    value = steps.obs["x"][..., 0]
    next_value, mask = ROLLOUT.bootstrap(state, value, jnp.zeros(1))
    return gae(
        steps.reward,
        value,
        next_value,
        terminated=steps.terminated,
        truncated=steps.truncated,
        gamma=DISCOUNT,
        lambda_=DECAY,
        mask=mask,
    ).advantage


@settings(max_examples=400 if SOAK else 40)
@given(ragged)
def test_advantages_are_those_of_each_trajectory_alone(many):
    state = ROLLOUT.from_trajectories(empty(), many, chunk_bytes=7 * ROW_BYTES)
    expected = []
    for trajectory in many:
        value, reward = trajectory["obs"]["x"][:, 0].astype(float), trajectory["reward"]
        terminated = bool(trajectory["terminated"][-1:].any())
        num_steps = len(reward) if len(value) > len(reward) or terminated else len(reward) - 1
        later, backwards = 0.0, []
        for t in reversed(range(num_steps)):
            beyond = 0.0 if terminated and t == len(reward) - 1 else value[t + 1]
            later = reward[t] + DISCOUNT * beyond - value[t] + DISCOUNT * DECAY * later
            backwards.append(later)
        expected += backwards[::-1]
    np.testing.assert_allclose(
        np.asarray(learn(state))[np.asarray(state.mask)], expected, atol=1e-4
    )


def test_nothing_and_trajectories_without_a_step_leave_no_row():
    for many in (
        [],
        iter([]),
        [trajectory_of(0)],
        [trajectory_of(0, final=False)],
        [trajectory_of(1, "C", final=False)],
    ):
        state = ROLLOUT.from_trajectories(empty(), many)
        assert (int(state.position), int(ROLLOUT.num_steps(state))) == (0, 0)


def test_a_second_batch_takes_the_place_of_the_first():
    state = ROLLOUT.from_trajectories(
        empty(), [trajectory_of(20, seed=3), trajectory_of(15)], chunk_bytes=100
    )
    state = ROLLOUT.from_trajectories(state, [trajectory_of(4, "T", final=False)], chunk_bytes=100)
    assert state.mask[:, 0].tolist() == [True] * 4 + [False] * 36
    # The next added step begins an episode: it is not taken for a final observation.
    step = jax.tree.map(lambda x: jnp.asarray(x[0], jnp.asarray(x).dtype)[None], trajectory_of(1))
    assert ROLLOUT.add(state, step).mask[:6, 0].tolist() == [True] * 5 + [False]


def test_the_longest_that_fits_fits():
    many = [trajectory_of(LENGTH - 12, seed=5), trajectory_of(10, "T")]
    state = ROLLOUT.from_trajectories(empty(), many, chunk_bytes=7 * ROW_BYTES)
    assert int(state.position) == LENGTH
    with pytest.raises(
        ValueError,
        match=r"trajectory 1: does not fit: with it there are 41 rows, final observations "
        r"included, .*length=40",
    ):
        ROLLOUT.from_trajectories(state, [many[0], trajectory_of(11)])


def test_every_dtype_is_kept():
    dtypes = (
        np.bool_,
        np.uint8,
        np.int16,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.int4,
        ml_dtypes.float4_e2m1fn,
    )
    values = np.random.default_rng(0).integers(0, 3, (len(dtypes), 9, 2))
    obs = {np.dtype(dtype).name: x.astype(dtype) for dtype, x in zip(dtypes, values, strict=True)}
    trajectory = {**trajectory_of(9, "T"), "obs": obs}
    state = ROLLOUT.from_trajectories(
        ROLLOUT.init(example_of(trajectory)), [trajectory] * 2, chunk_bytes=200
    )
    for name, leaf in ROLLOUT.steps(state).obs.items():
        assert leaf.dtype.name == name
        np.testing.assert_array_equal(
            np.asarray(leaf[9:18, 0]).astype(float), obs[name].astype(float)
        )


def test_one_compilation_serves_all_lengths():
    rollout = Rollout(length=333, num_envs=1, autoreset="next_step")
    before = trajectories._write_chunk._cache_size()
    for lengths in ((300,), (1, 2, 3), (17, 0, 90, 5), ()):
        state = rollout.init(example_of(trajectory_of(3)))
        rollout.from_trajectories(
            state, [trajectory_of(n, seed=n) for n in lengths], chunk_bytes=50 * ROW_BYTES
        )
    assert trajectories._write_chunk._cache_size() == before + 1


def test_the_state_is_taken_over_and_reused_and_the_arrays_are_not():
    rollout = Rollout(length=4096, num_envs=1, autoreset="next_step")
    state, trajectory = rollout.init(example_of(trajectory_of(3))), trajectory_of(4000)
    old = jax.tree.leaves((state.steps, state.mask))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in old]
    state = rollout.from_trajectories(state, [trajectory], chunk_bytes=1 << 14)
    held = np.asarray(rollout.steps(state).obs["x"][:4001, 0]).copy()
    trajectory["obs"]["x"][:] = -1
    np.testing.assert_array_equal(np.asarray(rollout.steps(state).obs["x"][:4001, 0]), held)
    assert all(leaf.is_deleted() for leaf in old)
    assert [
        leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state.steps, state.mask))
    ] == pointers


def test_a_chunk_is_not_filled_again_while_it_is_being_read():
    """A backend may read an aligned array in place after the call has returned."""
    many = [
        {
            **trajectory_of(n, "T", final=False),
            "obs": np.random.default_rng(n).random((n, 256), np.float32),
        }
        for n in (9_000, 1, 11_000)
    ]
    rollout = Rollout(length=20_001, num_envs=1, autoreset="next_step")
    for _ in range(3):
        state = rollout.from_trajectories(
            rollout.init(example_of(many[0])), many, chunk_bytes=1 << 20
        )
        np.testing.assert_array_equal(
            np.asarray(state.steps.obs[:, 0]), np.concatenate([one["obs"] for one in many])
        )


def test_steps_jax_arrays_and_generators_are_taken_too():
    step = jr.Step(**jax.tree.map(jnp.asarray, trajectory_of(3, "T")))
    state = ROLLOUT.from_trajectories(empty(), (step for _ in range(2)))
    assert int(ROLLOUT.num_steps(state)) == 6


def wrong(**fields):
    return {**trajectory_of(5, "T"), **fields}


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        (
            wrong(reward=np.zeros((5, 1))),
            r"trajectory 1:\n  reward: got float32\[5, 1\], expected float32\[5\]\n.*as many rows "
            r"as reward",
        ),
        (
            wrong(action=np.zeros(4, int)),
            r"trajectory 1:\n  action: got int32\[4\], expected int32\[5\]",
        ),
        (
            wrong(action=np.zeros(6, int)),
            r"trajectory 1:\n  action: got int32\[6\], expected int32\[5\]",
        ),
        (
            wrong(obs={"x": np.zeros((7, 2), np.float32)}),
            r"trajectory 1:\n  obs.x: got float32\[7, 2\], expected float32\[5, 2\]",
        ),
        (
            wrong(obs={"y": np.zeros((5, 2), np.float32)}),
            r"trajectory 1:\n  obs.x: missing, (.|\n)*obs.y: unexpected",
        ),
        (
            wrong(truncated=np.zeros(5)),
            r"trajectory 1:\n  truncated: got float32\[5\], expected bool\[5\]",
        ),
        (wrong(reward=np.float32(1)), r"trajectory 1:\n(.|\n)*reward: got float32\[\]"),
        (wrong(extras=None), r"trajectory 1:\n  extras: missing"),
        (
            wrong(final_obs={"x": np.zeros(2)}),
            r"trajectory 1: has a final_obs; append it to obs instead",
        ),
        (
            wrong(terminated=np.arange(5) == 2),
            r"trajectory 1: terminated is set at step 2, but there are 5 steps",
        ),
        ({"obs": 0}, r"trajectory 1: the step's keys are wrong: missing action, reward"),
        (trajectory_of(60), r"trajectory 1: does not fit: with it there are 67 rows"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(trajectory, message):
    state = empty()
    with pytest.raises(ValueError, match=message):
        ROLLOUT.from_trajectories(state, [trajectory_of(5), trajectory])
    assert not state.mask.any()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_the_wrong_call_is_shown():
    with pytest.raises(
        ValueError, match=r"takes a list of trajectories, got one dict; write \[trajectory\]"
    ):
        ROLLOUT.from_trajectories(empty(), trajectory_of(3))
    with pytest.raises(
        ValueError,
        match=r"needs a rollout of one env, got num_envs=2, autoreset='same_step'; make it "
        r"with num_envs=1",
    ):
        Rollout(length=4, num_envs=2, autoreset="same_step").from_trajectories(empty(), [])
    with pytest.raises(ValueError, match="call it outside of jit"):
        jax.jit(lambda state: ROLLOUT.from_trajectories(state, [trajectory_of(3)]))(empty())
    with pytest.raises(ValueError, match="chunk_bytes must be an int of at least 1, got 0"):
        ROLLOUT.from_trajectories(empty(), [], chunk_bytes=0)


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
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(total_bytes), str(chunk_bytes)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    figures = json.loads(result.stdout)
    assert figures["correct"]
    assert figures["extra"] <= 1.05 * chunk_bytes, figures
    assert figures["on_device"] is None or figures["on_device"] <= 1.05 * chunk_bytes, figures
