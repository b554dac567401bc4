"""Buffers: `ReplayBuffer`, its forms and wrappers, `Rollout`, `Groups` and `Mixture`."""

from jaxreplay.buffers.factories import (
    BufferOptions as BufferOptions,
    ItemOptions as ItemOptions,
)
from jaxreplay.buffers.groups import Groups as Groups, GroupsState as GroupsState
from jaxreplay.buffers.index_buffer import Plan as Plan
from jaxreplay.buffers.jitted import Jitted as Jitted
from jaxreplay.buffers.memory import Memory as Memory
from jaxreplay.buffers.mixture import Mixture as Mixture
from jaxreplay.buffers.replay_buffer import ReplayBuffer as ReplayBuffer
from jaxreplay.buffers.rollout import Rollout as Rollout, RolloutState as RolloutState
from jaxreplay.buffers.state_checks import CopyWarning as CopyWarning
from jaxreplay.buffers.tiered import Tiered as Tiered
from jaxreplay.storage.host_rows import RowStore as RowStore
