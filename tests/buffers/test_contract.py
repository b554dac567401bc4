"""Contract that every buffer of the catalog fulfills."""

import re

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
import jaxreplay.compat.flax
from jaxreplay.samplers import PrioritySampler
from tests.conftest import SOAK
from tests.support.buffers import CATALOG, KINDS, NUM_ENVS, draw, jitted_draw

cases = pytest.mark.parametrize("case", CATALOG, ids=lambda case: case.name)
kinds = pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)


def assert_same(got, expected, name=""):
    chex.assert_trees_all_equal_structs(got, expected, custom_message=name)
    chex.assert_trees_all_equal(*jax.device_get((got, expected)), custom_message=name, strict=True)


def operations(case, replay):
    """Return name -> function of (state, seed) that returns a state or a batch."""
    add = lambda state, seed: replay.add(state, case.step(seed), *case.mask(replay, seed))
    extend = lambda state, seed: replay.extend(
        state, case.step(seed, 7), *case.mask(replay, seed, 7)
    )
    found = {
        "add": add,
        "extend": extend,
        "draw": lambda state, seed: draw(replay, state, jax.random.key(seed)),
        "clear": lambda state, _: replay.clear(state),
    }
    found["get"] = lambda state, seed: replay.get(
        state, (jnp.arange(9) * 5 + seed) % replay.capacity, jax.random.key(seed)
    )
    if isinstance(replay.sampler, PrioritySampler):
        index = jax.jit(replay.sample)(case.filled(replay), jax.random.key(9)).index
        found["update"] = lambda state, seed: replay.update_priorities(
            state, index, jnp.linspace(0.0, seed + 1.0, 8)
        )
    return found


@cases
def test_an_abstract_example_is_enough(case):
    replay = case.replay()
    concrete = jax.tree.map(lambda leaf: leaf[0], case.step())
    assert_same(replay.init(case.example()), replay.init(concrete))
    assert_same(replay.init(case.example()), replay.init(jax.tree.map(np.asarray, concrete)))


# Eager mode compiles each primitive by itself, which is slow.
@pytest.mark.parametrize("case", CATALOG if SOAK else KINDS[1:4], ids=lambda case: case.name)
def test_jit_equals_eager(case):
    replay = case.replay()
    state = case.filled(replay)
    for name, run in operations(case, replay).items():
        if SOAK or name in ("add", "draw", "update"):
            assert_same(jax.jit(run, static_argnums=1)(state, 3), run(state, 3), name)


@kinds
def test_vmap_equals_a_loop(case):
    replay = case.replay()
    states = [
        jax.jit(replay.add)(case.filled(replay), case.step(seed), *case.mask(replay, seed))
        for seed in range(3)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    runs = operations(case, replay)
    one = jax.jit(lambda state: {name: run(state, 4) for name, run in runs.items()})
    together = jax.jit(jax.vmap(one))(stacked)
    for which, state in enumerate(states):
        assert_same(jax.tree.map(lambda leaf, which=which: leaf[which], together), one(state))


@cases
def test_a_state_keeps_its_structure_and_dtypes(case):
    replay = case.replay()
    state = replay.init(case.example())
    spec = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), state)
    for name, run in operations(case, replay).items():
        if name not in ("draw", "get"):
            changed = jax.eval_shape(lambda state, run=run: run(state, 1), state)
            assert (
                jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), changed) == spec
            ), name


@pytest.mark.parametrize(
    "case", [case for case in CATALOG if case.is_plain], ids=lambda case: case.name
)
def test_items_come_back_with_their_dtypes(case):
    replay = case.replay()
    state, step = case.filled(replay), case.step()
    items = jitted_draw(replay)(state, jax.random.key(0)).experience
    stored = (
        items
        if case.is_items
        else {
            "obs": items.obs,
            "action": items.action,
            "extras": items.extras,
            "next_obs": items.next_obs,
        }
    )
    given = (
        step
        if case.is_items
        else {"obs": step.obs, "action": step.action, "extras": step.extras, "next_obs": step.obs}
    )
    assert jax.tree.map(lambda x: (x.dtype, x.shape[1:]), stored) == jax.tree.map(
        lambda x: (x.dtype, x.shape[1:]), given
    )


@cases
def test_equal_configurations_share_one_trace(case):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def add(replay, state, step, mask):
        return replay.add(state, step, *mask)

    for _ in range(2):
        replay = case.replay()
        state = replay.init(case.example())
        for seed in range(3):
            state = add(replay, state, case.step(seed), case.mask(replay, seed))
    assert hash(case.replay()) == hash(case.replay())
    assert jax.tree.leaves(case.replay()) == []


