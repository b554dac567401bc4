"""Brax's interface over our storage, beside a list. `make compat` runs Brax's own tests over it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreplay.compat import brax
from tests.support.hlo import check_in_place

KEY = jax.random.key(0)
EXAMPLE = {"name": 0, "frame": np.zeros((4, 4), np.uint8)}


def rows(first, num_rows):
    name = jnp.arange(first, first + num_rows)
    return {"name": name, "frame": jnp.ones((num_rows, 4, 4), jnp.uint8)}


@pytest.mark.parametrize("kind", ["uniform", "queue", "cyclic"])
@pytest.mark.parametrize(("size", "batch_size"), [(10, 3), (7, 7), (1, 1)])
def test_rows_are_those_of_a_list(kind, size, batch_size):
    make = brax.UniformSamplingQueue if kind == "uniform" else brax.Queue
    options = {"cyclic": True} if kind == "cyclic" else {}
    buffer = make(size, EXAMPLE, batch_size, **options)
    state, stored, first, written = buffer.init(KEY), [], 0, 0
    insert, sample = jax.jit(buffer.insert), jax.jit(buffer.sample)
    for num_rows in (1, 2, 1, 7, 3, 5, 1, 1, 6):
        num_rows = min(num_rows, size)
        state = insert(state, rows(written, num_rows))
        stored += range(written, written + num_rows)
        written += num_rows
        lost = max(len(stored) - size, 0)
        stored, first = stored[lost:], max(first - lost, 0)
        assert state.insert_position == len(stored)
        assert state.data.shape == (size, 17)
        assert state.data[: len(stored), -1].tolist() == stored
        if kind == "queue" and len(stored) - first < batch_size:
            with pytest.raises(ValueError, match=f"only {len(stored) - first} available"):
                buffer.sample(state)
            continue
        if kind == "cyclic" and len(stored) < batch_size:
            continue
        state, batch = sample(state)
        assert batch["frame"].shape == (batch_size, 4, 4)
        assert batch["frame"].dtype == jnp.uint8
        got = batch["name"].tolist()
        if kind == "uniform":
            assert set(got) <= set(stored)
            assert buffer.size(state) == len(stored)
            continue
        assert got == (stored * 2)[first : first + batch_size]
        first += batch_size
        first = first % len(stored) if kind == "cyclic" else first
        assert state.sample_position == first
        assert buffer.size(state) == len(stored) - (0 if kind == "cyclic" else first)


def test_uniform_samples_are_uniform_and_keys_go_on():
    buffer = brax.UniformSamplingQueue(50, jnp.int32(0), 10_000)
    state = buffer.insert(buffer.init(KEY), jnp.arange(40))
    state, first = buffer.sample(buffer.insert(state, jnp.arange(40, 70)))
    state, second = buffer.sample(state)
    assert (first != second).any()
    counts = np.bincount(np.asarray(first), minlength=70)
    assert (counts[:20] == 0).all()
    assert abs(counts[20:] - 200).max() < 75  # 5 standard deviations


@pytest.mark.parametrize("kind", ["uniform", "queue"])
def test_an_empty_buffer_under_jit_has_no_error(kind):
    """As Brax's: nothing can be raised there. A queue never has a negative size."""
    buffer = {"uniform": brax.UniformSamplingQueue, "queue": brax.Queue}[kind](5, EXAMPLE, 3)
    state, batch = jax.jit(buffer.sample)(buffer.init(KEY))
    assert (batch["name"] == 0).all()
    state = buffer.insert(state, rows(5, 2))
    state, batch = jax.jit(buffer.sample)(state)
    assert set(batch["name"].tolist()) <= {5, 6}
    assert buffer.size(state) == (2 if kind == "uniform" else 0)


