"""flashbax's interface over our storage, beside a model of lists. `make compat` runs flashbax's own
tests over it."""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay.compat.flashbax as fbx
from tests.conftest import ALL
from tests.support.hlo import check_in_place
from tests.support.refusals import check_table, refused
from tests.support.steps import nth

KEY = jax.random.key(0)
EXAMPLE = {"name": np.int32(0), "obs": {"x": np.zeros(3, np.float32), "done": np.bool_(False)}}


def steps(first, num_envs, time):
    """Return steps [E, T] that name their env and time."""
    axes = num_envs, time
    name = 10_000 * np.arange(num_envs)[:, None] + first + np.arange(time)
    obs = {"x": np.ones((*axes, 3), np.float32), "done": np.zeros(axes, bool)}
    return {"name": name.astype(np.int32), "obs": obs}


def step(time, num_envs=2):
    """Return one step of each env: leaves [E, ...]."""
    return nth(steps(time, num_envs, 1), np.s_[:, 0])


def made(kind, **options):
    return getattr(fbx, f"make_{kind}_buffer")(**options)


KINDS = ["prioritised_trajectory", "trajectory"]
SIZES = [(3, 12, 4, 3), (2, 12, 1, 1), (2, 12, 2, 1), (2, 12, 12, 1), (1, 12, 5, 4), (2, 12, 3, 6)]
CASES = [*itertools.product(KINDS, SIZES)]


