"""Every view against the oracle, on random streams: masks, ends, truncations, blocks, wraps and
clears."""

import dataclasses
import functools
import itertools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import ALL, SOAK
from tests.storage.test_oracle_streams import FORMS, step
from tests.support import oracle_views, sampling
from tests.support.histories import go_through, histories, long_episodes
from tests.support.oracle import Oracle
from tests.support.steps import begun, nth, plain_step


def reward_of(achieved, goal, step):
    return jnp.abs(achieved[0] - goal[0]) + 100 * step.reward


def reached(achieved, goal, step):
    return achieved[0] == goal[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(sampling.Config):
    """A view in a buffer of short streams, with its oracle and the oracle's candidates."""

    sampler: Any = jr.Uniform()  # noqa: RUF009
    prioritized = False  # a sampler's priorities stay what they are at first

    @functools.cached_property
    def replay(self):
        return dataclasses.replace(self.buffer, batch_size=64)

    def oracle(self):
        n_step = getattr(transition_of(self.view), "n_step", 1)
        return Oracle(
            num_envs=self.num_envs,
            length=self.length,
            autoreset=self.autoreset,
            n_step=n_step,
            gamma=0.5,
        )

    def step(self, fields):
        """Return a step whose goal is the negative of the observation."""

        def with_goals(obs):
            x = obs["x"][..., None]
            return {**obs, "achieved_goal": x % 3, "desired_goal": -x}

        plain = step(self, fields)
        final_obs = plain.final_obs and with_goals(plain.final_obs)
        return plain.replace(obs=with_goals(plain.obs), final_obs=final_obs)

    def observe(self, state, key):
        buffer, rows = self.replay, jnp.arange(self.replay.capacity)
        keys = jax.random.split(key, 3 if buffer.view.is_random else 1)
        return {
            "size": buffer.size(state),
            "rows": jax.vmap(lambda key: buffer.get(state, rows, key))(keys),
            "batch": buffer.sample(state, key),
        }

    def check(self, oracle, observed, is_asked):
        if not is_asked:
            return
        expected = {
            env * self.length + position: (env, index)
            for env, position, index in oracle_views.anchors(oracle, **self.window)
        }
        assert observed["size"] == len(expected)
        for number in range(len(observed["rows"].is_valid)):
            got = nth(observed["rows"], number)
            assert set(np.flatnonzero(got.is_valid)) == set(expected)
            for row, (env, index) in expected.items():
                CHECKS[type(self.view)](self, oracle, env, index, nth(got.experience, row))
            assert set(np.flatnonzero(got.probability)) == set(expected)
            if isinstance(got.experience, jr.SequenceBatch):  # a loss may use the mask alone
                assert not got.experience.mask[~got.is_valid].any()
            np.testing.assert_allclose(got.probability.sum(), bool(expected), rtol=1e-5)
        batch = observed["batch"]
        assert batch.is_valid.all() == bool(expected)
        assert not expected or set(batch.index.row) <= set(expected)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(batch.experience))


def transition_of(view):
    """Return the innermost view."""
    return transition_of(view.inner) if hasattr(view, "inner") else view


def sequence_of(view, oracle, env, index):
    fields = {name: getattr(view, name) for name in ("length", "burn_in", "cross_episodes")}
    return oracle_views.sequence(oracle, env, index, **fields)


def check_sequence(config, oracle, env, index, item):
    steps = sequence_of(config.view, oracle, env, index)
    values = lambda name: [
        getattr(step["row"], name) if step and step["is_step"] else 0 for step in steps
    ]
    assert item.obs["x"].tolist() == [0 if step is None else step["row"].obs for step in steps]
    assert item.is_first.tolist() == [step is not None and step["is_first"] for step in steps]
    assert item.mask.tolist() == [step is not None and step["learns"] for step in steps[:-1]]
    for name in ("action", "reward", "terminated", "truncated"):
        assert getattr(item, name).tolist() == values(name)[:-1]
    ids = np.int16(values("action"))
    if config.view.recurrent_state_key is None:
        assert item.extras["id"].tolist() == ids[:-1].tolist()
    else:
        assert (item.extras, item.recurrent_state) == ({}, ids[0])


