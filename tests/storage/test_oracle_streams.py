"""Random streams against the oracle: masks, ends, truncations, wraps, blocks, clears and priority
updates, hostile ones too."""

import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import SOAK
from tests.support.oracle import Oracle

FORMS = jr.autoreset.FORMS
BLOCK = 3
PRIORITIES = (0.0, 0.3, 1.0, 2.5, 7.0, float("nan"), float("inf"), -1.0)
# At most 39 rows are sampleable, with priorities within a factor of 25: a batch misses one of them
# in at most 1 of 10^4 runs.
DRAWS = 512


@dataclasses.dataclass(frozen=True)
class Config:
    autoreset: str
    allow_mask: bool
    n_step: int
    num_envs: int
    length: int
    prioritized: bool

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
        }
        if self.prioritized:
            return jr.prioritized(**shared, alpha=0.5, stratified=False, normalize_weights="buffer")
        return jr.uniform(**shared)

    def oracle(self):
        return Oracle(
            num_envs=self.num_envs,
            length=self.length,
            autoreset=self.autoreset,
            n_step=self.n_step,
            gamma=0.5,
        )


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


def step_of(oracle, clock, codes):
    """Return a step of every env from four-bit codes of mask, terminated and truncated; all
    observations differ."""
    envs = range(len(codes))
    return {
        "obs": [float(clock * 16 + env) for env in envs],
        "action": [clock * 16 + env for env in envs],
        "reward": [float((clock * 7 + env * 3) % 5 - 2) for env in envs],
        "terminated": [code & 6 == 2 for code in codes],
        "truncated": [code & 6 == 4 or code & 15 == 6 for code in codes],
        "final_obs": [clock * 16 + env + 0.5 for env in envs],
    }


class Pair:
    """A buffer and an oracle that receive the same steps."""

    def __init__(self, config):
        self.config, self.oracle, self.clock, self.drawn = config, config.oracle(), 0, []
        self.jitted = jr.jit(config.replay)
        self.state = self.jitted.init(self._step(step_of(self.oracle, 0, [0]), 0))

    def _step(self, step, env=slice(None)):
        obs = np.asarray(step["obs"], np.float32)
        return jr.Step(
            obs={"x": obs[env], "image": np.stack([obs, obs], -1).astype(np.uint8)[env]},
            action=np.asarray(step["action"], np.int32)[env],
            reward=np.asarray(step["reward"], np.float32)[env],
            terminated=np.asarray(step["terminated"])[env],
            truncated=np.asarray(step["truncated"])[env],
            final_obs=self._final(step, env) if self.config.autoreset == "same_step" else None,
            extras={"id": np.asarray(step["action"], np.int16)[env]},
        )

    def _final(self, step, env):
        obs = np.asarray(step["final_obs"], np.float32)
        return {"x": obs[env], "image": np.stack([obs, obs], -1).astype(np.uint8)[env]}

    def add(self, codes, priority):
        step, mask = self._next(codes)
        self.oracle.add(**step, mask=mask, priority=priority)
        self.state = self.jitted.add(
            self.state, self._step(step), _array(mask, bool), _array(priority, np.float32)
        )

    def extend(self, block):
        steps, masks = zip(*(self._next(codes) for codes in block), strict=True)
        for step, mask in zip(steps, masks, strict=True):
            self.oracle.add(**step, mask=mask)
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *map(self._step, steps))
        self.state = self.jitted.extend(
            self.state, stacked, None if masks[0] is None else np.asarray(masks)
        )

    def _next(self, codes):
        self.clock += 1
        step = step_of(self.oracle, self.clock, codes)
        mask = [code & 1 == 0 for code in codes] if self.config.allow_mask else None
        # the row after a done is never masked
        if self.config.autoreset == "next_step" and mask is not None:
            mask = [took or self.oracle.owes_final_row(env) for env, took in enumerate(mask)]
        return step, mask

    def clear(self):
        self.oracle.clear()
        self.state = self.jitted.clear(self.state)

    def draw(self, seed):
        batch = self.jitted.sample(self.state, jax.random.key(seed))
        sampleable = self.oracle.sampleable()
        rows = [
            sampleable[int(row)][0] if row_valid else None
            for row, row_valid in zip(batch.index.row, batch.is_valid, strict=True)
        ]
        self.drawn.append((batch.index, rows))
        return batch

    def update(self, which, priorities):
        """Update priorities of the rows of an earlier sample, which may be overwritten by now."""
        index, rows = self.drawn[which % len(self.drawn)]
        priorities = list(itertools.islice(itertools.cycle(priorities), DRAWS))
        self.oracle.update(rows, priorities)
        self.state = self.jitted.update_priorities(
            self.state, index, np.asarray(priorities, np.float32)
        )

    def check(self, seed):
        sampleable = self.oracle.sampleable()
        assert int(self.jitted.size(self.state)) == len(sampleable)
        everything = self.jitted.get(self.state, jnp.arange(self.config.replay.capacity))
        positive = set(sampleable)
        if self.config.prioritized:
            positive = self._check_priorities(everything)
        assert set(np.flatnonzero(everything.is_valid)) == set(sampleable)
        for row in sampleable:
            check_item(
                jax.tree.map(lambda leaf, row=row: np.asarray(leaf)[row], everything.experience),
                sampleable[row][1],
            )
        batch = self.draw(seed)
        assert bool(self.jitted.can_sample(self.state)) == bool(positive)
        assert (
            np.asarray(batch.is_valid).all() == np.asarray(batch.is_valid).any() == bool(positive)
        )
        assert all(
            np.isfinite(np.asarray(leaf)).all()
            for leaf in jax.tree.leaves((batch.experience, batch.probability))
        )
        if positive:
            rows = np.asarray(batch.index.row)
            assert set(rows) == positive
            items, whole = jax.tree.map(np.asarray, (batch.experience, everything.experience))
            jax.tree.map(
                lambda got, expected: np.testing.assert_array_equal(got, expected[rows]),
                items,
                whole,
            )
            np.testing.assert_allclose(
                batch.probability, np.asarray(everything.probability)[rows], rtol=1e-6
            )

    def _check_priorities(self, everything):
        expected = self.oracle.probabilities(alpha=0.5)
        got = np.asarray(everything.probability)
        for row, probability in expected.items():
            np.testing.assert_allclose(got[row], probability, rtol=1e-5)
        sampler = self.state.sampler
        assert float(sampler.max_priority) == np.float32(self.oracle.max_priority)
        assert int(sampler.num_bad_priorities) == self.oracle.num_bad_priorities
        assert int(sampler.num_stale_updates) == self.oracle.num_stale_updates
        positive = {row for row, probability in expected.items() if probability > 0}
        smallest = min((expected[row] for row in positive), default=1.0)
        weight = np.asarray(everything.weight)
        for row in positive:
            np.testing.assert_allclose(weight[row], (smallest / expected[row]) ** 0.4, rtol=1e-5)
        return positive


