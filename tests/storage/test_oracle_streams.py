"""Random streams against the oracle: masks, ends, truncations, wraps, blocks, clears and priority
updates, hostile ones too."""

import dataclasses
import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import ALL, SOAK
from tests.support.histories import go_through, histories, long_episodes
from tests.support.oracle import Oracle

FORMS = jr.autoreset.FORMS
# At most 39 rows are sampleable, with priorities within a factor of 25: a batch misses one of them
# in at most 1 of 10^4 runs.
DRAWS = 512


def step(config, fields):
    """Return a step of the oracle's fields, with two leaves of an observation."""

    def obs_of(values):
        obs = values.astype(np.float32)
        return {"x": obs, "image": np.stack([obs, obs], -1).astype(np.uint8)}

    return jr.Step(
        obs=obs_of(fields["obs"]),
        action=fields["action"].astype(np.int32),
        reward=fields["reward"].astype(np.float32),
        terminated=fields["terminated"],
        truncated=fields["truncated"],
        final_obs=obs_of(fields["final_obs"]) if config.autoreset == "same_step" else None,
        extras={"id": fields["action"].astype(np.int16)},
    )


@dataclasses.dataclass(frozen=True)
class Config:
    autoreset: str
    allow_mask: bool
    n_step: int
    num_envs: int
    length: int
    prioritized: bool
    platform: str | None = None

    step = step

    @functools.cached_property
    def replay(self):
        shared = {
            "capacity": self.num_envs * self.length,
            "num_envs": self.num_envs,
            "batch_size": DRAWS,
            "autoreset": self.autoreset,
            "n_step": self.n_step,
            # exact powers: rewards are sums of small integers, so every target is exact in float32
            "gamma": 0.5,
            "allow_mask": self.allow_mask,
            "allow_write": self.n_step > 1,
            "platform": self.platform,
        }
        if self.prioritized:
            return jr.prioritized(**shared, alpha=0.5, stratified=False)
        return jr.uniform(**shared)

    def oracle(self):
        return Oracle(
            num_envs=self.num_envs,
            length=self.length,
            autoreset=self.autoreset,
            n_step=self.n_step,
            gamma=0.5,
        )

    def observe(self, state, key):
        sampler = state.sampler
        names = ("max_priority", "num_bad_priorities", "num_stale_updates")
        return {
            "size": self.replay.size(state),
            "can_sample": self.replay.can_sample(state),
            "rows": self.replay.get(state, jnp.arange(self.replay.capacity)),
            "batch": self.replay.sample(state, key),
            "metrics": self.replay.metrics(state),
            "sampler": {name: getattr(sampler, name) for name in names if self.prioritized},
        }

    def check(self, oracle, observed, is_asked):
        """Compare the buffer with the oracle; return the oracle's row of each sampled item."""
        sampleable, rows, batch = oracle.sampleable(), observed["rows"], observed["batch"]
        assert observed["size"] == len(sampleable)
        assert set(np.flatnonzero(rows.is_valid)) == set(sampleable)
        drawn = [
            sampleable[row][0] if is_valid else None
            for row, is_valid in zip(batch.index.row.tolist(), batch.is_valid, strict=True)
        ]
        if not is_asked:
            return drawn
        ignored = observed["metrics"].get("num_ignored_writes", 0)
        assert ignored == oracle.num_ignored_writes
        check_items(rows.experience, {row: one for row, (_, one) in sampleable.items()})
        positive = self._check_priorities(oracle, observed) if self.prioritized else set(sampleable)
        assert observed["can_sample"] == bool(positive)
        assert batch.is_valid.all() == batch.is_valid.any() == bool(positive)
        for leaf in jax.tree.leaves((batch.experience, batch.probability)):
            assert np.isfinite(leaf).all()
        if positive:
            assert set(batch.index.row) == positive
            jax.tree.map(
                lambda got, stored: np.testing.assert_array_equal(got, stored[batch.index.row]),
                batch.experience,
                rows.experience,
            )
            np.testing.assert_allclose(
                batch.probability, rows.probability[batch.index.row], rtol=1e-6
            )
        return drawn

    def _check_priorities(self, oracle, observed):
        """Return the rows of positive priority."""
        expected, rows = oracle.probabilities(alpha=0.5), observed["rows"]
        for row, probability in expected.items():
            np.testing.assert_allclose(rows.probability[row], probability, rtol=1e-5)
        for name, value in observed["sampler"].items():
            assert value == np.float32(getattr(oracle, name)), name
        positive = {row for row, probability in expected.items() if probability > 0}
        smallest = min((expected[row] for row in positive), default=1.0)
        for row in positive:
            weight = (smallest / expected[row]) ** 0.4
            np.testing.assert_allclose(rows.weight[row], weight, rtol=1e-5)
        return positive


