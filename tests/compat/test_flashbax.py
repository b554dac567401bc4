"""flashbax's interface over our storage, beside a model of lists. `make compat` runs flashbax's own
tests over it."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay.compat.flashbax as fbx
from tests.support.hlo import check_in_place

KEY = jax.random.key(0)


def steps(first, num_envs, time):
    """Return steps [E, T] that name their env and time."""
    when = first + jnp.arange(time)
    return {
        "name": jnp.arange(num_envs)[:, None] * 10_000 + when,
        "obs": {"x": jnp.ones((num_envs, time, 3))},
    }


EXAMPLE = {"name": jnp.int32(0), "obs": {"x": jnp.zeros(3)}}


@pytest.mark.parametrize("is_prioritised", [False, True])
@pytest.mark.parametrize(
    ("num_envs", "length", "span", "period"),
    [(1, 12, 1, 1), (2, 12, 2, 1), (3, 12, 4, 3), (2, 12, 12, 1), (1, 12, 5, 4), (2, 12, 3, 6)],
)
def test_sequences_are_those_of_a_list(is_prioritised, num_envs, length, span, period):
    """Every sequence that may start is sampled, and no other, through wraps and ragged adds."""
    make = fbx.make_prioritised_trajectory_buffer if is_prioritised else fbx.make_trajectory_buffer
    buffer = make(
        add_batch_size=num_envs,
        sample_batch_size=512,
        sample_sequence_length=span,
        period=period,
        min_length_time_axis=1,
        max_length_time_axis=length,
    )
    state, written = buffer.init(EXAMPLE), 0
    add, sample, can_sample = (
        jax.jit(buffer.add),
        jax.jit(buffer.sample),
        jax.jit(buffer.can_sample),
    )
    assert not can_sample(state)
    for time in (1, 3, 1, 7, 2, 5, 5, 1, 12, 3):
        state, written = add(state, steps(written, num_envs, time)), written + time
        oldest = max(written - length, 0)
        first = -(-oldest // period) * period if is_prioritised else oldest
        starts = set(range(first, written - span + 1, period))
        assert state.current_index == written % length
        assert state.is_full == (written >= length)
        stored = np.asarray(state.experience["name"])[0]
        assert {*range(oldest, written)} <= set(stored.tolist())
        assert bool(can_sample(state)) == bool(starts)
        if not starts:
            continue
        got = np.asarray(sample(state, jax.random.key(written)).experience["name"])
        assert got.shape == (512, span)
        assert (np.diff(got, axis=1) == 1).all()
        env, start = np.divmod(got[:, 0], 10_000)
        assert set(zip(env.tolist(), start.tolist(), strict=True)) == {
            (env, start) for env in range(num_envs) for start in starts
        }


def test_priorities_are_those_that_were_set():
    buffer = fbx.make_prioritised_flat_buffer(
        max_length=64, min_length=1, sample_batch_size=4096, add_batch_size=2, priority_exponent=0.5
    )
    state = buffer.init(EXAMPLE)
    add, sample = jax.jit(buffer.add), jax.jit(buffer.sample)
    set_priorities = jax.jit(buffer.set_priorities)
    empty = sample(state, KEY)
    assert (empty.probabilities == 0).all()
    for time in range(9):
        state = add(state, jax.tree.map(lambda leaf: leaf[:, 0], steps(time, 2, 1)))
    batch = sample(state, KEY)
    np.testing.assert_allclose(batch.probabilities, 1 / 16)
    assert set(batch.indices.tolist()) == {*range(8), *range(32, 40)}
    np.testing.assert_array_equal(
        batch.experience.first["name"] + 1, batch.experience.second["name"]
    )
    # bad priorities are ignored, and of one index that occurs twice the largest counts
    index = jnp.array([0, 1, 2, 3, 4, 4, 32])
    priority = jnp.array([4.0, 0.0, jnp.nan, -1.0, 9.0, 1.0, jnp.inf])
    state = set_priorities(state, index, priority)
    batch = sample(state, KEY)
    probability = dict(zip(batch.indices.tolist(), batch.probabilities.tolist(), strict=True))
    mass = {**dict.fromkeys([*range(8), *range(32, 40)], 1.0), 0: 2.0, 4: 3.0}
    del mass[1]
    assert probability.keys() == mass.keys()
    for one, value in probability.items():
        assert value == pytest.approx(mass[one] / sum(mass.values()), rel=1e-5)
    # a new row gets the largest so far, which is not rounded
    state = set_priorities(state, jnp.arange(64), jnp.full(64, 2.25))
    state = set_priorities(state, jnp.array([3]), jnp.array([12.25]))
    for time in (9, 10):
        state = add(state, jax.tree.map(lambda leaf: leaf[:, 0], steps(time, 2, 1)))
    batch = sample(state, KEY)
    probability = dict(zip(batch.indices.tolist(), batch.probabilities.tolist(), strict=True))
    assert probability[9] / probability[2] == pytest.approx(3.5 / 1.5)
    # all priorities 0: it says so
    state = set_priorities(state, jnp.arange(64), jnp.zeros(64))
    assert not buffer.can_sample(state)


@pytest.mark.parametrize("is_prioritised", [False, True])
@pytest.mark.parametrize("has_time", [False, True])
@pytest.mark.parametrize("num_envs", [None, 1, 3])
def test_what_an_add_takes(num_envs, has_time, is_prioritised):
    """Flat and item buffers with and without the axes of envs and time."""
    kind = "prioritised_" if is_prioritised else ""
    batch = steps(0, num_envs or 1, 4 if has_time else 1)
    if not has_time:
        batch = jax.tree.map(lambda leaf: leaf[:, 0], batch)
    if num_envs is None:
        batch = jax.tree.map(lambda leaf: leaf[0], batch)
    flat = getattr(fbx, f"make_{kind}flat_buffer")(
        max_length=30,
        min_length=2,
        sample_batch_size=64,
        add_sequences=has_time,
        add_batch_size=num_envs,
    )
    state = flat.add(flat.add(flat.init(EXAMPLE), batch), batch)
    pairs = flat.sample(state, KEY).experience
    assert pairs.first["obs"]["x"].shape == pairs.second["obs"]["x"].shape == (64, 3)
    names = set(zip(pairs.first["name"].tolist(), pairs.second["name"].tolist(), strict=True))
    times = [*range(4), *range(4)] if has_time else [0, 0]
    assert names == {
        (10_000 * env + a, 10_000 * env + b)
        for env in range(num_envs or 1)
        for a, b in itertools.pairwise(times)
    }
    items = getattr(fbx, f"make_{kind}item_buffer")(
        max_length=30,
        min_length=2,
        sample_batch_size=64,
        add_sequences=has_time,
        add_batches=num_envs is not None,
    )
    state = items.add(items.init(EXAMPLE), batch)
    got = items.sample(state, KEY).experience
    assert got["obs"]["x"].shape == (64, 3)
    assert set(got["name"].tolist()) == set(np.ravel(batch["name"]).tolist())
    assert state.current_index == np.size(batch["name"])
    assert bool(items.can_sample(state)) == (np.size(batch["name"]) >= 2)


@pytest.mark.parametrize(
    ("add_length", "span", "length"), [(3, 5, 13), (4, 2, 8), (1, 1, 1), (6, 6, 6)]
)
def test_a_queue_hands_out_each_step_once(add_length, span, length):
    queue = fbx.make_trajectory_queue(
        max_length_time_axis=length,
        add_batch_size=2,
        add_sequence_length=add_length,
        sample_sequence_length=span,
    )
    state, written, unread = queue.init(EXAMPLE), 0, []
    add, sample = jax.jit(queue.add), jax.jit(queue.sample)
    for turn in range(40):
        assert bool(queue.can_add(state)) == (len(unread) + add_length <= length)
        if turn % 3 == 1 or queue.can_add(state):  # at times without room: the oldest are lost
            state = add(state, steps(written, 2, add_length))
            unread += range(written, written + add_length)
            written, unread = written + add_length, unread[-length:]
        assert bool(queue.can_sample(state)) == (len(unread) >= span)
        assert state.write_index == written % length
        assert state.read_index == (written - len(unread)) % length
        assert state.is_full == (len(unread) == length)
        after, batch = sample(state)
        if len(unread) < span:  # nothing is consumed
            assert after.num_unread == state.num_unread == len(unread)
            continue
        for env in range(2):
            assert batch.experience["name"][env].tolist() == [
                10_000 * env + one for one in unread[:span]
            ]
        state, unread = after, unread[span:]


def test_a_mixer_takes_its_part_of_each_buffer():
    """The part of a prioritised batch is spread over all rows, not the first of them."""
    buffers, states = [], []
    for number in range(3):
        buffer = fbx.make_prioritised_item_buffer(
            max_length=1000, min_length=1, sample_batch_size=100, add_sequences=True
        )
        buffers.append(buffer)
        rows = {"buffer": jnp.full(1000, number), "place": jnp.arange(1000)}
        state = buffer.init({"buffer": jnp.int32(0), "place": jnp.int32(0)})
        states.append(buffer.add(state, rows))
    mixer = fbx.make_mixer(buffers, sample_batch_size=99, proportions=[1, 1, 2])
    assert jax.jit(mixer.can_sample)(states)
    batch = jax.jit(mixer.sample)(states, KEY)
    assert np.bincount(batch.experience["buffer"]).tolist() == [26, 24, 49]
    for number in range(3):
        place = batch.experience["place"][batch.experience["buffer"] == number]
        assert len(set(place.tolist())) == len(place)
        assert abs(place.mean() - 500) < 25
    assert not mixer.can_sample(
        [*states[:2], buffers[2].init({"buffer": jnp.int32(0), "place": jnp.int32(0)})]
    )
    with pytest.raises(
        ValueError, match="a part of 200 items needs a buffer with sample_batch_size"
    ):
        fbx.make_mixer(buffers[:1], 200, [1.0]).sample(states[:1], KEY)
    for proportions in ([1.0], [0.0, 0.0, 0.0], [1.0, -1.0, 1.0]):
        with pytest.raises(ValueError, match=r"make_mixer: .*proportion"):
            fbx.make_mixer(buffers, 10, proportions)


def test_a_mixers_part_is_drawn_independently_of_the_batch():
    """With the batch's own random bits, a quarter of the rows would never be in the part."""
    buffer = fbx.make_prioritised_item_buffer(
        max_length=1000, min_length=1, sample_batch_size=2, add_sequences=True
    )
    state = buffer.add(buffer.init(jnp.int32(0)), jnp.arange(1000))
    mixer = fbx.make_mixer([buffer], sample_batch_size=1, proportions=[1.0])
    keys = jax.random.split(KEY, 400)
    rows = jax.jit(jax.vmap(lambda key: mixer.sample([state], key).experience[0]))(keys)
    assert np.bincount(np.asarray(rows) // 250, minlength=4).min() > 55  # of 100; 5 deviations


MAKERS = {
    "flat": functools.partial(fbx.make_flat_buffer, add_batch_size=8),
    "prioritised_flat": functools.partial(fbx.make_prioritised_flat_buffer, add_batch_size=8),
    "item": functools.partial(fbx.make_item_buffer, add_batches=True),
    "prioritised_item": functools.partial(fbx.make_prioritised_item_buffer, add_batches=True),
}


def made(kind, max_length=1 << 17):
    if "trajectory" in kind:
        return getattr(fbx, f"make_{kind}_buffer")(
            add_batch_size=8,
            sample_batch_size=8,
            sample_sequence_length=4,
            period=2,
            min_length_time_axis=4,
            max_size=max_length,
        )
    return MAKERS[kind](max_length=max_length, min_length=8, sample_batch_size=8)


@pytest.mark.parametrize("kind", [*MAKERS, "trajectory", "prioritised_trajectory"])
def test_everything_is_in_place(kind):
    """Alone, in a scan of a training loop, and under vmap; and a state of many members answers."""
    buffer = made(kind)
    step = {"x": jnp.zeros((8, 3)), "r": jnp.zeros(8)}
    if "trajectory" in kind:
        step = jax.tree.map(lambda leaf: leaf[:, None].repeat(2, axis=1), step)
    example = {"x": jnp.zeros(3), "r": jnp.float32(0)}
    state = buffer.init(example)
    size = (1 << 17) * 3

    def train(state, key):
        state = buffer.add(state, step)
        batch = buffer.sample(state, key)
        if hasattr(buffer, "set_priorities"):
            state = buffer.set_priorities(state, batch.indices, jnp.ones(8))
        return state, batch.experience

    check_in_place(buffer.add, (state, step), num_elements=size, donated=0)
    check_in_place(buffer.sample, (state, KEY), num_elements=size)
    keys = jax.random.split(KEY, 5)
    check_in_place(
        lambda state, keys: jax.lax.scan(train, state, keys),
        (state, keys),
        num_elements=size,
        donated=0,
    )
    small = made(kind, 1 << 13)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 16), small.init(example))
    buffer = small
    check_in_place(
        jax.vmap(train), (states, jax.random.split(KEY, 16)), num_elements=(1 << 17) * 3, donated=0
    )
    states, _ = jax.vmap(train)(states, jax.random.split(KEY, 16))
    assert states.current_index.shape == states.is_full.shape == (16,)
    assert states.experience["x"].shape[0] == 16
    assert small.can_sample(states).shape == (16,)


