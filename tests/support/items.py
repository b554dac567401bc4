"""The items that each view must return around a row of the oracle."""

import dataclasses

import numpy as np

import jaxreplay as jr
from jaxreplay.views.item import Item
from tests.support import oracle_views
from tests.support.oracle import Row


def sequence_of(view, oracle, env, index):
    fields = {name: getattr(view, name) for name in ("length", "burn_in", "cross_episodes")}
    return oracle_views.sequence(oracle, env, index, **fields)


def check_sequence(config, oracle, env, index, item):
    view = config.buffer.view
    steps = sequence_of(view, oracle, env, index)
    rows = [step["row"] if step and step["is_step"] else Row(0.0) for step in steps]
    assert item.obs["x"].tolist() == [0 if step is None else step["row"].obs for step in steps]
    assert item.is_first.tolist() == [step is not None and step["is_first"] for step in steps]
    assert item.mask.tolist() == [step is not None and step["learns"] for step in steps[:-1]]
    assert item.action.tolist() == [row.action for row in rows[:-1]]
    reward = config.rewards(np.float32([row.reward for row in rows[:-1]]))
    check_same(item.reward, reward)
    for name in ("terminated", "truncated", *(["alive"] if config.agents else [])):
        no = np.zeros(config.agents or (), bool)
        own = [getattr(row.agents or row, name, no) | no for row in rows[:-1]]
        check_same(getattr(item, name), own)
    ids = np.int16([row.action for row in rows])
    if view.recurrent_state_key is None:
        assert item.extras["id"].tolist() == ids[:-1].tolist()
    else:
        assert (item.extras, item.recurrent_state) == ({}, ids[0])


def check_transition(config, oracle, env, index, item, expected=None):
    expected = oracle.transition(env, index) if expected is None else expected
    assert (item.action, item.num_steps) == (expected.action, expected.num_steps)
    for name in ("reward", "discount", "alive"):
        check_same(getattr(item, name), getattr(expected, name))
    if type(config.buffer.view) is jr.views.TransitionView:
        assert item.extras["id"] == np.int16(expected.action)
        for name in ("obs", "next_obs"):
            check_obs(getattr(item, name), getattr(expected, name))


def check_same(got, expected):
    """Compare arrays, or dicts of them. It is quicker than NumPy's own."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for name in got:
            check_same(got[name], expected[name])
        return
    assert (got is None) == (expected is None)
    assert (np.asarray(got) == expected).all()


def check_obs(obs, x):
    assert obs["x"] == x
    assert obs["image"].tolist() == [np.float32(x).astype(np.uint8)] * 2


def check_stored(config, oracle, env, index, item):
    row = oracle.row(env, index)
    assert (item["x"], item["reward"]) == (row.obs, row.reward)


def check_stack(config, oracle, env, index, item):
    view = config.buffer.view
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
    expected = oracle.transition(env, index)
    check_transition(config, oracle, env, index, item)
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
    bound = oracle_views.horizon(oracle, env, index, config.buffer.view.max_terminals)
    assert min(bound, 1) <= item.num_steps <= bound
    assert (item.obs["x"], item.action) == (rows[index].obs, rows[index].action)
    assert item.future_obs["x"] == rows[index + item.num_steps].obs


def check_hindsight(config, oracle, env, index, item):
    view, rows = config.buffer.view, oracle.streams[env]
    plain = oracle.transition(env, index)
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
        check_transition(config, oracle, env, index, item)
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
    check_transition(config, oracle, env, index, item, expected)
    assert item.next_obs["x"] == rows[index + expected.num_steps].obs


def check_chunk(config, oracle, env, index, item):
    view = config.buffer.view
    for name, offsets in (("obs", view.obs), ("action", view.action)):
        rows, is_pad = oracle_views.chunk(oracle, env, index, offsets)
        assert getattr(item, f"{name}_is_pad").tolist() == is_pad
        got = item.obs["x"] if name == "obs" else item.action
        expected = [
            0 if pad and view.pad == "zero" else getattr(row, name)
            for row, pad in zip(rows, is_pad, strict=True)
        ]
        assert got.tolist() == expected
        if name == "action" and config.agents:
            acted = [row.agents.alive & (not pad) for row, pad in zip(rows, is_pad, strict=True)]
            check_same(item.alive, acted)
    assert item.extras["id"] == oracle.streams[env][index].action


CHECKS = {
    Item: check_stored,
    jr.views.TransitionView: check_transition,
    jr.views.ChunkView: check_chunk,
    jr.views.SequenceView: check_sequence,
    jr.views.FrameStack: check_stack,
    jr.views.FutureView: check_pair,
    jr.views.Hindsight: check_hindsight,
}
