"""Passes over the sampleable rows by hand. `support/models.py` has a model of lists: each row once,
in a new order for each pass, while rows come and go."""

import jax
import numpy as np
from scipy import stats

from jaxreplay.samplers.without_replacement import WithoutReplacement
from tests.support.sampling import add, fed, make_buffer, pop, rewards, step_of


def test_orders_are_all_alike():
    """The 24 orders of a first pass over 4 rows are equally likely; the fixed keys fail by chance
    once in 10^4."""
    buffer, state = make_buffer(WithoutReplacement(), num_envs=2, length=12)
    state = fed(buffer, state, range(3))
    draw = lambda seed: buffer.pop(state, jax.random.key(seed), 4)[1].index.row
    rows = np.asarray(jax.jit(jax.vmap(draw))(np.arange(10_000)))
    counts = np.unique(rows @ [1, 24, 24**2, 24**3], return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-4


def test_a_pass_that_lost_almost_all_its_rows_gives_way_to_a_new_one():
    """If 10 of a pass's 11 rows are overwritten, the next batch is of a new pass over the current
    11 rows."""
    buffer, state = make_buffer(WithoutReplacement(), length=12)
    for seed, times in enumerate((range(12), range(12, 22))):
        state, _ = pop(buffer, fed(buffer, state, times), jax.random.key(seed), 1)
    assert (int(state.sampler.position), np.asarray(state.sampler.num_rows).sum()) == (1, 11)


def test_a_drop_begins_a_new_pass():
    """Of an episode of 3 steps, and of 4 steps that are given up; a pass is at its third row."""
    buffer, state = make_buffer(WithoutReplacement(), length=16)
    drop = jax.jit(buffer.drop)
    for time in range(7):
        step = step_of([float(time)]).replace(terminated=np.array([time == 2]))
        state = add(buffer, state, step)
    for seed in range(4):
        begun, _ = pop(buffer, state, jax.random.key(seed), 2)
        _, batch = pop(buffer, drop(begun, np.ones(1, bool)), jax.random.key(9 + seed), 4)
        assert sorted(rewards(batch)) == [0, 1, 2]