def test_purejaxrls_loop():
    """One env a step, the buffer's functions replaced by jitted ones, all of it under a scan and a
    vmap over seeds, with a branch until it can learn."""

    class TimeStep(NamedTuple):
        obs: jax.Array
        action: jax.Array
        reward: jax.Array
        done: jax.Array

    buffer = fbx.make_flat_buffer(
        max_length=200, min_length=16, sample_batch_size=16, add_sequences=False, add_batch_size=4
    )
    buffer = buffer.replace(
        init=jax.jit(buffer.init),
        add=jax.jit(buffer.add, donate_argnums=0),
        sample=jax.jit(buffer.sample),
        can_sample=jax.jit(buffer.can_sample),
    )
    example = TimeStep(jnp.zeros(2), jnp.int32(0), jnp.float32(0), jnp.bool_(False))

    @jax.jit
    def train(key):
        def iteration(carry, key):
            state, total, time = carry
            obs = jnp.stack([time + jnp.arange(4.0), jnp.zeros(4)], axis=-1)
            state = buffer.add(
                state, TimeStep(obs, jnp.zeros(4, jnp.int32), jnp.ones(4), jnp.zeros(4, bool))
            )
            learn = lambda total: total + buffer.sample(state, key).experience.first.reward.mean()
            total = jax.lax.cond(buffer.can_sample(state), learn, lambda total: total, total)
            return (state, total, time + 1), None

        carry = buffer.init(example), jnp.float32(0), jnp.float32(0)
        return jax.lax.scan(iteration, carry, jax.random.split(key, 100))[0][1]

    np.testing.assert_allclose(jax.vmap(train)(jax.random.split(KEY, 3)), 100 - 4)


