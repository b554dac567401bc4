"""Replay buffers for Stable-Baselines3, with its own interface: observations stored once, timeouts
right, drawn on the device.

Pass one as `replay_buffer_class=`, with options in `replay_buffer_kwargs=`; the algorithms run on
them as they are.

    model = SAC("MultiInputPolicy", env, replay_buffer_class=jaxreplay.sb3.DictReplayBuffer)
"""

try:
    import stable_baselines3 as _  # noqa: F401
except ImportError as error:
    raise ImportError(
        "jaxreplay.sb3 needs Stable-Baselines3: pip install 'jaxreplay[sb3]'"
    ) from error

from jaxreplay.sb3.buffers import (
    DictReplayBuffer,
    NStepReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedSamples,
    ReplayBuffer,
)
from jaxreplay.sb3.dqn import PrioritizedDQN
from jaxreplay.sb3.hindsight import HerReplayBuffer

__all__ = [
    "DictReplayBuffer",
    "HerReplayBuffer",
    "NStepReplayBuffer",
    "PrioritizedDQN",
    "PrioritizedReplayBuffer",
    "PrioritizedSamples",
    "ReplayBuffer",
]
