"""Replay buffers with Stable-Baselines3's interface.

They store each observation once, bootstrap correctly at timeouts, and sample on the device. Pass
one as `replay_buffer_class=`, and its options in `replay_buffer_kwargs=`. The algorithms run
unchanged.

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
from jaxreplay.sb3.hindsight import HerReplayBuffer, PrioritizedHerReplayBuffer
from jaxreplay.sb3.saves import SaveCallback, resume

__all__ = [
    "DictReplayBuffer",
    "HerReplayBuffer",
    "NStepReplayBuffer",
    "PrioritizedDQN",
    "PrioritizedHerReplayBuffer",
    "PrioritizedReplayBuffer",
    "PrioritizedSamples",
    "ReplayBuffer",
    "SaveCallback",
    "resume",
]