def test_stoixs_loops():
    """Items of whole rollouts [envs, time], and prioritised sequences, in a state that is stacked
    for each update batch, with a learner under `pmap` and `vmap`."""
    items = fbx.make_item_buffer(
        max_length=512, min_length=32, sample_batch_size=32, add_batches=True, add_sequences=True
    )
    sequences = fbx.make_prioritised_trajectory_buffer(
        add_batch_size=4,
        sample_batch_size=8,
        sample_sequence_length=6,
        period=2,
        min_length_time_axis=6,
        max_size=512,
    )
    example = {"obs": jnp.zeros(3), "info": {"return": jnp.float32(0)}}
    rollout = jax.tree.map(lambda leaf: jnp.ones((4, 8, *leaf.shape)), example)

    def learn(state, key, buffer):
        state = buffer.add(state, rollout)
        batch = buffer.sample(state, key)
        if buffer is sequences:
            state = buffer.set_priorities(state, batch.indices, jnp.full(8, 2.0))
        return state, batch.experience["info"]["return"].mean()

    for buffer in (items, sequences):
        state = buffer.init(example)
        stacked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (1, 2, *leaf.shape)), state)
        keys = jax.random.split(KEY, (1, 2))
        learner = jax.pmap(jax.vmap(functools.partial(learn, buffer=buffer)), donate_argnums=0)
        stacked, mean = learner(jax.tree.map(jnp.copy, stacked), keys)
        assert (mean == 1).all()
        assert buffer.can_sample(stacked).all()