def check_transition(item, expected):
    for name in ("action", "reward", "discount", "num_steps"):
        assert getattr(item, name) == getattr(expected, name), name


def transition_at(config, oracle, env, index):
    return oracle.sampleable()[env * config.length + index % config.length][1]


def check_stack(config, oracle, env, index, item):
    view = config.view
    stacked = lambda at: oracle_views.stack(oracle, env, at, view.num_frames, view.pad)
    image = lambda frames: [
        [0, 0] if x is None else [np.float32(x).astype(np.uint8)] * 2 for x in frames
    ]
    if isinstance(view.inner, jr.views.SequenceView):
        steps = sequence_of(view.inner, oracle, env, index)
        frames = [
            [None] * view.num_frames if step is None else stacked(index - view.inner.burn_in + t)
            for t, step in enumerate(steps)
        ]
        assert item.obs["image"].tolist() == [image(f) for f in frames]
        return
    expected = transition_at(config, oracle, env, index)
    check_transition(item, expected)
    following = next(
        at
        for at in range(index, index + view.inner.n_step + 1)
        if oracle.streams[env][at].obs == expected.next_obs
    )
    for obs, at in ((item.obs, index), (item.next_obs, following)):
        got = np.moveaxis(obs["image"], view.axis, 0)
        assert got.tolist() == image(stacked(at))
        x = [0 if frame is None else frame for frame in stacked(at)]
        assert obs["x"].tolist() == (x[-1] if view.key else x)


def check_pair(config, oracle, env, index, item):
    rows = oracle.streams[env]
    bound = oracle_views.horizon(oracle, env, index, config.view.max_terminals)
    assert min(bound, 1) <= item.num_steps <= bound
    assert (item.obs["x"], item.action) == (rows[index].obs, rows[index].action)
    assert item.future_obs["x"] == rows[index + item.num_steps].obs


def check_hindsight(config, oracle, env, index, item):
    view, rows = config.view, oracle.streams[env]
    plain = transition_at(config, oracle, env, index)
    first, last = oracle_views.spans(oracle, rows)[index]
    last = len(rows) - 1 if last is None else last
    first = max(first, len(rows) - oracle.length) if view.unfinished else first
    allowed = {
        "future": lambda: rows[index + 1 : last + 1],
        "final": lambda: [rows[last]],
        "episode": lambda: rows[first : last + 1],
        "random": lambda: [
            oracle.streams[e][at] for e in range(config.num_envs) for _, at in oracle.stored(e)
        ],
    }[view.strategy]()
    goal = float(item.obs["desired_goal"][0])
    if goal == -plain.obs:  # stored goals are negative, new goals are not
        check_transition(item, plain)
        return
    assert goal in {row.obs % 3 for row in allowed}
    assert item.next_obs["desired_goal"][0] == goal
    expected = dataclasses.replace(plain, reward=0.0, discount=1.0)
    for k in range(view.inner.n_step):
        row, following = rows[index + k], rows[index + k + 1]
        expected.reward += 0.5**k * (abs(following.obs % 3 - goal) + 100 * row.reward)
        expected.discount, expected.num_steps = expected.discount * 0.5, k + 1
        terminates = following.obs % 3 == goal if view.terminated_fn else row.terminated
        if terminates:
            expected.discount = 0.0
        if terminates or following.is_final:
            break
    check_transition(item, expected)
    assert item.next_obs["x"] == rows[index + expected.num_steps].obs


def check_chunk(config, oracle, env, index, item):
    view = config.view
    for name, offsets in (("obs", view.obs), ("action", view.action)):
        rows, is_pad = oracle_views.chunk(oracle, env, index, offsets)
        assert getattr(item, f"{name}_is_pad").tolist() == is_pad
        got = item.obs["x"] if name == "obs" else item.action
        expected = [
            0 if pad and view.pad == "zero" else getattr(row, name)
            for row, pad in zip(rows, is_pad, strict=True)
        ]
        assert got.tolist() == expected
    assert item.extras["id"] == oracle.streams[env][index].action


CHECKS = {
    jr.views.ChunkView: check_chunk,
    jr.views.SequenceView: check_sequence,
    jr.views.FrameStack: check_stack,
    jr.views.FutureView: check_pair,
    jr.views.Hindsight: check_hindsight,
}


