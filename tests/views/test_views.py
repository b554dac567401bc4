"""Every view against the oracle, on random streams: masks, ends, truncations, blocks, wraps and
clears."""

import dataclasses
import functools
import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.conftest import SOAK
from tests.storage.test_oracle_streams import BLOCK, FORMS, Pair
from tests.support import oracle_views
from tests.support.oracle import Oracle

KEYS = 3


def reward_of(achieved, goal, step):
    return jnp.abs(achieved[0] - goal[0]) + 100 * step.reward


def reached(achieved, goal, step):
    return achieved[0] == goal[0]


@dataclasses.dataclass(frozen=True)
class Config:
    """A view in a buffer of short streams, with its oracle and the oracle's candidates."""

    autoreset: str
    allow_mask: bool
    spare: int  # rows of a stream beyond one window
    view: Any
    sampler: Any = jr.Uniform()  # noqa: RUF009
    num_envs: int = 2

    @functools.cached_property
    def window(self):
        return self.sampler.window(self.view.window)

    @property
    def length(self):
        return self.window.length + 1 + self.spare

    @functools.cached_property
    def replay(self):
        return jr.ReplayBuffer(
            capacity=self.num_envs * self.length,
            num_envs=self.num_envs,
            batch_size=64,
            sampler=self.sampler,
            view=self.view,
            autoreset=self.autoreset,
            allow_mask=self.allow_mask,
        )

    def oracle(self):
        return Oracle(
            num_envs=self.num_envs,
            length=self.length,
            autoreset=self.autoreset,
            n_step=getattr(transition_of(self.view), "n_step", 1),
            gamma=0.5,
        )

    def anchors(self, oracle):
        window = self.window
        fields = {
            name: getattr(window, name)
            for name in ("before", "after", "crosses_episodes", "period", "needs_final_obs")
        }
        return list(oracle_views.anchors(oracle, **fields))


def transition_of(view):
    """Return the innermost view."""
    return transition_of(view.inner) if hasattr(view, "inner") else view


class ViewPair(Pair):
    """A buffer and an oracle that receive the same steps."""

    def _step(self, step, env=slice(None)):
        plain = super()._step(step, env)
        goal = lambda obs: {
            **obs,
            "achieved_goal": obs["x"][..., None] % 3,
            "desired_goal": -obs["x"][..., None],
        }
        return plain.replace(
            obs=goal(plain.obs), final_obs=plain.final_obs and goal(plain.final_obs)
        )

    def check(self, seed):
        buffer, oracle = self.config.replay, self.oracle
        expected = {
            env * self.config.length + position: (env, index)
            for env, position, index in self.config.anchors(oracle)
        }
        assert int(self.jitted.size(self.state)) == len(expected)
        for number in range(KEYS if buffer.view.is_random else 1):
            key = jax.random.key(seed * KEYS + number) if buffer.view.is_random else None
            got = jax.tree.map(
                np.asarray, self.jitted.get(self.state, jnp.arange(buffer.capacity), key)
            )
            assert set(np.flatnonzero(got.is_valid)) == set(expected)
            for row, (env, index) in expected.items():
                item = jax.tree.map(lambda leaf, row=row: leaf[row], got.experience)
                CHECKS[type(buffer.view)](self.config, oracle, env, index, item)
            assert set(np.flatnonzero(got.probability)) == set(expected)
            np.testing.assert_allclose(got.probability.sum(), bool(expected), rtol=1e-5)
        batch = self.jitted.sample(self.state, jax.random.key(seed))
        assert np.asarray(batch.is_valid).all() == bool(expected)
        assert not expected or set(np.asarray(batch.index.row)) <= set(expected)
        assert all(
            np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(batch.experience)
        )


def check_sequence(config, oracle, env, index, item):
    view = config.view
    steps = oracle_views.sequence(
        oracle,
        env,
        index,
        length=view.length,
        burn_in=view.burn_in,
        cross_episodes=view.cross_episodes,
    )
    real = [step is not None and step["is_step"] for step in steps]
    value = lambda name: [
        getattr(step["row"], name) if ok else 0 for step, ok in zip(steps, real, strict=True)
    ]
    assert item.obs["x"].tolist() == [0 if step is None else step["row"].obs for step in steps]
    assert item.is_first.tolist() == [step is not None and step["is_first"] for step in steps]
    assert item.mask.tolist() == [step is not None and step["learns"] for step in steps[:-1]]
    assert item.action.tolist() == value("action")[:-1]
    assert item.reward.tolist() == value("reward")[:-1]
    assert item.terminated.tolist() == [bool(flag) for flag in value("terminated")[:-1]]
    assert item.truncated.tolist() == [bool(flag) for flag in value("truncated")[:-1]]
    if view.recurrent_state_key is None:
        assert item.extras["id"].tolist() == [np.int16(action) for action in value("action")[:-1]]
    else:
        assert item.extras == {}
        assert item.recurrent_state == np.int16(value("action")[0])


