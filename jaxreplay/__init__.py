"""jaxreplay: replay buffers as pure functions over immutable states, on the accelerator.

>>> import functools, jax, jax.numpy as jnp, jaxreplay as jr
>>> buffer = jr.prioritized(
...     capacity=4096,
...     num_envs=2,
...     batch_size=8,
...     autoreset="same_step_no_final_obs",
...     n_step=3,
...     gamma=0.99,
... )
>>> zeros = jnp.zeros(2)
>>> step = jr.Step(
...     obs=zeros, action=zeros, reward=zeros + 1, terminated=zeros > 0, truncated=zeros > 0
... )
>>> example = jax.tree.map(lambda x: x[0], step)  # one env's step: arrays, or jax.ShapeDtypeStruct
>>> state = buffer.init(example)
>>> @functools.partial(jax.jit, donate_argnums=0)  # donated: the buffer is changed in place
... def train_step(state, step, key):
...     state = buffer.add(state, step)  # leaves [num_envs, ...]; add first, then sample
...     batch = buffer.sample(state, key)  # experience, index, probability, weight, is_valid
...     td_error = batch.experience.reward
...     loss = jnp.mean(batch.weight * td_error**2)  # learn here
...     return buffer.update_priorities(state, batch.index, jnp.abs(td_error))
>>> for key in jax.random.split(jax.random.key(0), 10):
...     state = train_step(state, step, key)
>>> int(buffer.size(state))  # the newest three of ten steps wait for their windows, in each env
14
"""

import importlib as _importlib
import typing as _typing

from jaxreplay import actors, autoreset, samplers, targets, types, views
from jaxreplay._util import serialization as _serialization
from jaxreplay._util.signals import defer_interrupts as defer_interrupts
from jaxreplay._version import __version__
from jaxreplay.buffers import (
    CopyWarning,
    Groups,
    Mixture,
    ReplayBuffer,
    Rollout,
    RolloutState,
)
from jaxreplay.buffers.factories import (
    chunks,
    future_pairs,
    items,
    prioritized,
    rollout,
    sequences,
    transitions,
    uniform,
)
from jaxreplay.buffers.jitted import jit
from jaxreplay.buffers.mixture import mix
from jaxreplay.buffers.tiered import tiered
from jaxreplay.buffers.wrappers import frame_stack, hindsight, relabel, transform
from jaxreplay.distributed import sharded
from jaxreplay.inspection import inspect
from jaxreplay.inspection.plan import plan
from jaxreplay.samplers import (
    Newest,
    OnlineQueue,
    Prioritized,
    Queue,
    Recent,
    Uniform,
    UniformEpisodes,
    WithoutReplacement,
)
from jaxreplay.samplers.blend import blend
from jaxreplay.stateful.opened import open as open  # not in `__all__`, as it is a builtin, too
from jaxreplay.stateful.replay import Replay
from jaxreplay.storage.state import ReplayState
from jaxreplay.targets import gae, masked_mean, sequence_priority, vtrace
from jaxreplay.types import Sample, SequenceBatch, Step, Transition

__all__ = [
    "CopyWarning",
    "Groups",
    "Mixture",
    "Newest",
    "OnlineQueue",
    "Prioritized",
    "Queue",
    "Recent",
    "Replay",
    "ReplayBuffer",
    "ReplayState",
    "Rollout",
    "RolloutState",
    "Sample",
    "SequenceBatch",
    "Step",
    "Transition",
    "Uniform",
    "UniformEpisodes",
    "WithoutReplacement",
    "__version__",
    "actors",
    "autoreset",
    "blend",
    "chunks",
    "defer_interrupts",
    "frame_stack",
    "future_pairs",
    "gae",
    "hindsight",
    "inspect",
    "items",
    "jit",
    "masked_mean",
    "mix",
    "plan",
    "prioritized",
    "relabel",
    "rollout",
    "samplers",
    "sequence_priority",
    "sequences",
    "sharded",
    "targets",
    "tiered",
    "transform",
    "transitions",
    "types",
    "uniform",
    "views",
    "vtrace",
]

_serialization.tell_flax()


# Packages whose dependencies are extras, or that take time to import.
_LAZY = ("checkpoint", "datasets", "sb3", "torch")

if _typing.TYPE_CHECKING:
    from jaxreplay import (
        checkpoint as checkpoint,
        datasets as datasets,
        sb3 as sb3,
        torch as torch,
    )
else:

    def __getattr__(name: str) -> _typing.Any:
        if name not in _LAZY:
            raise AttributeError(f"jaxreplay has no {name}")
        try:
            return _importlib.import_module(f"jaxreplay.{name}")
        except ImportError as error:  # what `hasattr` expects
            raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
    return [*__all__, "open", *_LAZY]
