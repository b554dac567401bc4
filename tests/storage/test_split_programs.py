"""Programs over rows on the host, each divided in two."""

import jax
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import thorough


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


@pytest.mark.parametrize("place", ["host", thorough("files")])
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
