"""The drop-in buffers of `jaxreplay.sb3`, used as Stable-Baselines3's are."""

import pathlib
from typing import ClassVar

import numpy as np
from replay import Batch, loaded

import jaxreplay as jr
import jaxreplay.sb3

theirs = loaded(pathlib.Path(__file__).with_name("sb3.py"))


class DropIns(theirs.StableBaselines3):
    """The same, with the classes of `jaxreplay.sb3`, and with priorities."""

    name = f"jaxreplay {jr.__version__}, sb3"
    uniform, n_step = jaxreplay.sb3.ReplayBuffer, jaxreplay.sb3.NStepReplayBuffer
    of_dicts, hindsight = jaxreplay.sb3.DictReplayBuffer, jaxreplay.sb3.HerReplayBuffer
    arguable: ClassVar[dict[str, str]] = {}

    def class_of(self, is_dict, kwargs):
        options = self.options
        if options.kind == "prioritized":
            kwargs |= {"alpha": options.alpha, "beta": options.beta}
            kwargs |= {"n_steps": options.n_step, "gamma": options.gamma}
            return jaxreplay.sb3.PrioritizedReplayBuffer
        return super().class_of(is_dict, kwargs)

    def nbytes(self):
        return self.replay.nbytes

    def sample(self, beta=None):
        if self.options.kind != "prioritized":
            return super().sample()
        if beta is not None:
            self.replay.beta = beta
        data = self.replay.sample(self.options.batch_size)
        discount = (1 - data.dones) * data.discounts
        return Batch(
            data.observations.numpy(),
            data.actions.numpy(),
            data.rewards.numpy()[:, 0],
            discount.numpy()[:, 0],
            data.next_observations.numpy(),
            index=data.indices,
            weight=data.weights.numpy()[:, 0],
        )

    def update_priorities(self, index, priority):
        self.replay.update_priorities(index, np.asarray(priority))
