"""Goals in sequences, and wrappers in wrappers. `storage/test_oracle_streams.py` has every view on
random streams."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.support.steps import begun, nth, plain_step


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

    def read(self, name, offset):
        is_value = name in ("obs", "action", "reward", "extras")
        if name == "agents":
            return super().read(name, offset)
        return (jnp.negative if is_value else jnp.logical_not)(super().read(name, offset))


class _Marks(jr.views.WrappedView):
    def read(self, reader):
        return self.inner.read(_Marked.around(reader))


class _All(jr.views.View):
    window = jr.views.Window()

    def read(self, reader):
        return reader.item(), reader.step(0), reader.is_final(0), reader.is_first(0)


@pytest.mark.parametrize("is_inside", [False, True])
def test_what_a_reader_changes_passes_through_other_wrappers(is_inside):
    stack = functools.partial(jr.views.FrameStack, num_frames=1, axis=0)
    view = stack(inner=_Marks(inner=_All())) if is_inside else _Marks(inner=stack(inner=_All()))
    buffer = jr.ReplayBuffer(
        capacity=4, batch_size=1, sampler=jr.Uniform(), view=view, autoreset="next_step"
    )
    one = np.ones((2, 1), np.float32)
    read = jax.jit(lambda steps: buffer.get(begun(buffer, steps), jnp.array([0])))
    item, step, *flags = jax.device_get(read(plain_step(one, extras=one))).experience
    for one in (item, step):
        assert (one.obs, one.action, one.reward, one.extras) == (-1, -1, -1, -1)
        assert [one.terminated, one.truncated, *flags] == [True, True, True, False]