def test_jaxmarls_loop():
    """A dict of agents as one time step of several envs, sampled as sequences [batch, time]."""
    agents = ("agent_0", "agent_1", "__all__")
    buffer = fbx.make_trajectory_buffer(
        max_length_time_axis=32,
        min_length_time_axis=4,
        sample_batch_size=8,
        add_batch_size=2,
        sample_sequence_length=1,
        period=1,
    )
    example = {
        "obs": {agent: jnp.zeros(5) for agent in agents},
        "dones": {agent: jnp.bool_(False) for agent in agents},
    }
    state = buffer.init(example)
    for _ in range(5):
        rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (2, 1, *leaf.shape)), example)
        state = buffer.add(state, rows)
    batch = buffer.sample(state, KEY).experience
    assert batch["obs"]["agent_1"].shape == (8, 1, 5)
    assert batch["dones"]["__all__"].dtype == bool


def bad_calls():
    flat = fbx.make_flat_buffer(max_length=8, min_length=2, sample_batch_size=2, add_batch_size=2)
    state = flat.init(EXAMPLE)
    step = jax.tree.map(lambda leaf: leaf[:, 0], steps(0, 2, 1))
    sizes = {
        "sample_batch_size": 2,
        "sample_sequence_length": 3,
        "min_length_time_axis": 3,
        "add_batch_size": 2,
    }
    make, queue = fbx.make_trajectory_buffer, fbx.make_trajectory_queue
    return {
        "one env of two": (
            lambda: flat.add(state, jax.tree.map(lambda leaf: leaf[:1], step)),
            r"add:.*name: got int32\[1\], expected int32\[2\]",
        ),
        "another dtype": (
            lambda: flat.add(state, {**step, "name": jnp.zeros(2)}),
            "add:.*name: got float32",
        ),
        "a missing leaf": (lambda: flat.add(state, {"name": step["name"]}), "add:.*obs"),
        "no leaf": (lambda: flat.add(state, {}), "add:.*name: missing"),
        "no state": (lambda: flat.add(None, step), "add: the state must be one that init or add"),
        "an empty example": (lambda: flat.init({}), "init: the example has no leaves"),
        "two lengths": (
            lambda: make(**sizes, period=1, max_size=9, max_length_time_axis=9),
            "give one of max_size",
        ),
        "no length": (lambda: make(**sizes, period=1), "give one of max_size"),
        "a short buffer": (
            lambda: make(**sizes, period=1, max_size=4),
            "3 time steps are needed .* but 2 are kept",
        ),
        "period 0": (
            lambda: make(**sizes, period=0, max_size=40),
            "period must be an int of at least 1, got 0",
        ),
        "one step an env": (
            lambda: fbx.make_flat_buffer(
                max_length=3, min_length=1, sample_batch_size=1, add_batch_size=2
            ),
            "no room for 2 steps of each of 2 envs",
        ),
        "exponent 2": (
            lambda: fbx.make_prioritised_item_buffer(
                max_length=3, min_length=1, sample_batch_size=1, priority_exponent=2
            ),
            r"priority_exponent must be in \[0, 1\], got 2",
        ),
        "a long sample": (
            lambda: queue(4, 1, 1, 5),
            "sample_sequence_length=5 exceeds max_length_time_axis=4",
        ),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_a_bad_call_says_why(name):
    call, message = bad_calls()[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()