@pytest.mark.parametrize(("kind", "sizes"), CASES if ALL else CASES[:1])
def test_sequences_are_those_of_a_list(kind, sizes):
    """Every sequence that may start is sampled, and no other, through wraps and ragged adds."""
    num_envs, length, span, period = sizes
    buffer = made(
        kind,
        add_batch_size=num_envs,
        sample_batch_size=512,
        sample_sequence_length=span,
        period=period,
        min_length_time_axis=1,
        max_length_time_axis=length,
    )

    @jax.jit
    def turn(state, block, key):
        state = buffer.add(state, block)
        shown = state.current_index, state.is_full, buffer.can_sample(state)
        return state, shown, state.experience, buffer.sample(state, key).experience

    state, written = jax.jit(buffer.init)(EXAMPLE), 0
    assert not jax.jit(buffer.can_sample)(state)
    for time in (1, 5, 1, 1, 5, 5, 1, 12, 5):
        given = steps(written, num_envs, time)
        state, shown, stored, drawn = turn(state, given, jax.random.key(written))
        written += time
        oldest = max(written - length, 0)
        first = -(-oldest // period) * period if kind == KINDS[0] else oldest
        starts = set(range(first, written - span + 1, period))
        assert [*map(int, shown)] == [written % length, written >= length, bool(starts)]
        assert {*range(oldest, written)} <= set(stored["name"][0].tolist())
        for leaf, one in zip(jax.tree.leaves(drawn), jax.tree.leaves(EXAMPLE), strict=True):
            assert (leaf.shape, leaf.dtype) == ((512, span, *one.shape), one.dtype)
        if starts:
            assert (np.diff(drawn["name"]) == 1).all()
            found = {divmod(one, 10_000) for one in drawn["name"][:, 0].tolist()}
            assert found == {*itertools.product(range(num_envs), starts)}


def test_priorities_are_those_that_were_set():
    sizes = {"max_length": 64, "min_length": 1, "sample_batch_size": 4096, "add_batch_size": 2}
    buffer = made("prioritised_flat", add_sequences=True, priority_exponent=0.5, **sizes)
    add, set_priorities = jax.jit(buffer.add), jax.jit(buffer.set_priorities)
    sample = jax.jit(lambda state: (buffer.can_sample(state), buffer.sample(state, KEY)))

    def probabilities(state):
        can_sample, batch = sample(state)
        assert can_sample == any(batch.probabilities)
        return dict(zip(batch.indices.tolist(), batch.probabilities.tolist(), strict=True))

    state, rows = jax.jit(buffer.init)(EXAMPLE), [*range(8), *range(32, 40)]
    assert {*probabilities(state).values()} == {0}
    state = add(state, steps(0, 2, 9))
    first, second = jax.device_get(sample(state)[1].experience)
    np.testing.assert_array_equal(first["name"] + 1, second["name"])
    assert probabilities(state) == pytest.approx(dict.fromkeys(rows, 1 / 16))
    # bad priorities are ignored, and of one index that occurs twice the largest counts
    index = np.array([0, 1, 2, 3, 4, 4, 32], np.int32)
    priority = np.array([4, 0, np.nan, -1, 9, 1, np.inf], np.float32)
    state = set_priorities(state, index, priority)
    mass = dict.fromkeys(rows, 1.0) | {0: 2.0, 4: 3.0}
    del mass[1]
    expected = {row: value / sum(mass.values()) for row, value in mass.items()}
    assert probabilities(state) == pytest.approx(expected, rel=1e-5)
    # a new row gets the largest so far, which is not rounded
    every = np.arange(64, dtype=np.int32)
    state = set_priorities(state, every, np.where(every == 3, 12.25, 2.25).astype(np.float32))
    found = probabilities(add(state, steps(9, 2, 9)))
    assert found[9] / found[2] == pytest.approx(3.5 / 1.5)
    # all priorities 0
    assert {*probabilities(set_priorities(state, every, np.zeros(64, np.float32))).values()} == {0}


ADDS = [*itertools.product(["prioritised_", ""], [None, 3, 1], [False, True])]


@pytest.mark.parametrize(("kind", "num_envs", "has_time"), ADDS if ALL else ADDS[1:3])
def test_what_an_add_takes(kind, num_envs, has_time):
    """Flat and item buffers with and without the axes of envs and time."""
    options = {"max_length": 30, "min_length": 2, "sample_batch_size": 64}
    options["add_sequences"] = has_time
    batch = steps(0, num_envs or 1, 4) if has_time else step(0, num_envs or 1)
    if num_envs is None:
        batch = nth(batch, 0)
    flat = made(f"{kind}flat", add_batch_size=num_envs, **options)
    items = made(f"{kind}item", add_batches=num_envs is not None, **options)

    @jax.jit
    def sampled(batch):
        state = flat.add(flat.add(flat.init(EXAMPLE), batch), batch)
        pair = flat.sample(state, KEY).experience
        state = items.add(items.init(EXAMPLE), batch)
        found = pair.first, pair.second, items.sample(state, KEY).experience
        return found, (state.current_index, items.can_sample(state))

    found, shown = jax.device_get(sampled(batch))
    assert {one["obs"]["x"].shape for one in found} == {(64, 3)}
    first, second, item = (one["name"].tolist() for one in found)
    envs = np.reshape(batch["name"], (num_envs or 1, -1)).tolist()
    pairs = {pair for names in envs for pair in itertools.pairwise(names * 2)}
    assert {*zip(first, second, strict=True)} == pairs
    assert {*item} == {*itertools.chain(*envs)}
    size = np.size(batch["name"])
    assert shown == (size, size >= 2)


@pytest.mark.parametrize("sizes", [(3, 5, 13), *[(1, 1, 1), (4, 2, 8), (6, 6, 6)] * ALL])
def test_a_queue_hands_out_each_step_once(sizes):
    add_length, span, length = sizes
    queue = fbx.make_trajectory_queue(
        max_length_time_axis=length,
        add_batch_size=2,
        add_sequence_length=add_length,
        sample_sequence_length=span,
    )

    @jax.jit
    def turn(state, block, is_forced):
        """Add if there is room, or without room: then the oldest steps are lost."""
        can_add = queue.can_add(state)
        added = queue.add(state, block)
        state = jax.tree.map(lambda *leaves: jnp.where(can_add | is_forced, *leaves), added, state)
        after, batch = queue.sample(state)
        shown = state.write_index, state.read_index, state.is_full, state.num_unread
        shown += after.num_unread, can_add, queue.can_sample(state)
        return after, [*map(jnp.asarray, shown)], batch.experience["name"]

    state, written, unread = jax.jit(queue.init)(EXAMPLE), 0, []
    for number in range(40):
        has_room, is_forced = len(unread) + add_length <= length, number % 3 == 1
        state, shown, names = turn(state, steps(written, 2, add_length), is_forced)
        if has_room or is_forced:
            unread = [*unread, *range(written, written + add_length)][-length:]
            written += add_length
        taken = unread[:span] if len(unread) >= span else []  # too few are not consumed
        indices = [written % length, (written - len(unread)) % length]
        counts = [len(unread) == length, len(unread), len(unread) - len(taken)]
        assert [*map(int, shown)] == [*indices, *counts, has_room, bool(taken)]
        if taken:
            assert names.tolist() == [taken, [10_000 + one for one in taken]]
        unread = unread[len(taken) :]


def items_of(batch_size):
    """Return a buffer of items, and a function that fills it with 1000 numbers."""
    sizes = {"max_length": 1000, "min_length": 1, "sample_batch_size": batch_size}
    buffer = made("prioritised_item", add_sequences=True, **sizes)
    return buffer, lambda rows: buffer.add(buffer.init(np.int32(0)), rows)


@pytest.mark.thorough  # it takes the samples of buffers that are compared above
def test_a_mixer_takes_its_part_of_each_buffer():
    buffer, filled = items_of(100)
    mixer = fbx.make_mixer([buffer] * 3, sample_batch_size=99, proportions=[1, 1, 2])

    @jax.jit
    def mixed(rows):
        states = [*map(filled, rows)]
        less = [*states[:2], buffer.init(np.int32(0))]
        shown = mixer.can_sample(states), mixer.can_sample(less)
        return mixer.sample(states, KEY).experience, shown

    batch, shown = jax.device_get(mixed(np.arange(3000, dtype=np.int32).reshape(3, 1000)))
    assert shown == (True, False)
    assert np.bincount(batch // 1000).tolist() == [26, 24, 49]
    assert len({*batch.tolist()}) == 99


@pytest.mark.thorough
def test_a_mixers_part_is_drawn_independently_of_the_batch():
    """It is spread over all rows. With the first half of a batch, or with the batch's own random
    bits, a quarter of the rows would never be in the part."""
    buffer, filled = items_of(2)
    mixer = fbx.make_mixer([buffer], sample_batch_size=1, proportions=[1.0])

    @jax.jit
    def drawn(rows):
        draw = jax.vmap(lambda key: mixer.sample([filled(rows)], key).experience[0])
        return draw(jax.random.split(KEY, 400))

    rows = np.asarray(drawn(np.arange(1000, dtype=np.int32)))
    assert np.bincount(rows // 250, minlength=4).min() > 55  # of 100; 5 deviations


ROWS = 1 << 17
SEQUENCES = {
    "add_batch_size": 8,
    "sample_sequence_length": 4,
    "period": 2,
    "min_length_time_axis": 4,
}
LARGE = {
    "prioritised_trajectory": SEQUENCES | {"max_size": ROWS},
    "item": {"add_batches": True, "min_length": 8, "max_length": ROWS},
}


# Of what lies beneath, tests/buffers/test_in_place.py has each method.
@pytest.mark.thorough
@pytest.mark.parametrize("kind", LARGE)
def test_everything_is_in_place(kind):
    """In a scan of a training loop under vmap."""
    buffer = made(kind, sample_batch_size=8, **LARGE[kind])
    block = step(0, 8) if kind == "item" else steps(0, 8, 2)

    def turn(state, key):
        state = buffer.add(state, block)
        batch = buffer.sample(state, key)
        if hasattr(buffer, "set_priorities"):
            state = buffer.set_priorities(state, batch.indices, np.ones(8, np.float32))
        return state, batch.experience

    train = jax.vmap(functools.partial(jax.lax.scan, turn))
    state, keys = jax.eval_shape(buffer.init, EXAMPLE), jax.random.split(KEY, (2, 5))
    states = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), state)
    check_in_place(train, (states, keys), num_elements=ROWS * 3, donated=0)


# As Stoix, Mava and purejaxrl name flashbax's types.
PROGRAM = """
from typing import NamedTuple
import flashbax as fbx
import jax
import jax.numpy as jnp
from flashbax.buffers import make_item_buffer
from flashbax.buffers.flat_buffer import ExperiencePair, TrajectoryBuffer, TransitionSample
from flashbax.buffers.mixer import Mixer
from flashbax.buffers.trajectory_buffer import BufferState, TrajectoryBufferState
from flashbax.utils import get_tree_shape_prefix

class Transition(NamedTuple):
    obs: jax.Array

class Learner(NamedTuple):
    state: TrajectoryBufferState[Transition]
    other: fbx.prioritised_trajectory_buffer.BufferState
    pair: fbx.prioritised_flat_buffer.ExperiencePair

def act(buffer: TrajectoryBuffer, state: BufferState, batch: TransitionSample[Transition]):
    return ExperiencePair[Transition], Mixer, make_item_buffer

buffer = fbx.make_prioritised_flat_buffer(8, 2, 4, add_batch_size=2)
buffer = buffer.replace(
    init=jax.jit(buffer.init),
    add=jax.jit(buffer.add, donate_argnums=0),
    sample=jax.jit(buffer.sample),
    can_sample=jax.jit(buffer.can_sample),
)

def iteration(carry, key):
    state, total = carry
    state = buffer.add(state, Transition(jnp.ones(2)))
    learn = lambda: total + buffer.sample(state, key).experience.first.obs.mean()
    return (state, jax.lax.cond(buffer.can_sample(state), learn, lambda: total)), None

@jax.vmap
def train(seed):
    carry = buffer.init(Transition(jnp.float32(0))), jnp.float32(0)
    return jax.lax.scan(iteration, carry, jax.random.split(jax.random.key(seed), 9))[0][1]

@jax.jit
def run(obs) -> tuple[fbx.prioritised_trajectory_buffer.PrioritisedTrajectoryBufferState, Learner]:
    state = buffer.init(Transition(jnp.float32(0)))
    state = jax.lax.fori_loop(0, 6, lambda time, state: buffer.add(state, Transition(obs)), state)
    assert get_tree_shape_prefix(state.experience, 2) == (2, 4)
    return state, Learner(state, state, buffer.sample(state, jax.random.key(0)).experience)

state, learner = run(jnp.ones(2))
returns = jax.jit(train)(jnp.arange(3))
assert isinstance(learner.pair, fbx.flat_buffer.ExperiencePair)
"""


def test_a_program_runs_with_the_module_s_name_changed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashbax", None)  # as if it were not installed
    names = {"__name__": "program"}
    exec(PROGRAM.replace("flashbax", "jaxreplay.compat.flashbax"), names)
    state = names["state"]
    assert names["returns"].tolist() == [8] * 3
    count = fbx.utils.get_timestep_count
    told = jax.jit(lambda state: (state.running_index, state.current_index, count(state)))(state)
    assert [*map(int, told)] == [6, 2, 8]
    with refused(r"(?s)get_tree_shape_prefix:.*b: got float32\[2\], expected float32\[3\]"):
        fbx.utils.get_tree_shape_prefix({"a": np.zeros(3, "f"), "b": np.zeros(2, "f")})


def test_a_states_experience_can_be_replaced_and_its_counts_cannot():
    sizes = {"max_length": 8, "min_length": 2, "sample_batch_size": 8, "add_batch_size": 2}
    buffer = made("flat", add_sequences=True, **sizes)
    state = jax.jit(lambda block: buffer.add(buffer.init(EXAMPLE), block))(steps(0, 2, 5))

    @jax.jit
    def replaced(state):
        return state.replace(experience=jax.tree.map(lambda leaf: leaf + leaf, state.experience))

    doubled = jax.device_get(jax.jit(lambda state: replaced(state).experience)(state))
    population = replaced(jax.tree.map(lambda leaf: np.stack([leaf] * 3), jax.device_get(state)))
    assert np.asarray(population.current_index).tolist() == [1] * 3
    on_host = jax.device_get(state).replace(experience=doubled)
    sample = jax.jit(lambda state: buffer.sample(state, KEY).experience)
    for one in (replaced(state), on_host, nth(jax.device_get(population), 1)):
        pair = sample(one)
        np.testing.assert_array_equal(pair.second["name"], np.asarray(pair.first["name"]) + 2)
    with refused("replace: current_index, is_full of a TrajectoryBufferState is counted"):
        state.replace(current_index=0, is_full=True, replay=state.replay)
    with refused(r"(?s)replace:.*name: got float32\[2, 4\], expected int32\[2, 4\]"):
        state.replace(experience=doubled | {"name": np.zeros((2, 4), np.float32)})


SMALL = {"max_length": 8, "min_length": 2, "sample_batch_size": 2}
flat = functools.partial(made, "flat", add_batch_size=2, **SMALL)
long = functools.partial(made, "trajectory", sample_batch_size=2, **SEQUENCES)
GOOD = step(0)
BAD = {
    "add(nth(GOOD, slice(1)))": "add:\nname: got int32[1], expected int32[2]",
    "add(GOOD | {'name': np.zeros(2, np.float32)})": "add:\nname: got float32",
    "add({'obs': GOOD['obs']})": "add:\nname: missing",
    "flat().add(None, GOOD)": "add: the state must be one that init or add",
    "flat().init({})": "init: the example has no leaves",
    "long(max_size=99, max_length_time_axis=9)": "give one of max_size",
    "long()": "give one of\nmax_size",
    "long(max_size=16)": "4 time steps are needed\nbut 2 are kept",
    "made('trajectory', sample_batch_size=2, max_size=99, **SEQUENCES | {'period': 0})": """
        period must be an int of at least 1, got 0""",
    "flat(max_length=3)": "no room for 2 steps of each of 2 envs",
    "made('prioritised_item', priority_exponent=2, **SMALL)": """
        priority_exponent must be in [0, 1], got 2""",
    "fbx.make_trajectory_queue(4, 1, 1, 5)": """
        sample_sequence_length=5 exceeds max_length_time_axis=4""",
    "fbx.make_mixer([flat()], 200, [1.0]).sample([state], KEY)": """
        a part of 200 items needs a buffer with sample_batch_size""",
    "fbx.make_mixer([flat()] * 3, 10, [1.0])": "each buffer needs one proportion",
    "fbx.make_mixer([flat()] * 2, 10, [1.0, -1.0])": "proportions must be at least 0",
    "fbx.make_mixer([flat()] * 2, 10, [0.0, 0.0])": "proportions\n, and one positive",
}


@pytest.mark.no_xla
def test_a_bad_call_says_why():
    state = jax.eval_shape(flat().init, EXAMPLE)
    add = lambda step: jax.eval_shape(flat().add, state, step)
    check_table(BAD, {**globals(), "add": add}, given={"state": state, "KEY": KEY})
