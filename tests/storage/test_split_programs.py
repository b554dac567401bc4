"""Programs over rows on the host, each divided in two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr

EXAMPLE = jr.Step(
    {"achieved_goal": np.float32(0), "desired_goal": np.float32(0)},
    np.float32(0),
    np.float32(0),
    terminated=False,
    truncated=False,
)


def relabelled(buffer, scale):
    return jr.relabel(buffer, lambda step, next_obs: scale(step.obs["achieved_goal"]))


def transformed(buffer, scale):
    new = lambda item, key: item.replace(reward=scale(item.obs["achieved_goal"]))
    return jr.transform(buffer, new)


def with_goals(buffer, scale):
    reward = lambda achieved, goal, step: scale(step.obs["achieved_goal"])
    return jr.hindsight(buffer, reward, relabel_fraction=1.0, unfinished=True)


@pytest.mark.parametrize(
    ("wrapped", "place"),
    [
        (relabelled, "host"),
        pytest.param(transformed, "host", marks=pytest.mark.thorough),
        pytest.param(with_goals, "host", marks=pytest.mark.thorough),
        pytest.param(relabelled, "files", marks=pytest.mark.thorough),
    ],
)
def test_views_that_differ_in_a_constant_of_a_jitted_function_are_told_apart(
    wrapped, place, tmp_path
):
    """The reward is 1 * factor; the factor is an array inside of a nested `jit`."""
    found = []
    for factor in (2.0, 8.0):
        factors = np.full(2, factor, np.float32)  # an array is no part of a jaxpr's text
        scale = jax.jit(lambda x, factors=factors: x * jnp.asarray(factors)[0])
        plain = jr.uniform(capacity=8, batch_size=4, autoreset="next_step")
        rows = "host" if place == "host" else tmp_path / str(factor)
        tier = jr.tiered(wrapped(plain, scale), rows=rows)
        state = tier.init(EXAMPLE)
        block = jax.tree.map(lambda x: np.ones_like(x, shape=(3, 1)), EXAMPLE)
        state = tier.extend(state, block.replace(terminated=np.zeros((3, 1), bool)))
        found.append(tier.sample(state, jax.random.key(0)).experience.reward.tolist())
        tier.close()
    assert found == [[2.0] * 4, [8.0] * 4]


def test_prints_of_a_view_are_kept(capfd):
    """One print depends on no row, one on rows, and one is inside of a branch of a condition."""

    def shown(item, key):
        jax.debug.print("a key")
        jax.debug.print("x is {}", item["x"][0])
        jax.lax.cond(item["x"][0] > 2, lambda: jax.debug.print("large"), lambda: None)
        return {"x": item["x"]}

    tier = jr.tiered(jr.transform(jr.items(capacity=8, batch_size=1), shown), rows="host")
    state = tier.extend(tier.init({"x": np.zeros(3)}), {"x": np.full((2, 1, 3), 3.0, "f")})
    jax.block_until_ready(tier.sample(state, jax.random.key(0)))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.splitlines()) == ["a key", "large", "x is 3.0"]


@pytest.mark.parametrize("place", ["host", pytest.param("files", marks=pytest.mark.thorough)])
def test_large_rows_of_a_batch_are_not_copied_again(place, tmp_path):
    buffer = jr.items(capacity=8, batch_size=8)
    tier = jr.tiered(buffer, rows="host" if place == "host" else tmp_path / "rows")
    state = tier.init(np.zeros(2**17, np.uint8))
    block = lambda value: np.full((5, 1, 2**17), value, np.uint8)

    gathered = []

    def taken(name, rows):
        gathered.append(take(name, rows))
        return gathered[-1]

    state = tier.extend(state, block(7))
    take, tier._store.take = tier._store.take, taken
    rows = tier.sample(state, jax.random.key(0)).experience
    if jax.default_backend() == "cpu":
        assert rows.unsafe_buffer_pointer() in [one.ctypes.data for one in gathered]
    plan = tier.draw(state, jax.random.key(0))
    read = jax.jit(tier.read)(plan, tier.take(plan)).experience
    state = tier.extend(state, block(9))
    for one in (rows, read):
        assert one.shape == (8, 2**17)
        assert np.unique(one).tolist() == [7]
    tier.close()