@cases
def test_a_donated_state_is_reused_and_gone(case):
    replay = case.replay(capacity=4096)
    buffer, state = jr.jit(replay), replay.init(case.example())
    old = jax.tree.leaves(state)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in old}
    state = buffer.add(state, case.step(), *case.mask(replay, 0))
    assert all(leaf.is_deleted() for leaf in old)
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)} == pointers
    with pytest.raises(RuntimeError, match="deleted"):
        jax.block_until_ready(old[0] + 1)


@kinds
def test_extend_equals_add_for_each_step(case):
    """Blocks are shorter and longer than a stream, which has 16 rows."""
    replay = case.replay()
    add, extend = jax.jit(replay.add), jax.jit(replay.extend)
    get = jax.jit(lambda state: replay.get(state, jnp.arange(replay.capacity), jax.random.key(1)))
    for time in (1, 2, 5, 15, 16, 17, 50) if SOAK else (2, 16, 37):
        start = case.filled(replay, 9)
        steps, mask = case.step(5, time), case.mask(replay, 5, time)
        priority = (
            [jnp.asarray(np.random.default_rng(0).choice([0.5, 3, np.nan], (time, NUM_ENVS)))]
            if isinstance(replay.sampler, PrioritySampler)
            else []
        )
        expected = start
        for t in range(time):
            step_mask = mask[0][t] if mask else None
            expected = add(
                expected,
                jax.tree.map(lambda leaf, t=t: leaf[t], steps),
                step_mask,
                *(p[t] for p in priority),
            )
        got = extend(start, steps, *(mask or (None,)), *priority)
        assert_same(get(got), get(expected))
        assert_same(got.streams.replace(steps=()), expected.streams.replace(steps=()))
        assert_same(got.episodes, expected.episodes)
        if isinstance(replay.sampler, PrioritySampler):
            assert_same(got.sampler.tree.sums[0], expected.sampler.tree.sums[0])
            assert_same(got.sampler.replace(tree=()), expected.sampler.replace(tree=()))


@kinds
def test_an_empty_block_changes_nothing(case):
    replay = case.replay()
    state = case.filled(replay)
    assert_same(replay.extend(state, case.step(0, 0), *case.mask(replay, 0, 0)), state)


@cases
def test_an_empty_buffer_is_flagged(case):
    replay = case.replay()
    state = replay.init(case.example())
    batch = jitted_draw(replay)(state, jax.random.key(0))
    assert (
        int(replay.size(state)),
        bool(replay.can_sample(state)),
        bool(batch.is_valid.any()),
    ) == (0, False, False)
    assert all(
        np.isfinite(np.asarray(leaf, np.float32)).all()
        for leaf in jax.tree.leaves((batch.experience, batch.probability))
    )
    assert ((batch.index.row >= 0) & (batch.index.row < replay.capacity)).all()


@cases
def test_weights_are_those_that_the_probabilities_give(case):
    """Weights follow from the probabilities of all rows, for the sampler's beta and for the traced
    betas of a population."""
    replay = case.replay()
    state = case.filled(replay)
    everything = jax.jit(replay.get)(state, jnp.arange(replay.capacity), jax.random.key(0))
    probability = np.asarray(everything.probability, np.float64)
    if not isinstance(replay.sampler, PrioritySampler):
        np.testing.assert_array_equal(everything.weight, everything.is_valid)
        batch = jitted_draw(replay)(state, jax.random.key(1))
        np.testing.assert_array_equal(batch.weight, batch.is_valid)
        return
    betas = jnp.array([0.0, 0.3, 1.0])
    by_beta = jax.jit(jax.vmap(lambda beta: replay.sample(state, jax.random.key(1), beta=beta)))
    batches = [
        (getattr(replay.sampler, "beta", 1.0), jax.jit(replay.sample)(state, jax.random.key(1))),
        *(
            (beta, jax.tree.map(lambda leaf, nth=nth: leaf[nth], by_beta(betas)))
            for nth, beta in enumerate(betas.tolist())
        ),
    ]
    for beta, batch in batches:
        drawn = probability[np.asarray(batch.index.row)]
        reference = {
            "batch": drawn.min(),
            "buffer": probability[probability > 0].min(),
            None: 1 / int(replay.size(state)),
        }[getattr(replay.sampler, "normalize_weights", "batch")]
        np.testing.assert_allclose(batch.weight, (reference / drawn) ** beta, rtol=1e-4)


