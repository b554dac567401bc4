"""The catalog of buffers, each with steps to add. A new sampler or view adds a line here, and all
contract tests run over it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from jaxreplay.buffers.replay_buffer import ReplayBuffer
from jaxreplay.samplers.prioritized import Prioritized
from jaxreplay.storage import newest_row
from jaxreplay.views.item import Item
from tests.conftest import ALL, SOAK
from tests.support.steps import nth

NUM_ENVS = 4


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    make: object  # (capacity, batch_size) -> replay
    is_items: bool = False
    is_plain: bool = True  # items keep the stored leaves' shapes

    def replay(self, capacity=64, batch_size=8):
        return self.make({"capacity": capacity, "num_envs": NUM_ENVS, "batch_size": batch_size})

    def step(self, seed=0, time=None):
        """Return a random step of every env, or a block of `time` steps, as NumPy arrays."""
        axes = (NUM_ENVS,) if time is None else (time, NUM_ENVS)
        r = np.random.default_rng(seed)
        if self.is_items:
            return {
                "image": r.integers(0, 256, (*axes, 3, 2), np.uint8),
                "brain": np.asarray(r.normal(size=axes), jnp.bfloat16),
            }
        num_agents = self.replay().num_agents
        done = r.random(axes if num_agents is None else (*axes, num_agents))
        obs = {
            "vector": np.asarray(r.normal(size=(*axes, 5)), np.float32),
            "image": r.integers(0, 9, (*axes, 2, 2), np.uint8),
            "goal": np.asarray(r.normal(size=(*axes, 5)), np.float32),
        }
        return jr.Step(
            obs=obs,
            action=r.integers(0, 4, axes, np.int32),
            reward=np.asarray(r.normal(size=axes), np.float32),
            terminated=np.asarray(done < 0.1),
            truncated=np.asarray(done > 0.9),
            final_obs=jax.tree.map(lambda x: x + 1, obs)
            if self.replay().autoreset == "same_step"
            else None,
            extras={
                "flag": np.asarray(r.random(axes) < 0.5),
                "half": np.asarray(r.normal(size=(*axes, 1)), np.float16),
            },
        )

    def example(self):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.step())

    def shapes(self, capacity=64):
        """Return a buffer, and the shapes and dtypes of its state."""
        buffer = self.replay(capacity)
        return buffer, jax.eval_shape(buffer.init, self.example())

    def empty(self, buffer):
        """Return a state without rows, in memory of its own."""
        return buffer.init(self.example())

    def filled(self, buffer, steps=40):
        """Return a state after some steps, in memory of its own."""
        # Copies, since a test may donate them.
        return jax.tree.map(jnp.array, _filled(self, buffer, steps))

    def mask(self, buffer, seed, time=None):
        """Return () or (mask,), a mask of the envs that took a step."""
        shape = (NUM_ENVS,) if time is None else (time, NUM_ENVS)
        return (np.random.default_rng(seed).random(shape) < 0.8,) if buffer.allow_mask else ()


@functools.cache  # compiled and run once for all tests
def _filled(case, buffer, steps):
    extend = jax.jit(buffer.extend)
    return jax.device_get(
        extend(buffer.init(case.example()), case.step(1, time=steps), *case.mask(buffer, 2, steps))
    )


def draw(buffer, state, key, **options):
    """Return a batch, by `pop` or `sample`."""
    return (
        buffer.pop(state, key, **options)[1]
        if buffer.sampler.consumes
        else buffer.sample(state, key, **options)
    )


@functools.cache
def jitted_draw(buffer):
    """Jit `draw`, without donating the state."""
    return jax.jit(lambda state, key: draw(buffer, state, key))


@functools.cache
def jitted(buffer, method):
    """Jit a buffer's method once for all tests, without donating the state."""
    return jax.jit(getattr(buffer, method))


@functools.cache
def everything(buffer):
    """Return a program that reads all rows, given a state and a seed."""
    return jax.jit(
        lambda state, seed: buffer.get(state, jnp.arange(buffer.capacity), jax.random.key(seed))
    )


def near(achieved, goal, step):
    return -jnp.sum(jnp.abs(achieved - goal)) + 0 * step.reward


def noisy(item, key):
    return item.replace(reward=item.reward + jax.random.uniform(key))