def check_stack(config, oracle, env, index, item):
    view = config.view
    stacked = lambda at: oracle_views.stack(oracle, env, at, view.num_frames, view.pad)
    image = lambda frames: [
        [0, 0] if x is None else [np.float32(x).astype(np.uint8)] * 2 for x in frames
    ]
    if isinstance(view.inner, jr.views.SequenceView):
        steps = oracle_views.sequence(
            oracle,
            env,
            index,
            length=view.inner.length,
            burn_in=view.inner.burn_in,
            cross_episodes=False,
        )
        frames = [
            [None] * view.num_frames if s is None else stacked(index - view.inner.burn_in + t)
            for t, s in enumerate(steps)
        ]
        assert item.obs["image"].tolist() == [image(f) for f in frames]
        return
    _, expected = oracle.sampleable()[env * config.length + index % config.length]
    assert (item.action, item.reward, item.discount, item.num_steps) == (
        expected.action,
        expected.reward,
        expected.discount,
        expected.num_steps,
    )
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
    _, plain = oracle.sampleable()[env * config.length + index % config.length]
    first, last = oracle_views.spans(oracle, rows)[index]
    allowed = {
        "future": lambda: rows[index + 1 : last + 1],
        "final": lambda: [rows[last]],
        "episode": lambda: rows[first : last + 1],
        "random": lambda: [
            oracle.streams[e][at] for e in range(config.num_envs) for _, at in oracle.stored(e)
        ],
    }[view.strategy]()
    goal = float(item.obs["desired_goal"][0])
    assert item.next_obs["desired_goal"][0] == goal if goal != -plain.obs else True
    # not relabelled: stored goals are negative, new goals are not
    if goal == -plain.obs and view.relabel_fraction < 1:
        assert (item.reward, item.discount, item.num_steps) == (
            plain.reward,
            plain.discount,
            plain.num_steps,
        )
        return
    assert goal in {row.obs % 3 for row in allowed}
    reward, discount, num_steps = 0.0, 1.0, 0
    for k in range(view.inner.n_step):
        row, following = rows[index + k], rows[index + k + 1]
        reward += 0.5**k * (abs(following.obs % 3 - goal) + 100 * row.reward)
        discount, num_steps = discount * 0.5, k + 1
        terminates = following.obs % 3 == goal if view.terminated_fn else row.terminated
        if terminates:
            discount = 0.0
        if terminates or following.is_final:
            break
    assert (item.reward, item.discount, item.num_steps) == (np.float32(reward), discount, num_steps)
    assert item.next_obs["x"] == rows[index + num_steps].obs


CHECKS = {
    jr.views.SequenceView: check_sequence,
    jr.views.FrameStack: check_stack,
    jr.views.FutureView: check_pair,
    jr.views.Hindsight: check_hindsight,
}


def sequences():
    lengths, burn_ins, strides = (
        itertools.cycle((1, 3, 7)),
        itertools.cycle((0, 2, 4, 0, 1)),
        itertools.cycle((1, 1, 2, 6)),
    )
    for form, within, prioritized in itertools.product(FORMS, (True, False), (False, True)):
        view = jr.views.SequenceView(
            length=next(lengths),
            burn_in=next(burn_ins),
            period=next(strides),
            cross_episodes=not within,
            recurrent_state_key="id" if prioritized else None,
        )
        sampler = jr.Prioritized() if prioritized else jr.Uniform()
        yield Config(form, within != prioritized, next(strides), view, sampler)


def stacks():
    frames, pads, leaves = (
        itertools.cycle((2, 4, 1, 8)),
        itertools.cycle(("zero", "repeat")),
        itertools.cycle((None, "image", "image")),
    )
    for form, of, prioritized in itertools.product(
        FORMS,
        (
            jr.views.TransitionView(gamma=0.5),
            jr.views.TransitionView(n_step=3, gamma=0.5),
            jr.views.SequenceView(length=3, burn_in=2),
        ),
        (False, True),
    ):
        if prioritized == (of == jr.views.TransitionView(gamma=0.5)):
            continue
        leaf = next(leaves)
        axis = -1 if leaf and isinstance(of, jr.views.TransitionView) else 0
        view = jr.views.FrameStack(
            num_frames=next(frames), inner=of, pad=next(pads), key=leaf, axis=axis
        )
        yield Config(form, prioritized, 3, view, jr.Prioritized() if prioritized else jr.Uniform())


def pairs():
    for form, terminals, in_episodes in itertools.product(FORMS, (None, 2), (False, True)):
        view = jr.views.FutureView(gamma=0.9, max_terminals=terminals)
        sampler = (
            jr.UniformEpisodes(unfinished=terminals is not None) if in_episodes else jr.Uniform()
        )
        yield Config(form, in_episodes, 7, view, sampler)


def relabelled():
    for strategy, form in itertools.product(("future", "final", "episode", "random"), FORMS[:2]):
        n_step = 1 if strategy in ("final", "episode") else 3
        fn = reached if form == "next_step" else None
        view = jr.views.Hindsight(
            inner=jr.views.TransitionView(n_step=n_step, gamma=0.5),
            reward_fn=reward_of,
            terminated_fn=fn,
            strategy=strategy,
            relabel_fraction=0.7,
        )
        yield Config(form, form == "same_step", 6, view)


