"""Buffers of all kinds beside models of lists: random histories of all operations, with wraps,
masks, ends, truncations, blocks and hostile priorities.

One configuration covers many pairs of a view, a sampler, a form of autoreset, an operation, and so
on; together they cover all pairs but those of view and sampler, which `make test-all` has, too.
"""

import dataclasses
import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.views.item import Item
from tests.conftest import ALL, PLATFORM, SOAK
from tests.support import models, oracle_views
from tests.support.histories import KINDS, go_through
from tests.support.items import CHECKS
from tests.support.oracle import SHARES, Oracle
from tests.support.steps import nth


def reward_of(achieved, goal, step):
    return jnp.abs(achieved[0] - goal[0]) + 100 * step.reward


def reached(achieved, goal, step):
    return achieved[0] == goal[0]


def steps(n):
    return jr.views.TransitionView(n_step=n, gamma=0.5)  # exact powers


def with_goals(strategy, n=1, terminated_fn=None, unfinished=False):
    return jr.views.Hindsight(
        inner=steps(n),
        reward_fn=reward_of,
        terminated_fn=terminated_fn,
        strategy=strategy,
        unfinished=unfinished,
        relabel_fraction=0.7,
    )


sequence, stack, chunk, pair = (
    jr.views.SequenceView,
    jr.views.FrameStack,
    jr.views.ChunkView,
    jr.views.FutureView,
)
# Kinds of views and samplers, each with parameters that its configurations have in turn.
VIEWS = {
    "item": (Item(),),
    "steps": tuple(map(steps, (1, 3, 10, 2))),
    "sequence": (
        sequence(length=3, burn_in=2),
        sequence(length=1, period=2, cross_episodes=True),
        sequence(length=7, burn_in=4, recurrent_state_key="id"),
        sequence(length=2, burn_in=1, period=6, recurrent_state_key="id", cross_episodes=True),
        sequence(length=3, period=2),
    ),
    "stack": (
        stack(num_frames=4, inner=steps(3), pad="repeat", key="image", axis=-1),
        stack(num_frames=2, inner=sequence(length=3, burn_in=2), pad="zero", axis=0),
        stack(num_frames=3, inner=steps(1), pad="zero", axis=0),
        stack(num_frames=8, inner=steps(1), pad="repeat", key="image", axis=0),
    ),
    "chunk": (
        chunk(obs=(-3, -1, 0, 2), action=(-2, -1, 0, 1, 5), pad="zero"),
        chunk(obs=(-1, 0), action=4, pad="repeat"),
        chunk(obs=(0,), action=1, pad="zero"),
    ),
    "pair": (pair(gamma=0.9), pair(gamma=0.9, max_terminals=2), pair(gamma=0.9, unfinished=True)),
    "goals": (
        with_goals("future", 2, reached, unfinished=True),
        with_goals("final"),
        with_goals("episode", 2, reached),
        with_goals("random", 3),
        with_goals("episode", unfinished=True),
        with_goals("future", 3),
    ),
}
SAMPLERS = {
    "uniform": (jr.Uniform(), *(jr.Newest(num_rows=one) for one in (6, 1, 100))),
    "prioritized": (
        jr.Prioritized(alpha=0.5, stratified=False),
        jr.Prioritized(alpha=0.7),
        jr.Prioritized(alpha=0.0),
    ),
    "recent": tuple(jr.Recent(decay=one) for one in (0.9, 0.3, 1.0)),
    "episodes": (jr.UniformEpisodes(),),
    "queue": tuple(jr.Queue(max_uses=one) for one in (1, 3, 2)),
    "passes": (jr.WithoutReplacement(),),
    "blend": (jr.blend(uniform=(jr.Uniform(), 1), priority=(jr.Prioritized(alpha=0.5), 3)),),
}
NUM_ENDS = 4  # of episodes, that are looked for after a row
OPTIONAL = tuple(kind for kind in KINDS if kind not in ("add", "nothing", "pop", "reset"))
FACTORS = {
    "view": tuple(VIEWS),
    "sampler": tuple(SAMPLERS),
    "form": jr.autoreset.FORMS,
    "num_envs": (3, 1),
    "agents": (None, len(SHARES)),
    "platform": ("cpu", "gpu", "tpu"),
} | dict.fromkeys(("mask", "table", "is_population", *OPTIONAL), (False, True))


def fitting(values):
    """Return values of the factors without those that do not go together."""
    has = dict(values)
    if has["view"] == "item":
        has |= dict.fromkeys(("form", "agents"), None)
        has |= dict.fromkeys(("table", "drop", "end"), False)
    if has["view"] == "goals":
        has["agents"] = None
        has["form"] = has["form"].replace("_no_final_obs", "")
    if has["view"] in ("item", "sequence", "chunk") and has["sampler"] == "episodes":
        has["sampler"] = "uniform"
    if has["sampler"] not in ("prioritized", "blend"):
        has["add with priorities"] = has["update"] = False
    has["add to some"] &= has["mask"] or has["form"] == "same_step"
    return has