@pytest.mark.parametrize(("size", "num_envs", "span"), [(12, 3, 4), (5, 1, 5), (6, 4, 1)])
def test_jaxgcrls_sequences(size, num_envs, span):
    """One sequence of each env, of steps that follow each other and are all stored."""
    buffer = brax.TrajectoryUniformSamplingQueue(size, {"name": 0}, 7, num_envs, span)
    state, written, starts = buffer.init(KEY), 0, set()
    insert, sample = jax.jit(buffer.insert), jax.jit(buffer.sample)
    for time in (5, 3, size, 1, 2):
        time = min(time, size)
        names = (written + jnp.arange(time))[:, None] + 1000 * jnp.arange(num_envs)
        state, written = insert(state, {"name": names}), written + time
        assert buffer.size(state) == min(written, size)
        if written < span:
            continue
        for _ in range(20):
            state, batch = sample(state)
            env, when = np.divmod(np.asarray(batch["name"]), 1000)
            assert when.shape == (num_envs, span)
            assert sorted(env[:, 0]) == list(range(num_envs))
            assert (env == env[:, :1]).all()
            assert (np.diff(when, axis=1) == 1).all()
            assert when.min() >= written - size
            assert when.max() < written
            starts |= set((when[:, 0] - max(written - size, 0)).tolist())
    assert starts == set(range(size - span + 1))


@pytest.mark.parametrize("kind", [brax.UniformSamplingQueue, brax.Queue])
def test_everything_is_in_place(kind):
    """Brax's own moves all rows with each insert into a full buffer."""
    size = 1 << 17
    buffer = kind(size, EXAMPLE, 8)
    state = buffer.init(KEY)
    block = rows(0, 8)
    check_in_place(buffer.insert, (state, block), num_elements=size, donated=0)

    def train(state, _):
        state, batch = buffer.sample(buffer.insert(state, block))
        return state, batch

    check_in_place(
        lambda state: jax.lax.scan(train, state, length=5),
        (state,),
        num_elements=size,
        donated=0,
    )


def test_sacs_training_step():
    """Insert and sample under `pmap`, as Brax's SAC does, a scan of updates within."""
    buffer = brax.UniformSamplingQueue(64, {"reward": 0.0}, 32)

    @functools.partial(jax.pmap, axis_name="i")
    def training_step(state, reward):
        state = buffer.insert(state, {"reward": reward})
        state, transitions = buffer.sample(state)
        minibatches = jax.tree.map(lambda leaf: leaf.reshape(4, -1), transitions)
        _, means = jax.lax.scan(lambda carry, one: (carry, one["reward"].mean()), None, minibatches)
        return state, jax.lax.pmean(means.mean(), "i"), jax.lax.psum(buffer.size(state), "i")

    state = jax.pmap(buffer.init)(jax.random.split(KEY, 1))
    for turn in range(1, 5):
        state, mean, size = training_step(state, jnp.ones((1, 20)))
        assert (mean[0], size[0]) == (1.0, min(20 * turn, 64))


@pytest.mark.parametrize("is_pmapped", [False, True])
def test_wrappers_deal_rows_to_devices(is_pmapped):
    inner = brax.Queue(8, {"name": 0}, 4)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    buffer = brax.PmapWrapper(inner, 1) if is_pmapped else brax.PjitWrapper(inner, mesh, ("x",))
    state = buffer.insert(buffer.init(KEY), {"name": jnp.arange(6)})
    assert buffer.size(state) == 6
    state, batch = buffer.sample(state)
    assert batch["name"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="only 2 available"):
        buffer.sample(state)
    with pytest.raises(ValueError, match="got 9 rows, but the maximum replay size is 8"):
        buffer.insert(state, {"name": jnp.arange(9)})


def test_a_bad_call_says_why():
    with pytest.raises(ValueError, match="Queue: max_replay_size must be an int of at least 1"):
        brax.Queue(0, EXAMPLE, 1)
    with pytest.raises(ValueError, match="episode_length=9 exceeds max_replay_size=8"):
        brax.TrajectoryUniformSamplingQueue(8, EXAMPLE, 1, 2, 9)
    buffer = brax.Queue(8, EXAMPLE, 1)
    with pytest.raises(ValueError, match=r"(?s)insert:.*name: missing"):
        buffer.insert(buffer.init(KEY), {})
    with pytest.raises(ValueError, match=r"(?s)name: got float32\[1\], expected int32\[1\]"):
        buffer.insert(buffer.init(KEY), {**rows(0, 1), "name": jnp.zeros(1)})
