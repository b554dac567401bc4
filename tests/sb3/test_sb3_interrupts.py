"""Ctrl-C at any moment of a call of a drop-in buffer: no row is lost, torn or stored twice."""

import os
import signal
import sys

import jax
import numpy as np
import pytest
import torch
from gymnasium import spaces

from jaxreplay import sb3
from jaxreplay.stateful import places
from tests.conftest import thorough
from tests.sb3 import test_sb3_hindsight as goals
from tests.support.interrupting import (
    check_comparisons,
    check_each_moment,
)
from tests.support.refusals import check_refused
from tests.support.replays import have_one_length
from tests.support.sb3_streams import NUMBER

LENGTH = 64
_one_length = pytest.fixture(autouse=True)(have_one_length)


def make(kind="ReplayBuffer"):
    return getattr(sb3, kind)(LENGTH, NUMBER, spaces.Discrete(2))


def add(buffer, number, is_done=False):
    obs = np.full((1, 1), number, np.float32)
    if isinstance(buffer, sb3.HerReplayBuffer):
        obs = dict.fromkeys(goals.SPACE, obs)
    next_obs = jax.tree.map(lambda leaf: leaf + 1, obs)
    action, reward = np.zeros(buffer.action_dim), np.full(1, number, np.float32)
    buffer.add(obs, next_obs, action, reward, np.full(1, is_done), [{}])


def num_stored(buffer, count):
    """Check that number `count` is stored intact or not at all, and all before it. Return how many
    were stored so far."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    numbers = set(buffer.sample(2000).rewards[:, 0].int().tolist())
    end = max(numbers) + 1
    assert end in (count, count + 1)
    assert numbers == set(range(max(end - LENGTH, 0), end))
    assert buffer.size() == len(numbers)
    return end


def is_elsewhere(frame):
    return frame.f_code.co_filename != __file__


def test_an_interrupt_at_any_line_of_an_add_loses_nothing():
    buffer, count = make(), 1
    add(buffer, 0)

    def check():
        nonlocal count
        count = num_stored(buffer, count)

    check_each_moment(lambda: (lambda: add(buffer, count), check), least=100, counts=is_elsewhere)


def test_an_interrupted_search_holds_no_rows():
    """Its frame may live on; nothing in it may keep later steps from being recorded."""
    buffer, numbers = make(), range(2 * LENGTH)

    def interrupt(frame, event, called):
        if event == "c_return" and called.__name__ == "searchsorted":
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    for number in numbers:
        add(buffer, number, is_done=number % 3 == 2)
        if number % LENGTH == LENGTH // 2:
            sys.setprofile(interrupt)
            with pytest.raises(KeyboardInterrupt):
                buffer.sample(4)
        batch = buffer.sample(64)
        assert (batch.next_observations == batch.observations + 1).all()
        assert (batch.dones == (batch.rewards % 3 == 2)).all()
    assert buffer._record.num_steps == len(numbers)


def test_an_interrupt_at_any_line_of_an_add_leaves_each_row_its_own_infos():
    buffer, start = goals.make(copy_info_dict=True), 60
    goals.fill(buffer, start)

    def call():
        goals.fill(buffer, 1, start=start)

    def check():
        nonlocal start
        start += 1
        assert goals.numbers_with_their_infos(buffer)

    check_each_moment(lambda: (call, check), least=100, counts=is_elsewhere)


@pytest.mark.parametrize(
    "kind",
    ["PrioritizedReplayBuffer", thorough("HerReplayBuffer")],
)
def test_an_interrupt_while_buffers_are_compared_is_one(kind):
    def calls():
        buffer = goals.make(n_envs=1) if kind == "HerReplayBuffer" else make(kind)
        add(buffer, 0)
        add(buffer, 1, is_done=True)
        found = [lambda: add(buffer, 2), lambda: buffer.sample(7), buffer.reset]
        if kind == "PrioritizedReplayBuffer":
            indices = buffer.sample(7).indices
            found.insert(2, lambda: buffer.update_priorities(indices, np.ones(7)))
        return found

    check_comparisons(calls)


def test_a_forked_process_gets_an_error_and_does_not_hang(monkeypatch):
    buffer = make()
    add(buffer, 0)
    calls = [lambda: add(buffer, 1), lambda: buffer.sample(4), buffer.size, buffer.reset]
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        check_refused("was forked from it.*spawn", *calls, error=RuntimeError)
    assert num_stored(buffer, 1) == 1


def test_an_interrupted_add_that_loses_the_rows_says_so(monkeypatch):
    buffer = make()
    add(buffer, 0)

    def fails(replay, state, *arguments):
        jax.tree.map(lambda leaf: leaf.delete(), state)
        raise KeyboardInterrupt

    buffer.sample(4)
    with monkeypatch.context() as patch:
        patch.setattr(places, "_extend", [fails] * 2)
        add(buffer, 1)  # waits
        with pytest.raises(KeyboardInterrupt):
            buffer.sample(4)
    check_refused(
        "the rows were lost in a call that raised KeyboardInterrupt.*reset",
        lambda: add(buffer, 2),
        lambda: buffer.sample(4),
        error=RuntimeError,
    )
    buffer.reset()
    add(buffer, 3)
    assert torch.equal(buffer.sample(4).rewards, torch.full((4, 1), 3.0))
