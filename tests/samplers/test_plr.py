"""The levels of examples/plr.py beside arrays of NumPy: their law, and which are stored."""

import pathlib
import runpy

import jax
import numpy as np
import pytest

import jaxreplay as jr
from tests.samplers.test_laws import check as check_law
from tests.support.steps import nth

PATH = str(pathlib.Path(__file__).parents[2] / "examples" / "plr.py")
PLR, init, insert = (runpy.run_path(PATH)[name] for name in ("PLR", "init", "insert"))
SEEDS, TIME, ROWS = 40, 16, np.arange(3)
SCORES = np.float32([-1, 0, 0.25, 0.25, 0.5, 1, np.nan, np.inf])


@pytest.mark.parametrize("by_rank", [True, False])
def test_levels_are_those_of_arrays(by_rank):
    sampler = PLR(temperature=0.5, staleness=0.3, by_rank=by_rank)
    buffer = jr.items(capacity=3, batch_size=2, sampler=sampler, allow_write=True)

    def step(state, given):
        names, scores, update = given
        seen = buffer.size(state), buffer.get(state, ROWS)
        items = {"level": (names % 3, names[:, None] // 3), "name": names}
        state, row = insert(buffer, state, items, scores)
        batch = buffer.sample(state, jax.random.key(names[0] + 6 * names[1]))
        return buffer.update_priorities(state, batch.index, update), (*seen, row, batch)

    @jax.jit
    @jax.vmap
    def run(*given):
        zero = np.int32(0)
        state = init(buffer, {"level": (zero, zero[None]), "name": zero})
        state, seen = jax.lax.scan(step, state, given)
        return seen, buffer.sample(state, jax.random.key(0), 20_000).index.row

    def law():
        def shares(one):
            one = one * is_level if (one * is_level).any() else is_level
            return one / max(one.sum(), 1e-9)

        is_level, h = score > -np.inf, np.maximum(score, 0)
        if by_rank:
            h[np.argsort(-score, kind="stable")] = 1 / (1 + ROWS)
        return 0.7 * shares(h**2) + 0.3 * shares(now - time)

    r = np.random.default_rng(0)
    names = r.integers(6, size=(SEEDS, TIME, 2), dtype=np.int32)
    scores, updates = r.choice(SCORES, (2, SEEDS, TIME, 2))
    every, draws = jax.device_get(run(names, scores, updates))
    cases = set()
    for seed in range(SEEDS):
        held, score, time, now = np.full(3, -1), np.full(3, -np.inf), np.zeros(3), 0
        for at in np.ndindex(TIME):
            size, stored, rows, batch = nth(every, (seed, *at))
            np.testing.assert_allclose(stored.probability, law(), rtol=1e-5)
            assert stored.experience["name"][:size].tolist() == held[held >= 0].tolist()
            for name, new, row in zip(names[seed][at], scores[seed][at], rows, strict=True):
                least = np.where(held < 0, -1, law())
                fits = held == name if name in held else least <= least.min() + 1e-6
                fits = [k if name in held or new > score[k] else -1 for k in ROWS[fits]]
                assert row in (fits if np.isfinite(new) else [-1])
                cases.add((name in held, (held >= 0).sum(), row >= 0))
                now += 1
                if row >= 0:
                    held[row], score[row], time[row] = name, new, now
            now, row = now + 2, batch.index.row
            assert (batch.is_valid == (held[0] >= 0)).all()
            assert (batch.experience["name"] == held[row])[batch.is_valid].all()
            for new, k in sorted(zip(updates[seed][at], row[batch.is_valid], strict=False)):
                if np.isfinite(new):  # the largest comes last
                    score[k], time[k] = new, now
        check_law(np.bincount(draws[seed], minlength=3), law())
    assert len(cases) == 14  # stored or new, 0 to 3 levels, kept or not
