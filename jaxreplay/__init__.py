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

from jaxreplay._util.signals import uninterrupted as uninterrupted
from jaxreplay._version import __version__ as __version__
from jaxreplay.buffers.factories import (
    episodes as episodes,
    items as items,
    prioritized as prioritized,
    rollout as rollout,
    sequences as sequences,
    transitions as transitions,
    uniform as uniform,
)
from jaxreplay.buffers.jitted import Jitted as Jitted, jit as jit
from jaxreplay.buffers.memory import Memory as Memory
from jaxreplay.buffers.mixture import Mixture as Mixture, mix as mix
from jaxreplay.buffers.replay_buffer import ReplayBuffer as ReplayBuffer
from jaxreplay.buffers.rollout import Rollout as Rollout, RolloutState as RolloutState
from jaxreplay.buffers.state_checks import CopyWarning as CopyWarning
from jaxreplay.buffers.wrappers import frame_stack as frame_stack, hindsight as hindsight, transform as transform
from jaxreplay.inspection import Inspection as Inspection, inspect as inspect
from jaxreplay.inspection.plan import Plan as Plan, plan as plan
from jaxreplay.samplers.episodes import UniformEpisodes as UniformEpisodes
from jaxreplay.samplers.prioritized import Prioritized as Prioritized
from jaxreplay.samplers.queue import Queue as Queue
from jaxreplay.samplers.rank_based import RankBased as RankBased
from jaxreplay.samplers.recent import Recent as Recent
from jaxreplay.samplers.sum_tree import SumTree as SumTree, SumTreeState as SumTreeState
from jaxreplay.samplers.uniform import Uniform as Uniform
from jaxreplay.samplers.without_replacement import WithoutReplacement as WithoutReplacement
from jaxreplay.stateful.replay import Replay as Replay
from jaxreplay.storage.layout import Window as Window
from jaxreplay.storage.sampleable import ReplayState as ReplayState
from jaxreplay.targets import (
    Advantages as Advantages,
    gae as gae,
    importance_weights as importance_weights,
    next_values as next_values,
    normalize as normalize,
    sequence_priority as sequence_priority,
    vtrace as vtrace,
)
from jaxreplay.types import Index as Index, Pair as Pair, Sample as Sample, Sequence as Sequence, Step as Step, Transition as Transition
from jaxreplay.views import View as View
from jaxreplay.views.frame_stack import FrameStack as FrameStack
from jaxreplay.views.future import FutureView as FutureView
from jaxreplay.views.hindsight import Hindsight as Hindsight
from jaxreplay.views.item import Item as Item
from jaxreplay.views.sequence import SequenceView as SequenceView
from jaxreplay.views.transformed import Transformed as Transformed
from jaxreplay.views.transition import TransitionView as TransitionView