def check_item(item, expected):
    assert (item.obs["x"], item.action, item.reward) == (
        expected.obs,
        expected.action,
        expected.reward,
    )
    assert (item.discount, item.num_steps) == (expected.discount, expected.num_steps)
    assert item.next_obs["x"] == expected.next_obs
    assert item.obs["image"].tolist() == [np.float32(expected.obs).astype(np.uint8)] * 2
    assert item.next_obs["image"].tolist() == [np.float32(expected.next_obs).astype(np.uint8)] * 2
    assert item.extras["id"] == np.int16(expected.action)


def _array(values, dtype):
    return None if values is None else np.asarray(values, dtype)


# A configuration takes seconds to compile, a stream little to run. So a few configurations are
# tested with many streams each; the soak tests all. Each form has four of (n_step, prioritized):
# with and without priorities and masks, and small, middle and large n.
_SOME = (
    ((1, False), (10, False), (3, True), (2, True)),
    ((3, False), (2, False), (1, True), (10, True)),
    ((7, False), (4, False), (1, True), (2, True)),
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


@st.composite
def histories(draw, config):
    codes = st.lists(st.integers(0, 15), min_size=config.num_envs, max_size=config.num_envs)
    priorities = st.lists(
        st.sampled_from(PRIORITIES), min_size=config.num_envs, max_size=config.num_envs
    )
    some = st.lists(st.sampled_from(PRIORITIES), min_size=1, max_size=5)
    adds = st.tuples(
        st.just("add"), codes, st.one_of(st.none(), priorities) if config.prioritized else st.none()
    )
    operations = [
        adds,
        adds,
        adds,
        st.tuples(st.just("extend"), st.lists(codes, min_size=BLOCK, max_size=BLOCK)),
    ]
    operations += [st.tuples(st.just("check"))]
    if config.prioritized:
        operations += [st.tuples(st.just("update"), st.integers(0, 7), some)]
    history = draw(st.lists(st.one_of(*operations), min_size=1, max_size=6 * config.length))
    if draw(st.integers(0, 7)) == 0:
        history.insert(len(history) // 2, ("clear",))
    return history


@pytest.mark.parametrize(
    "config", TRIED, ids=lambda config: "-".join(map(str, dataclasses.astuple(config)))
)
def test_streams_agree_with_the_oracle(config):
    @hypothesis.seed(1000 * SOAK)
    @hypothesis.settings(max_examples=40 if SOAK else 16)
    @hypothesis.given(histories(config))
    def run(history):
        pair = Pair(config)
        for number, (kind, *arguments) in enumerate(history):
            if kind == "check":
                pair.check(number)
            elif kind == "update":
                if pair.drawn:
                    pair.update(*arguments)
            else:
                getattr(pair, kind)(*arguments)
        pair.check(len(history))

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