def _views():
    """The buffers whose items are more than a transition, or other forms of it."""
    one, two = {"autoreset": "same_step"}, {"autoreset": "same_step_no_final_obs"}
    yield Case(
        "sequences prioritized, every second start",
        lambda shared: jr.sequences(
            **shared,
            **one,
            length=3,
            burn_in=2,
            period=2,
            allow_write=True,
            recurrent_state_key="half",
            sampler=jr.Prioritized(),
        ),
        is_plain=False,
    )
    yield Case(
        "sequences across episodes",
        lambda shared: jr.sequences(
            **shared, autoreset="next_step", length=4, cross_episodes=True, allow_mask=True
        ),
        is_plain=False,
    )
    yield Case(
        "frame_stack of one leaf",
        lambda shared: jr.frame_stack(
            jr.uniform(**shared, autoreset="next_step", n_step=2), 3, key="image"
        ),
        is_plain=False,
    )
    yield Case(
        "chunks",
        lambda shared: jr.chunks(**shared, **two, obs=(-1, 0), action=3),
        is_plain=False,
    )
    yield Case("future_pairs", lambda shared: jr.future_pairs(**shared, **two), is_plain=False)
    yield Case(
        "hindsight of final_obs, masked",
        lambda shared: jr.hindsight(
            jr.uniform(**shared, **one, allow_mask=True),
            near,
            achieved_key="vector",
            desired_key="goal",
        ),
    )
    yield Case(
        "hindsight prioritized, of episodes that go on",
        lambda shared: jr.hindsight(
            jr.prioritized(**shared, autoreset="next_step", n_step=2),
            near,
            strategy="episode",
            unfinished=True,
            achieved_key="vector",
            desired_key="goal",
        ),
    )
    yield Case(
        "transitions of several agents, masked",
        lambda shared: jr.transitions(
            **shared,
            autoreset="next_step",
            n_step=2,
            sampler=jr.Prioritized(),
            num_agents=2,
            allow_mask=True,
        ),
    )
    yield Case(
        "transitions queue",
        lambda shared: jr.transitions(**shared, **one, sampler=jr.Queue(max_uses=2)),
    )
    yield Case(
        "transitions without replacement",
        lambda shared: jr.transitions(**shared, **two, sampler=jr.WithoutReplacement()),
    )
    yield Case(
        "transitions recent",
        lambda shared: jr.transitions(
            **shared, autoreset="next_step", sampler=jr.Recent(decay=0.9)
        ),
    )
    sampler = jr.blend(
        uniform=(jr.Uniform(), 0.5),
        priority=(jr.Prioritized(), 0.3),
        recent=(jr.Recent(decay=0.9), 0.2),
    )
    yield Case(
        "transitions blend",
        lambda shared: jr.transitions(**shared, autoreset="next_step", n_step=2, sampler=sampler),
    )
    yield Case(
        "transitions online queue",
        lambda shared: jr.transitions(
            **shared, **one, allow_mask=True, sampler=jr.OnlineQueue(sampler=sampler)
        ),
    )
    yield Case(
        "transform of prioritized",
        lambda shared: jr.transform(jr.prioritized(**shared, autoreset="next_step"), noisy),
    )


CATALOG = (
    Case("items", lambda shared: jr.items(**shared), is_items=True),
    Case("items masked", lambda shared: jr.items(**shared, allow_mask=True), is_items=True),
    Case("uniform next_step", lambda shared: jr.uniform(**shared, autoreset="next_step")),
    Case(
        "uniform final_obs, 3 steps",
        lambda shared: jr.uniform(**shared, autoreset="same_step", n_step=3),
    ),
    Case(
        "uniform masked, episodes",
        lambda shared: jr.uniform(
            **shared,
            autoreset="same_step_no_final_obs",
            allow_mask=True,
            allow_write=True,
            track_episodes=True,
        ),
    ),
    Case(
        "prioritized same_step, 3 steps",
        lambda shared: jr.prioritized(**shared, autoreset="same_step_no_final_obs", n_step=3),
    ),
    Case(
        "prioritized final_obs, masked",
        lambda shared: jr.prioritized(
            **shared, autoreset="same_step", allow_mask=True, stratified=False, track_episodes=True
        ),
    ),
    Case(
        "prioritized items, composed by hand, as wide as on an accelerator",
        lambda shared: ReplayBuffer(
            **shared, sampler=Prioritized(alpha=1.0, fan_out=128), view=Item(), autoreset=None
        ),
        is_items=True,
    ),
    *_views(),
)

# One buffer of each kind. Slow checks that are alike within a kind run over these, and in the soak
# over all buffers.
_KINDS = (
    "items",
    "uniform masked, episodes",
    "prioritized same_step, 3 steps",
    "sequences prioritized, every second start",
    "hindsight of final_obs, masked",
    "transitions queue",
    "transitions without replacement",
)
KINDS = CATALOG if SOAK else tuple(case for case in CATALOG if case.name in _KINDS)
# Without priorities, with them, and with rows that are consumed: for what takes long to compile.
_FEW = ("uniform masked, episodes", "prioritized same_step, 3 steps", "transitions queue")
FEW = KINDS if ALL else tuple(case for case in KINDS if case.name in _FEW)


def each(cases):
    """Have a test run for each case."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def add_step(buffer, state, step, goes_on, was_first):
    """Append one step of every env, whose episodes end provisionally, as a block of one step."""
    block, goes_on = nth((step, goes_on), None)
    return newest_row.extend(buffer, state, block, goes_on, was_first)
