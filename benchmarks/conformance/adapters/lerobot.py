"""LeRobot's `ReplayBuffer` of HIL-SERL, as its actor and learner (`lerobot.rl`) use it."""

import importlib.metadata
from typing import ClassVar

import numpy as np
import torch
from lerobot.rl.buffer import ReplayBuffer
from replay import Batch, NotOffered, Replay

# The last version for Python 3.11; with --no-deps, since torchvision's wheels on the index need
# CUDA, and 0.15.2 is the last one of which `transforms` works without. lerobot 0.6.1 (Python
# 3.12) has the same buffer but for a lock around add and sample.
REQUIREMENTS = (
    "torch==2.13.0 datasets<5 av<16 huggingface-hub<0.36 draccus==0.10.0 einops gymnasium "
    "deepdiff<9 jsonlines packaging<26 termcolor accelerate psutil safetensors pillow "
    "numpy==2.2.6\n--no-deps lerobot==0.4.4 torchvision==0.15.2"
)
PYTHON = "3.11"
VERSION = importlib.metadata.version("lerobot")


def names(obs):
    return [f"observation.{key}" for key in obs] if isinstance(obs, dict) else ["observation.state"]


def tensor_of(leaf):
    if leaf.dtype.name == "bfloat16":  # which torch doesn't take from NumPy
        return torch.as_tensor(leaf.view(np.int16)).view(torch.bfloat16)
    return torch.as_tensor(leaf)


def state_of(obs, env):
    """Return one env's state, with the batch axis of 1 that the actor's have."""
    leaves = obs.values() if isinstance(obs, dict) else [obs]
    tensors = (tensor_of(leaf[env : env + 1]) for leaf in leaves)
    return dict(zip(names(obs), tensors, strict=True))


def obs_of(state, like):
    if isinstance(like, dict):
        return {key: state[name].numpy() for key, name in zip(like, names(like), strict=True)}
    return state["observation.state"].numpy()


class Plain(Replay):
    """`ReplayBuffer` with its defaults, but for the augmentation of images.

    Its learner writes the rows to a dataset for a resume ("TODO: temporary", and "truncation are
    not supported yet"). That is an export, at about 50 rows a second, and no save.
    """

    name = f"lerobot {VERSION}"
    optimize_memory = False

    def __init__(self, options):
        super().__init__(options)
        # its actor gives each transition with the next_state that the env returned
        if options.kind != "uniform" or options.n_step > 1 or options.autoreset == "lost":
            raise NotOffered
        self.rb = ReplayBuffer(
            options.capacity,
            device="cpu",
            state_keys=names(options.obs),
            use_drq=False,
            optimize_memory=self.optimize_memory,
        )
        self.seed(options.seed)

    def add(self, turn):
        took = ~turn.is_reset if turn.mask is None else turn.mask & ~turn.is_reset
        for env in np.flatnonzero(took):
            self.rb.add(
                state=state_of(turn.obs, env),
                action=torch.as_tensor(turn.action[env : env + 1, None]),
                reward=float(turn.reward[env]),
                next_state=state_of(turn.final_obs, env),
                done=bool(turn.terminated[env]),
                truncated=bool(turn.truncated[env]),
            )

    def sample(self, beta=None):
        batch, obs = self.rb.sample(self.options.batch_size), self.options.obs
        return Batch(
            obs_of(batch["state"], obs),
            batch["action"][:, 0].numpy(),
            batch["reward"].numpy(),
            (1 - batch["done"].numpy()) * self.options.gamma,  # as its SAC has it
            obs_of(batch["next_state"], obs),
        )

    def nbytes(self):
        rb = self.rb
        leaves = [rb.actions, rb.rewards, rb.dones, rb.truncateds, *rb.states.values()]
        if rb.next_states is not rb.states:
            leaves += rb.next_states.values()
        return sum(leaf.untyped_storage().nbytes() for leaf in leaves)

    def seed(self, seed):
        torch.manual_seed(seed)


class Optimized(Plain):
    """`optimize_memory=True`, which its learner takes: the next state is that of the next row.

    It has no axis of envs, so that it's for one.
    """

    name = f"lerobot {VERSION}, optimize_memory"
    optimize_memory = True
    arguable: ClassVar = dict.fromkeys(
        (
            "true_final_observation_with_same_step",
            "true_final_observation_with_next_step",
        ),
        "its docstring has it for data 'where next_state[i] = state[i+1]', which no end is; its "
        "learner sets it for all",
    )

    def __init__(self, options):
        if options.num_envs > 1:
            raise NotOffered
        super().__init__(options)