def check_items(items, expected):
    """Compare the items of rows with transitions by row number."""
    rows = list(expected)
    of = lambda name: np.array([getattr(expected[row], name) for row in rows])
    for name in ("action", "reward", "discount", "num_steps"):
        np.testing.assert_array_equal(getattr(items, name)[rows], of(name))
    np.testing.assert_array_equal(items.extras["id"][rows], of("action").astype(np.int16))
    for name in ("obs", "next_obs"):
        got, x = getattr(items, name), of(name).astype(np.float32)
        np.testing.assert_array_equal(got["x"][rows], x)
        image = np.stack([x, x], -1).astype(np.uint8)
        np.testing.assert_array_equal(got["image"][rows], image)


def _pool():
    """Yield configurations of all three forms, with and without masks, n from 1 to 10, uniform and
    prioritized. Streams are at least as long as one window."""
    shapes = itertools.cycle([(1, 0), (3, 2), (2, 1), (1, 5), (3, 0)])
    for form, n_step in itertools.product(FORMS, range(1, 11)):
        num_envs, spare = next(shapes)
        shortest = n_step + (2 if form == "same_step" else 1)
        for prioritized in (False, True):
            allow_mask = bool((n_step + prioritized) % 2)
            yield Config(form, allow_mask, n_step, num_envs, shortest + spare, prioritized)


POOL = tuple(_pool())
# A configuration takes seconds to compile, a history little to run. So a few configurations go
# through many histories each; the soak tests all. Each form has four of (n_step, prioritized): with
# and without priorities and masks, and small, middle and large n.
_SOME = (
    ((3, True), (10, False), (1, False), (2, True)),
    ((1, True), (2, False), (3, False), (10, True)),
    ((4, False), (7, False), (1, True), (2, True)),
)
TRIED = (
    POOL
    if SOAK
    else tuple(
        POOL[20 * form + 2 * (n - 1) + prioritized]
        for form, some in enumerate(_SOME)
        for n, prioritized in some
    )
)
# In the forms of states of other platforms: one configuration of each autoreset.
ELSEWHERE = tuple(
    dataclasses.replace(TRIED[at], platform=platform)
    for platform, places in (("gpu", (0, 5, 11)), ("tpu", (3, 4, 10)))
    for at in places
    if not SOAK
)


@pytest.mark.parametrize(
    "config", TRIED + ELSEWHERE, ids=lambda config: "-".join(map(str, dataclasses.astuple(config)))
)
def test_streams_agree_with_the_oracle(config):
    @hypothesis.seed(1000 * SOAK)
    @hypothesis.settings(max_examples=100 if ALL else 6 if config.platform else 16)
    @hypothesis.example(long_episodes(config))
    @hypothesis.given(histories(config))
    def run(history):
        go_through(config, history)

    run()


def test_the_pool_is_what_it_says():
    assert len(POOL) <= 60
    seen = {(c.autoreset, c.allow_mask, c.n_step, c.prioritized) for c in POOL}
    for form, prioritized in itertools.product(FORMS, (False, True)):
        mine = {(allow_mask, n) for f, allow_mask, n, p in seen if (f, p) == (form, prioritized)}
        assert {n for _, n in mine} == set(range(1, 11))
        assert {allow_mask for allow_mask, _ in mine} == {False, True}
    for form in FORMS:
        mine = [c for c in TRIED if c.autoreset == form]
        assert {(c.prioritized, c.allow_mask) for c in mine} == set(
            itertools.product((False, True), repeat=2)
        )
    assert {1, 2, 3, 10} <= {c.n_step for c in TRIED}
