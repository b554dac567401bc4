"""Mixtures: exact counts, the members' own distributions, and priorities that reach a member."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.targets import importance_weights
from tests.support.steps import begun, plain_step

ENVS = {"autoreset": "same_step_no_final_obs"}
OFFLINE = jr.uniform(**ENVS, capacity=32, num_envs=1, batch_size=7)
ONLINE = jr.prioritized(**ENVS, capacity=16, num_envs=2, batch_size=5, alpha=1.0, stratified=False)
MIXTURE = jr.mix(offline=(OFFLINE, 200), online=(ONLINE, 300))


def filled(buffer, value):
    numbers = value + np.arange(6 * buffer.num_envs, dtype=np.float32)
    return begun(buffer, plain_step(numbers.reshape(6, -1)))


@pytest.fixture(scope="module")
def states():
    return jax.jit(lambda: {"offline": filled(OFFLINE, 0), "online": filled(ONLINE, 100)})()


@jax.jit
def sample(states, seed):
    """Return a batch, one with another beta, each member's own sample, and `can_sample`."""
    key = jax.random.key(seed)
    keys = jax.random.split(key, 2)
    parts = [
        buffer.sample(states[name], key, size)
        for (name, buffer, size), key in zip(MIXTURE.members, keys, strict=True)
    ]
    batches = MIXTURE.sample(states, key), MIXTURE.sample(states, key, beta=0.7)
    return *batches, parts, MIXTURE.can_sample(states)


def test_members_keep_their_distributions(states):
    """Each part of a batch, of an exact size, equals the member's own sample with its own key."""
    batch, by_beta, parts, can_sample = jax.device_get(sample(states, 3))
    assert batch.source.tolist() == [0] * 200 + [1] * 300
    assert can_sample
    jax.tree.map(
        lambda got, *members: np.testing.assert_array_equal(got, np.concatenate(members)),
        batch.replace(source=None),
        *parts,
    )
    uniform, prioritized = np.split(by_beta.weight, [200])
    assert (uniform == 1).all()  # each member normalizes its own weights
    probability = batch.probability[200:]
    np.testing.assert_allclose(prioritized, (probability.min() / probability) ** 0.7, rtol=1e-5)


def test_priorities_reach_their_member(states):
    batch = sample(states, 0)[0]
    priority = np.where(np.asarray(batch.experience.obs) == 104, 5.0, 0.0)
    # `jr.jit` takes mixtures, too; it donates all states.
    changed = jr.jit(MIXTURE).update_priorities(
        jax.tree.map(np.asarray, states), batch.index, priority
    )
    obs = np.asarray(sample(changed, 1)[0].experience.obs)
    assert set(obs[200:]) == {104.0}
    assert len(set(obs[:200])) == 5
    assert int(changed["online"].sampler.num_stale_updates) == 0


def test_a_member_that_cannot_be_sampled_is_flagged_alone(states):
    batch, _, _, can_sample = sample(
        states | {"online": jax.jit(ONLINE.clear)(states["online"])}, 0
    )
    assert np.asarray(batch.is_valid).tolist() == [True] * 200 + [False] * 300
    assert not can_sample


def test_a_members_unlikely_item_does_not_silence_the_others():
    """Weights are normalized by the largest weight of the same member."""
    probability = np.array([0.25, 0.25, 0.5, 1e-6, 0.0], np.float32)
    source = np.array([0, 0, 1, 1, 2], np.int32)
    batch = jr.Sample(
        experience=None,
        index=jr.types.Index(row=source, lap=source.astype(np.uint32)),
        probability=probability,
        weight=None,
        is_valid=probability > 0,
        source=source,
    )
    weight = jax.jit(lambda batch: importance_weights(batch, beta=jnp.float32(1)))(batch)
    np.testing.assert_allclose(weight, [1, 1, 2e-6, 1, 0], rtol=1e-5)


def test_the_streams_of_all_members_end():
    """The newest transition of each is given up; items have no streams."""
    steps = jr.uniform(capacity=20, batch_size=2, autoreset="next_step")
    items = jr.items(capacity=20, batch_size=2)
    mixture = jr.mix(a=(steps, 1), b=(dataclasses.replace(steps, capacity=30), 1), c=(items, 1))
    block = plain_step(np.arange(4, dtype=np.float32)[:, None])

    @jax.jit
    def run():
        states = {name: begun(buffer, block) for name, buffer, _ in mixture.members[:2]}
        states["c"] = items.init(np.float32(0))
        ended = mixture.end_streams(states)
        step = plain_step(np.full(1, 9, np.float32))
        sizes = [steps.size(steps.add(one["a"], step)) for one in (ended, states)]
        return sizes, [one["b"].counters.last_flags[0] for one in (ended, states)]

    (ended, whole), flags = jax.device_get(run())
    assert ended == whole - 1
    assert flags[0] != flags[1]