@cases
def test_metrics_are_there_and_finite(case):
    replay = case.replay()
    names = {"size", "fill", "effective_sample_size"}
    if isinstance(replay.sampler, PrioritySampler):
        names |= {"max_priority", "num_bad_priorities", "num_stale_updates"}
    for state in (replay.init(case.example()), case.filled(replay)):
        found = jax.jit(replay.metrics)(state)
        assert names <= set(found) <= names | {"mean_priority"}
        assert all(leaf.shape == () and np.isfinite(leaf) for leaf in found.values())
        assert int(found["size"]) == int(replay.size(state))
        assert 0 <= float(found["effective_sample_size"]) <= 1 + 1e-5
        if not isinstance(replay.sampler, PrioritySampler):
            assert float(found["effective_sample_size"]) == (int(found["size"]) > 0)


@cases
def test_what_memory_says_is_what_init_takes(case):
    replay = case.replay()
    state = replay.init(case.example())
    memory = replay.memory(case.example())
    assert memory.total == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert len(memory.leaves) == len(jax.tree.leaves(state))
    assert f"{memory.total:,}" in str(memory)


@kinds
def test_a_state_goes_through_serialization(case):
    replay = case.replay()
    state = case.filled(replay)
    restored = flax.serialization.from_bytes(
        replay.init(case.example()), flax.serialization.to_bytes(state)
    )
    restored = jax.tree.map(jnp.asarray, restored)
    assert_same(restored, state)
    sample = jitted_draw(replay)
    assert_same(sample(restored, jax.random.key(1)), sample(state, jax.random.key(1)))


@cases
def test_the_wrong_leaf_is_named(case):
    replay = case.replay()
    state, step = replay.init(case.example()), case.step()
    one = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)
    name = "image" if case.is_items else "obs.image"
    with pytest.raises(
        ValueError, match=rf"  {name}: got uint8\[.*\], expected uint8\[4, .*\]"
    ) as error:
        replay.add(state, one(step))
    assert str(error.value).startswith("add:\n")
    assert "add takes one step of every env" in str(error.value)
    with pytest.raises(ValueError, match=rf"  {name}: got ") as error:
        replay.extend(state, step)
    assert "extend takes a block of steps, leaves [time, num_envs, ...]" in str(error.value)
    wrong = jax.tree.map(lambda leaf: leaf.astype(jnp.int16), step)
    with pytest.raises(ValueError, match=rf"  {name}: got int16\[.*\], expected uint8\["):
        replay.add(state, wrong)


@kinds
def test_min_size_is_waited_for(case):
    replay = case.replay()
    waiting = jr.ReplayBuffer(
        **{**{f: getattr(replay, f) for f in replay.__dataclass_fields__}, "min_size": 12}
    )
    sample, waiting = jitted_draw(waiting), jr.jit(waiting)
    state = waiting.init(case.example())
    for seed in range(30):
        state = waiting.add(state, case.step(seed), *case.mask(replay, seed))
        enough = int(waiting.size(state)) >= 12
        assert bool(waiting.can_sample(state)) == enough
        assert bool(sample(state, jax.random.key(0)).is_valid.any()) == enough
    assert enough


@cases
def test_items_are_the_steps_that_were_added(case):
    """Each sampled row equals one added step, and is among its stream's newest 16 rows."""
    replay = case.replay(batch_size=512)
    steps = [case.step(seed) for seed in range(30)]
    state, add = replay.init(case.example()), jax.jit(replay.add)
    for seed, step in enumerate(steps):
        state = add(state, step, *case.mask(replay, seed))
    batch = jitted_draw(replay)(state, jax.random.key(0))
    image, env = (
        np.asarray(case.image_of(batch.experience if case.is_items else batch.experience.obs)),
        np.asarray(batch.index.row) // 16,
    )
    added = [np.asarray((step if case.is_items else step.obs)["image"]) for step in steps]
    for which in np.flatnonzero(batch.is_valid):
        sources = [
            seed
            for seed, images in enumerate(added)
            if np.array_equal(image[which], images[env[which]])
        ]
        assert sources
        assert replay.allow_mask or max(sources) >= 30 - 16


def test_the_catalog_is_covered():
    made = {re.split(r"[ ,]", case.name)[0] for case in CATALOG}
    assert made == {
        "items",
        "uniform",
        "prioritized",
        "transitions",
        "sequences",
        "frame_stack",
        "future_pairs",
        "hindsight",
        "transform",
    }
