"""jaxreplay: replay buffers as pure functions over immutable states, on the accelerator.

>>> import functools, jax, jax.numpy as jnp, jaxreplay as jr
>>> replay = jr.prioritized(capacity=4096, num_envs=2, batch_size=8, autoreset="same_step", n_step=3, discount=0.99)
>>> zeros = jnp.zeros(2)
>>> step = jr.Step(obs=zeros, action=zeros, reward=zeros + 1, terminated=zeros > 0, truncated=zeros > 0)
>>> state = replay.init(jax.tree.map(lambda x: x[0], step))  # one env's step: arrays, or jax.ShapeDtypeStruct
>>> @functools.partial(jax.jit, donate_argnums=0)  # donated: the buffer is changed in place
... def train_step(state, step, key):
...     state = replay.add(state, step)  # leaves [num_envs, ...]; add first, then sample
...     batch = replay.sample(state, key)  # items, index, probability, is_valid
...     weight = jr.importance_weights(batch, replay.size(state), exponent=0.4)
...     td_error = weight * batch.items.reward  # learn here
...     return replay.update_priorities(state, batch.index, jnp.abs(td_error))
>>> for key in jax.random.split(jax.random.key(0), 10):
...     state = train_step(state, step, key)
>>> int(replay.size(state))  # of ten steps of two envs, the newest three of each wait for their windows
14
"""

from jaxreplay._version import __version__
from jaxreplay.advantages import Advantages, gae, next_values, normalize, vtrace
from jaxreplay.buffer import ReplayBuffer
from jaxreplay.catalog import episodes, items, prioritized, rollout, sequences, transitions, uniform
from jaxreplay.compose import frame_stack, hindsight, transform
from jaxreplay.donation import CopyWarning
from jaxreplay.drawable import ReplayState
from jaxreplay.exporting import register
from jaxreplay.inspection import Inspection, inspect
from jaxreplay.interrupts import uninterrupted
from jaxreplay.jitted import Jitted, jit
from jaxreplay.memory import Memory
from jaxreplay.mixture import MixedSample, Mixture, mix
from jaxreplay.plan import Plan, plan
from jaxreplay.rollouts import Rollout, RolloutState
from jaxreplay.samplers import Prioritized, Queue, RankBased, Recent, Uniform, UniformEpisodes, WithoutReplacement
from jaxreplay.stateful import Replay
from jaxreplay.sum_tree import SumTree, SumTreeState
from jaxreplay.types import Index, Sample, Step, Transition
from jaxreplay.views import FrameStack, FutureView, Hindsight, Item, Pair, Sequence, SequenceView, Transformed, TransitionView, View
from jaxreplay.weights import importance_weights, sequence_priority
from jaxreplay.window import Window

__all__ = [
    "Advantages",
    "CopyWarning",
    "FrameStack",
    "FutureView",
    "Hindsight",
    "Index",
    "Inspection",
    "Item",
    "Jitted",
    "Memory",
    "MixedSample",
    "Mixture",
    "Pair",
    "Plan",
    "Prioritized",
    "Queue",
    "RankBased",
    "Recent",
    "Replay",
    "ReplayBuffer",
    "ReplayState",
    "Rollout",
    "RolloutState",
    "Sample",
    "Sequence",
    "SequenceView",
    "Step",
    "SumTree",
    "SumTreeState",
    "Transformed",
    "Transition",
    "TransitionView",
    "Uniform",
    "UniformEpisodes",
    "View",
    "Window",
    "WithoutReplacement",
    "__version__",
    "episodes",
    "frame_stack",
    "gae",
    "hindsight",
    "importance_weights",
    "inspect",
    "items",
    "jit",
    "mix",
    "next_values",
    "normalize",
    "plan",
    "prioritized",
    "rollout",
    "sequence_priority",
    "sequences",
    "transform",
    "transitions",
    "uniform",
    "uninterrupted",
    "vtrace",
]

register()
del register