POOLS = {
    "sequences": tuple(sequences()),
    "stacks": tuple(stacks()),
    "pairs": tuple(pairs()),
    "relabelled": tuple(relabelled()),
}
# A configuration takes seconds to compile, a stream little to run. So a few configurations are
# tested with many streams each; the soak tests all.
_SOME = {
    "sequences": (0, 5, 6, 11),
    "stacks": (0, 4, 5, 8),
    "pairs": (0, 3, 6, 9),
    "relabelled": (0, 3, 4, 7),
}
TRIED = [
    config
    for name, pool in POOLS.items()
    for at, config in enumerate(pool)
    if SOAK or at in _SOME[name]
]


@st.composite
def histories(draw, config):
    codes = st.lists(st.integers(0, 15), min_size=config.num_envs, max_size=config.num_envs)
    adds = st.tuples(st.just("add"), codes, st.none())
    operations = [
        adds,
        adds,
        adds,
        st.tuples(st.just("extend"), st.lists(codes, min_size=BLOCK, max_size=BLOCK)),
        st.tuples(st.just("check")),
    ]
    history = draw(st.lists(st.one_of(*operations), min_size=1, max_size=4 * config.length))
    if draw(st.integers(0, 7)) == 0:
        history.insert(len(history) // 2, ("clear",))
    return history


@pytest.mark.parametrize(
    "config",
    TRIED,
    ids=lambda config: f"{type(config.view).__name__}-{config.autoreset}",
)
def test_views_agree_with_the_oracle(config):
    @hypothesis.seed(1000 * SOAK)
    @hypothesis.settings(max_examples=30 if SOAK else 8)
    @hypothesis.given(histories(config))
    def run(history):
        pair = ViewPair(config)
        for number, (kind, *arguments) in enumerate(history):
            pair.check(number) if kind == "check" else getattr(pair, kind)(*arguments)
        pair.check(len(history))

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
    time = jnp.arange(31, dtype=jnp.int32)[:, None]
    end = time == 29
    steps = jr.Step(
        {"achieved_goal": time, "desired_goal": 0 * time - 1},
        time,
        time * 1.0,
        terminated=end,
        truncated=end & ~end,
    )
    state = jax.jit(buffer.extend)(buffer.init(jax.tree.map(lambda x: x[0, 0], steps)), steps)
    items = jax.tree.map(np.asarray, jax.jit(buffer.sample)(state, jax.random.key(0)).experience)
    goal = items.obs["desired_goal"].max(axis=1)
    reader = items.action[:, 2]
    lengths = np.minimum(goal, 30) - reader  # steps to the goal, which is at least one ahead
    assert set(np.minimum(lengths, 6)) == {1, 2, 3, 4, 5, 6}
    for mask, ends, obs, start, length in zip(
        items.mask, items.terminated, items.obs["achieved_goal"], reader, lengths, strict=True
    ):
        steps = min(length, 5, 30 - start)
        assert mask.tolist() == [False] * 2 + [True] * steps + [False] * (5 - steps)
        assert np.flatnonzero(ends[2:]).tolist() == ([length - 1] if length <= 5 else [])
        assert obs[2:].tolist() == [*range(start, start + steps + 1)] + [0] * (5 - steps)


class _Marked(jr.views.WrappedReader):
    """Reader that negates each value and inverts each flag."""

    def obs(self, offset):
        return -self.inner.obs(offset)

    def action(self, offset):
        return -self.inner.action(offset)

    def reward(self, offset):
        return -self.inner.reward(offset)

    def extras(self, offset):
        return -self.inner.extras(offset)

    def is_terminated(self, offset):
        return ~self.inner.is_terminated(offset)

    def is_truncated(self, offset):
        return ~self.inner.is_truncated(offset)

    def is_final(self, offset):
        return ~self.inner.is_final(offset)

    def is_first(self, offset):
        return ~self.inner.is_first(offset)


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
    def stack(view):
        return jr.views.FrameStack(num_frames=1, axis=0, inner=view)

    view = stack(_Marks(inner=_All())) if is_inside else _Marks(inner=stack(_All()))
    buffer = jr.ReplayBuffer(
        capacity=4, batch_size=1, sampler=jr.Uniform(), view=view, autoreset="next_step"
    )
    one, flag = jnp.ones((2, 1)), jnp.zeros((2, 1), bool)
    steps = jr.Step(obs=one, action=one, reward=one, terminated=flag, truncated=flag, extras=one)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], steps))
    item = buffer.get(buffer.extend(state, steps), jnp.array([0])).experience
    step, is_final, is_first = jax.tree.map(lambda leaf: leaf.item(), item)
    assert (step.obs, step.action, step.reward, step.extras) == (-1, -1, -1, -1)
    assert (step.terminated, step.truncated, is_final, is_first) == (True, True, True, False)