def cover():
    """Yield values of the factors that together have all pairs: of random ones always those with
    the most new pairs for what they take to compile."""
    r, left, number, pool = random.Random(2), 0, {}, []
    for _ in range(1000):
        values = fitting({name: r.choice(every) for name, every in FACTORS.items()})
        pairs = 0
        has = [item for item in values.items() if item[0] not in OPTIONAL or item[1]]
        for two in itertools.combinations(has, 2):
            if ALL or {name for name, _ in two} != {"view", "sampler"}:
                pairs |= 1 << number.setdefault(two, len(number))
        pool.append((values, pairs, 8 + sum(values[kind] for kind in OPTIONAL)))
        left |= pairs
    while left:
        gain = lambda one: (one[1] & left).bit_count() / one[2]  # noqa: B023
        values, pairs, _ = max(pool, key=gain)
        left &= ~pairs
        yield values


@dataclasses.dataclass(frozen=True)
class Config:
    view: object
    sampler: object
    operations: tuple[str, ...]
    form: str | None
    num_envs: int
    agents: int | None
    platform: str
    spare: int  # rows of a stream beyond the shortest that there is
    mask: bool
    table: bool
    is_population: bool
    has_metrics: bool

    @functools.cached_property
    def buffer(self):
        window = self.view.window
        sampler, consumes = self.sampler, self.sampler.consumes
        if isinstance(sampler, jr.UniformEpisodes) and (window.before, window.after) == (0, 1):
            sampler = jr.UniformEpisodes(unfinished=True)
        rows = 2 if self.form == "same_step" else 1
        return jr.ReplayBuffer(
            capacity=self.num_envs * (sampler.window(window).length - 1 + rows + self.spare),
            num_envs=self.num_envs,
            batch_size=4 if consumes else 256,
            sampler=sampler,
            view=self.view,
            autoreset=self.form,
            allow_mask=self.mask,
            allow_write="write" in self.operations or "map rows" in self.operations,
            track_episodes=self.table,
            num_agents=self.agents,
            platform=PLATFORM or self.platform,
        )

    def oracle(self):
        names = ("before", "after", "crosses_episodes", "period")
        names += ("needs_final_obs", "needs_next_obs")
        inner = self.view
        while hasattr(inner, "inner"):
            inner = inner.inner
        return Oracle(
            num_envs=self.num_envs,
            length=self.buffer.length,
            autoreset=self.form or "same_step_no_final_obs",
            n_step=getattr(inner, "n_step", 1),
            gamma=0.5,
            window={name: getattr(self.buffer.window, name) for name in names},
            agents=self.agents or 0,
        )

    def model(self, oracle, start):
        return models.MODELS[type(self.sampler)](self, oracle, start)

    def rewards(self, reward):
        """Return the leaves of a reward: with agents, that of each and that of all."""
        return reward if not self.agents else {"own": reward[..., None] * SHARES, "team": reward}

    def step(self, fields):
        """Return a step, or an item, of the oracle's fields. A goal is the negative of the
        observation."""
        if isinstance(self.view, Item):
            return {"x": fields["obs"], "reward": fields["reward"]}

        def obs_of(x):
            obs = {"x": x, "image": np.stack([x, x], -1).astype(np.uint8)}
            if isinstance(self.view, jr.views.Hindsight):
                obs |= {"achieved_goal": x[..., None] % 3, "desired_goal": -x[..., None]}
            return obs

        return jr.Step(
            obs=obs_of(fields["obs"]),
            action=fields["action"],
            reward=self.rewards(fields["reward"]),
            terminated=fields["terminated"],
            truncated=fields["truncated"],
            final_obs=obs_of(fields["final_obs"]) if self.form == "same_step" else None,
            extras={"id": fields["action"].astype(np.int16)},
        )

    def observe(self, state, batch, sampler, key):
        buffer, rows = self.buffer, jnp.arange(self.buffer.capacity)
        keys = jax.random.split(key, 2 if buffer.view.is_random else 1)
        seen = {
            "size": buffer.size(state),
            "can_sample": buffer.can_sample(state),
            "rows": jax.vmap(lambda key: buffer.get(state, rows, key))(keys),
            "batch": batch,
            "sampler": models.MODELS[type(self.sampler)].seen(sampler),
        }
        if self.table:
            table = buffer.episode_table(state)
            seen["table"] = {
                "to_end": table.steps_to_end(rows),
                "from_start": table.steps_from_start(rows),
                "is_complete": table.is_complete(rows),
                "ends": jnp.stack(table.kth_end(rows[:, None], jnp.arange(NUM_ENDS)), -1),
            }
        if buffer.allow_write:
            seen["num_ignored_writes"] = state.counters.num_ignored_writes.sum()
        if self.has_metrics:
            seen["metrics"] = buffer.metrics(state)
        if buffer.sampler.consumes:
            seen["has_room"] = jnp.array([buffer.can_add(state, num) for num in models.ROOMS])
        return seen

    def check(self, model, seen, is_asked, where=None):
        """Compare the buffer with the oracle; return the oracle's row of each sampled item. `where`
        is for the traceback."""
        oracle, rows, batch = model.oracle, seen["rows"], seen["batch"]
        candidates = {oracle.number(*one): one for one in oracle.candidates()}
        probabilities = model.probabilities()
        size = model.size(probabilities)
        assert seen["size"] == size
        assert seen["can_sample"] == (size > 0 and any(probabilities.values()))
        for valid in rows.is_valid:
            assert set(np.flatnonzero(valid)) == set(candidates)
        drawn = [
            oracle.row(*candidates[row]) if is_valid else None
            for row, is_valid in zip(batch.index.row.tolist(), batch.is_valid, strict=True)
        ]
        if not is_asked:
            return drawn
        expected = np.zeros(self.buffer.capacity)
        expected[list(probabilities)] = list(probabilities.values())
        np.testing.assert_allclose(rows.probability, [expected] * len(rows.is_valid), rtol=1e-5)
        leaves, structure = jax.tree.flatten(rows.experience)
        for (row, one), which in itertools.product(candidates.items(), range(len(rows.is_valid))):
            item = structure.unflatten([leaf[which, row] for leaf in leaves])
            CHECKS[type(self.view)](self, oracle, *one, item)
        if isinstance(rows.experience, jr.SequenceBatch):  # a loss may use the mask alone
            assert not rows.experience.mask[~rows.is_valid].any()
        model.check_batch(seen, probabilities)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(batch.experience))
        if not self.buffer.view.is_random:
            row, stored = batch.index.row[batch.is_valid], nth(rows.experience, 0)
            same = lambda got, all_: np.testing.assert_array_equal(got[batch.is_valid], all_[row])
            jax.tree.map(same, batch.experience, stored)
        if self.table:
            self._check_table(oracle, seen["table"])
        if self.buffer.allow_write:
            assert seen["num_ignored_writes"] == oracle.num_ignored_writes
        if self.has_metrics:
            self._check_metrics(oracle, seen)
        return drawn

    def _check_table(self, oracle, table):
        for env, rows in enumerate(oracle.streams):
            spans, own = oracle_views.spans(oracle, rows), env * oracle.length
            newest, oldest = len(rows) - 1, max(len(rows) - oracle.length, 0)
            for position, index in oracle.stored(env):
                first, end = spans[index] or (index, index)
                found = nth(table, own + position)
                assert found["to_end"] == (newest if end is None else end) - index
                assert found["from_start"] == index - max(first, oldest)
                is_complete = bool(spans[index]) and end is not None and first >= oldest
                assert found["is_complete"] == is_complete
                ahead = sorted({one[1] for one in spans[index:] if one and one[1] is not None})
                ends = [
                    (newest, False),
                    *((one, True) for one in ahead),
                    *[(newest, False)] * NUM_ENDS,
                ]
                assert found["ends"].tolist() == [
                    [at - index, is_one] for at, is_one in ends[:NUM_ENDS]
                ]
            assert not table["is_complete"][own + len(rows) : own + oracle.length].any()

    def _check_metrics(self, oracle, seen):
        metrics = seen["metrics"]
        assert metrics["size"] == seen["size"]
        stored = sum(len(oracle.stored(env)) for env in range(self.num_envs))
        np.testing.assert_allclose(metrics["fill"], stored / self.buffer.capacity, rtol=1e-6)
        for name in metrics.keys() - {"size", "fill", "mean_priority", "num_new", "num_lost"}:
            models.check_number(oracle, name, metrics[name])


def go_together(view, sampler):
    try:
        return bool(sampler.window(view.window))
    except ValueError:
        return False


def matrix():
    views, samplers = (
        {name: itertools.cycle(every) for name, every in all_.items()} for all_ in (VIEWS, SAMPLERS)
    )
    for number, values in enumerate(cover()):
        sampler = next(samplers[values["sampler"]])
        view = next(one for one in views[values["view"]] if go_together(one, sampler))
        kinds = ["nothing", "add", *(kind for kind in OPTIONAL if values[kind])]
        kinds += ["pop"] * sampler.consumes + ["reset"] * values["update"]
        others = {name: values[name] for name in FACTORS if name not in OPTIONAL}
        config = Config(
            **others | {"view": view, "sampler": sampler},
            operations=tuple(kinds),
            spare=(0, 3, 14, 1)[number % 4],
            has_metrics=number % 10 == 0,
        )
        yield pytest.param(config, id=f"config{number}-{values['view']}-{values['sampler']}")


MATRIX = list(matrix())


@pytest.mark.parametrize("config", MATRIX)
def test_buffers_agree_with_models_of_lists(config):
    go_through(config, range(100 if SOAK else 16 if ALL else 6))