def sampler_of(prioritized):
    return jr.Prioritized() if prioritized else jr.Uniform()


def sequences():
    lengths, burn_ins, strides = map(itertools.cycle, ((1, 3, 7), (0, 2, 4, 0, 1), (1, 1, 2, 6)))
    for form, within, prioritized in itertools.product(FORMS, (True, False), (False, True)):
        view = jr.views.SequenceView(
            length=next(lengths),
            burn_in=next(burn_ins),
            period=next(strides),
            cross_episodes=not within,
            recurrent_state_key="id" if prioritized else None,
        )
        yield Config(
            view=view,
            sampler=sampler_of(prioritized),
            autoreset=form,
            allow_mask=within != prioritized,
            spare=next(strides),
        )


def stacks():
    frames, pads, keys = map(
        itertools.cycle, ((2, 4, 1, 8), ("zero", "repeat"), (None, "image", "image"))
    )
    one = jr.views.TransitionView(gamma=0.5)
    three = jr.views.TransitionView(n_step=3, gamma=0.5)
    sequence = jr.views.SequenceView(length=3, burn_in=2)
    kinds = ((one, False), (three, True), (sequence, True))
    for form, (inner, prioritized) in itertools.product(FORMS, kinds):
        key = next(keys)
        axis = -1 if key and inner is not sequence else 0
        view = jr.views.FrameStack(
            num_frames=next(frames), inner=inner, pad=next(pads), key=key, axis=axis
        )
        sampler = sampler_of(prioritized)
        yield Config(view=view, sampler=sampler, autoreset=form, allow_mask=prioritized, spare=3)


def chunks():
    offsets = itertools.cycle((((-1, 0), 4), ((0,), 1), ((-3, -1, 0, 2), (-2, -1, 0, 1, 5))))
    for (form, prioritized), pad in zip(
        itertools.product(FORMS, (False, True)),
        itertools.cycle(("repeat", "zero")),
        strict=False,
    ):
        obs, action = next(offsets)
        view = jr.views.ChunkView(obs=obs, action=action, pad=pad)
        sampler = sampler_of(prioritized)
        yield Config(view=view, sampler=sampler, autoreset=form, allow_mask=prioritized, spare=3)


def pairs():
    kinds = ({}, {"max_terminals": 2}, {"unfinished": True})
    for form, kind, in_episodes in itertools.product(FORMS, kinds, (False, True)):
        view = jr.views.FutureView(gamma=0.9, **kind)
        episodes = jr.UniformEpisodes(unfinished=bool(kind))
        sampler = episodes if in_episodes else jr.Uniform()
        yield Config(view=view, sampler=sampler, autoreset=form, allow_mask=in_episodes, spare=7)


def relabelled():
    for strategy, form in itertools.product(("future", "final", "episode"), FORMS[:2]):
        view = jr.views.Hindsight(
            inner=jr.views.TransitionView(n_step=2, gamma=0.5),
            reward_fn=reward_of,
            terminated_fn=reached if form == "same_step" else None,
            strategy=strategy,
            unfinished=True,
            relabel_fraction=0.7,
        )
        sampler = sampler_of(form == "same_step")
        yield Config(view=view, sampler=sampler, autoreset=form, allow_mask=True, spare=6)
    for strategy, form in itertools.product(("future", "final", "episode", "random"), FORMS[:2]):
        n_step = 1 if strategy in ("final", "episode") else 3
        view = jr.views.Hindsight(
            inner=jr.views.TransitionView(n_step=n_step, gamma=0.5),
            reward_fn=reward_of,
            terminated_fn=reached if form == "next_step" else None,
            strategy=strategy,
            relabel_fraction=0.7,
        )
        yield Config(view=view, autoreset=form, allow_mask=form == "same_step", spare=6)


