"""Mixtures: exact counts, the members' own distributions, and priorities that reach a member."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.targets import importance_weights

OFFLINE = jr.uniform(capacity=32, num_envs=1, batch_size=7, autoreset="same_step_no_final_obs")
ONLINE = jr.prioritized(
    capacity=16,
    num_envs=2,
    batch_size=5,
    autoreset="same_step_no_final_obs",
    alpha=1.0,
    stratified=False,
)
REPLAY = jr.mix(offline=(OFFLINE, 200), online=(ONLINE, 300))


def filled(buffer, value, steps=6):
    axes = (steps, buffer.num_envs)
    obs = value + jnp.arange(steps * buffer.num_envs, dtype=jnp.float32).reshape(axes)
    flag = jnp.zeros(axes, bool)
    block = jr.Step(obs=obs, action=obs, reward=obs, terminated=flag, truncated=flag)
    return jax.jit(buffer.extend)(buffer.init(jax.tree.map(lambda x: x[0, 0], block)), block)


def states():
    return {"offline": filled(OFFLINE, 0), "online": filled(ONLINE, 100)}


def test_a_batch_has_exact_counts_and_each_item_its_source():
    batch = jax.jit(REPLAY.sample)(states(), jax.random.key(0))
    assert batch.source.tolist() == [0] * 200 + [1] * 300
    assert ((batch.experience.obs >= 100) == (batch.source == 1)).all()
    assert batch.is_valid.all()


def sample_at(states, beta):
    return REPLAY.sample(states, jax.random.key(3), beta=beta)


def test_members_keep_their_laws():
    """Each part of a batch equals the member's own sample with its own key."""
    mine, keys = states(), jax.random.split(jax.random.key(3), 2)
    batch = jax.jit(REPLAY.sample)(mine, jax.random.key(3))
    parts = [
        jax.jit(r.sample, static_argnums=2)(mine[n], k, s)
        for (n, r, s), k in zip(REPLAY.members, keys, strict=True)
    ]
    np.testing.assert_array_equal(
        batch.experience.obs, jnp.concatenate([part.experience.obs for part in parts])
    )
    np.testing.assert_array_equal(
        batch.probability, jnp.concatenate([part.probability for part in parts])
    )
    np.testing.assert_array_equal(batch.weight, jnp.concatenate([part.weight for part in parts]))
    uniform, prioritized = np.split(np.asarray(jax.jit(sample_at)(mine, 0.7).weight), [200])
    assert (uniform == 1).all()  # each member normalizes its own weights
    probability = np.asarray(batch.probability[200:])
    np.testing.assert_allclose(prioritized, (probability.min() / probability) ** 0.7, rtol=1e-5)


def test_priorities_go_home():
    mine = states()
    batch = jax.jit(REPLAY.sample)(mine, jax.random.key(0))
    priority = jnp.where(batch.experience.obs == 104, 5.0, 0.0)
    changed = jax.jit(REPLAY.update_priorities)(mine, batch, priority)
    again = jax.jit(REPLAY.sample)(changed, jax.random.key(1))
    assert set(np.asarray(again.experience.obs)[200:]) == {104.0}
    assert len(set(np.asarray(again.experience.obs)[:200])) == 5
    assert int(changed["online"].sampler.num_stale_updates) == 0


def test_a_member_that_cannot_be_sampled_is_flagged_alone():
    mine = states() | {"online": jr.jit(ONLINE).clear(filled(ONLINE, 0))}
    assert not REPLAY.can_sample(mine)
    assert REPLAY.can_sample(states())
    assert (
        jax.jit(REPLAY.sample)(mine, jax.random.key(0)).is_valid.tolist()
        == [True] * 200 + [False] * 300
    )


def test_wrong_members_are_named():
    items = jr.items(capacity=4, batch_size=1)
    with pytest.raises(ValueError, match="no member was given"):
        jr.mix()
    with pytest.raises(
        ValueError, match=r"mix: offline must be \(buffer, number of items\), .*, got 3"
    ):
        jr.mix(offline=3)  # pyright: ignore
    with pytest.raises(ValueError, match="Mixture: offline must be an int of at least 1, got 0"):
        jr.mix(offline=(items, 0))
    with pytest.raises(
        ValueError,
        match="states must be a dict with the members' names, offline, online; got offline",
    ):
        REPLAY.can_sample({"offline": 0})
    other = jr.mix(offline=(OFFLINE, 1), other=(items, 1))
    with pytest.raises(ValueError, match="sample: other:\n  obs: missing, expected float32"):
        other.sample(
            {"offline": filled(OFFLINE, 0), "other": items.init(jnp.zeros(()))}, jax.random.key(0)
        )
    with pytest.raises(
        ValueError,
        match=r"update_priorities: priority: got float32\[50\], expected float32\[500\], one for "
        r"each row",
    ):
        REPLAY.update_priorities(
            states(), jax.jit(REPLAY.sample)(states(), jax.random.key(0)), jnp.ones(50)
        )
    with pytest.raises(
        ValueError,
        match="transform: takes a ReplayBuffer, got a Mixture; change how each member is read "
        "before",
    ):
        jr.transform(REPLAY, lambda item, key: item)  # pyright: ignore
    with pytest.raises(
        ValueError,
        match=r"update_priorities: batch must be the whole batch .*; got a Index",
    ):
        REPLAY.update_priorities(
            states(), jax.jit(REPLAY.sample)(states(), jax.random.key(0)).index, jnp.ones(500)
        )  # pyright: ignore
    batch = jax.jit(REPLAY.sample)(states(), jax.random.key(0)).replace(source=None)
    with pytest.raises(ValueError, match=r"the mixture's sample returned, .* got a batch of one"):
        REPLAY.update_priorities(states(), batch, jnp.ones(500))


def test_a_members_unlikely_item_does_not_silence_the_others():
    """Weights are normalized by the largest weight of the same member."""
    probability, source = jnp.array([0.25, 0.25, 0.5, 1e-6, 0.0]), jnp.array([0, 0, 1, 1, 2])
    index = jr.types.Index(row=source, lap=source.astype(jnp.uint32))
    batch = jr.Sample(
        experience=None,
        index=index,
        probability=probability,
        weight=None,
        is_valid=probability > 0,
        source=source,
    )
    weight = importance_weights(batch, beta=1.0)
    np.testing.assert_allclose(weight, [1, 1, 2e-6, 1, 0], rtol=1e-5)