# A configuration takes seconds to compile, a history little to run. So a few configurations go
# through many histories each: of each view three or four, one of each form if it has all; the soak
# tests all.
_SOME = {
    sequences: (0, 5, 11, 6),
    stacks: (4, 5, 8, 0),
    chunks: (5, 0, 2, 4),
    pairs: (0, 8, 17, 13, 3, 10),
    relabelled: (1, 6, 9, 13, 10, 4),
}
TRIED = [
    config
    for pool, places in _SOME.items()
    for place, config in enumerate(pool())
    if SOAK or place in places[: 6 if ALL else 4 if pool is relabelled else 3]
]


@pytest.mark.parametrize(
    "config",
    TRIED,
    ids=lambda config: f"{type(config.view).__name__}-{config.autoreset}",
)
def test_views_agree_with_the_oracle(config):
    @hypothesis.seed(1000 * SOAK)
    @hypothesis.settings(max_examples=30 if SOAK else 8)
    @hypothesis.example(long_episodes(config))
    @hypothesis.given(histories(config))
    def run(history):
        go_through(config, history)

    run()


def test_a_sequence_stops_where_its_new_goal_ends_the_episode():
    """New goals are later rows; among the steps to learn from, only the last may reach its goal."""
    buffer = jr.sequences(
        capacity=64, num_envs=1, batch_size=400, length=5, burn_in=2, autoreset="next_step"
    )
    reached = lambda achieved, goal, step: achieved == goal
    buffer = jr.hindsight(
        buffer, lambda *x: 1.0 * reached(*x), terminated_fn=reached, relabel_fraction=1.0
    )
    time = np.arange(31, dtype=np.int32)[:, None]
    obs = {"achieved_goal": time, "desired_goal": 0 * time - 1}
    steps = plain_step(time, obs=obs, reward=time.astype(np.float32), terminated=time == 29)
    sample = jax.jit(lambda steps: buffer.sample(begun(buffer, steps), jax.random.key(0)))
    items = jax.device_get(sample(steps)).experience
    goal = items.obs["desired_goal"].max(axis=1)
    reader = items.action[:, 2]
    lengths = np.minimum(goal, 30) - reader  # steps to the goal, which is at least one ahead
    assert set(np.minimum(lengths, 6)) == {1, 2, 3, 4, 5, 6}
    for which, (start, length) in enumerate(zip(reader, lengths, strict=True)):
        steps, item = min(length, 5, 30 - start), nth(items, which)
        assert item.mask.tolist() == [False] * 2 + [True] * steps + [False] * (5 - steps)
        assert np.flatnonzero(item.terminated[2:]).tolist() == ([length - 1] if length <= 5 else [])
        achieved = [*range(start, start + steps + 1)] + [0] * (5 - steps)
        assert item.obs["achieved_goal"][2:].tolist() == achieved


class _Marked(jr.views.WrappedReader):
    """Reader that negates each value and inverts each flag."""


for _names, _change in (
    (("obs", "action", "reward", "extras"), jnp.negative),
    (("is_terminated", "is_truncated", "is_final", "is_first"), jnp.logical_not),
):
    for _name in _names:
        read = lambda self, offset, name=_name, change=_change: change(
            getattr(self.inner, name)(offset)
        )
        setattr(_Marked, _name, read)


class _Marks(jr.views.WrappedView):
    def read(self, reader):
        return self.inner.read(_Marked.around(reader))


class _All(jr.views.View):
    window = jr.views.Window()

    def read(self, reader):
        step = reader.step(0)
        return step, reader.is_final(0), reader.is_first(0)


@pytest.mark.parametrize("is_inside", [False, True])
def test_what_a_reader_changes_passes_through_other_wrappers(is_inside):
    stack = functools.partial(jr.views.FrameStack, num_frames=1, axis=0)
    view = stack(inner=_Marks(inner=_All())) if is_inside else _Marks(inner=stack(inner=_All()))
    buffer = jr.ReplayBuffer(
        capacity=4, batch_size=1, sampler=jr.Uniform(), view=view, autoreset="next_step"
    )
    one = np.ones((2, 1), np.float32)
    read = jax.jit(lambda steps: buffer.get(begun(buffer, steps), jnp.array([0])))
    step, *flags = jax.device_get(read(plain_step(one, extras=one))).experience
    assert (step.obs, step.action, step.reward, step.extras) == (-1, -1, -1, -1)
    assert [step.terminated, step.truncated, *flags] == [True, True, True, False]
