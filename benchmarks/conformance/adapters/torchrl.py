"""TorchRL, as the docstrings of its replay buffers, samplers and transforms show it."""

import importlib.metadata
import logging

import numpy as np
import torch
from replay import Batch, NotOffered, Replay
from tensordict import TensorDict
from torchrl.checkpoint import Checkpoint
from torchrl.data import (
    HERReplayBuffer,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers import TensorDictRoundRobinWriter
from torchrl.envs import MultiStepTransform

# With another version of torch than that which the wheel was built for, its extension is to be
# compiled (torchrl/csrc): there are no priorities without.
REQUIREMENTS = "torchrl==0.14.1 tensordict==0.14.3 torch==2.13.0 numpy==2.4.6"
PYTHON = "3.11"
VERSION = importlib.metadata.version("torchrl")
logging.getLogger("torchrl").setLevel(logging.WARNING)
torch.set_num_threads(1)  # more of them spin, for adds of one row


def tensor_of(leaf):
    leaf = np.asarray(leaf)
    if leaf.dtype.name == "bfloat16":  # which torch doesn't take from NumPy
        return torch.from_numpy(leaf.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(leaf.copy())


def numpy_of(leaf):
    if leaf.dtype == torch.bfloat16:
        import ml_dtypes

        return leaf.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return leaf.numpy()


def to_torch(obs, num_envs):
    if isinstance(obs, dict):
        return TensorDict({key: tensor_of(leaf) for key, leaf in obs.items()}, [num_envs])
    return tensor_of(obs)


def to_numpy(obs):
    if isinstance(obs, TensorDict):
        return {key: numpy_of(leaf) for key, leaf in obs.items()}
    return numpy_of(obs)


def reward(td):
    """Return the reward of goals: 0 where the step got there."""
    there = (td["next", "achieved_goal"] == td["desired_goal"]).all(-1, keepdim=True)
    return there.float() - 1


class Docs(Replay):
    """`TensorDictReplayBuffer` and the classes beside it, by the examples of their docstrings."""

    name = f"torchrl {VERSION}"

    def __init__(self, options):
        super().__init__(options)
        # Windows and slices need an axis of time, in which each of several envs has each step. Of
        # one-step items there is none, and the steps that were taken are added.
        self.has_time = options.n_step > 1 or options.kind == "sequences"
        skips = options.autoreset == "next_step" and options.num_envs > 1
        if options.autoreset == "lost" or (self.has_time and skips):
            raise NotOffered
        self.rb = self.buffer()

    def shared(self):
        o = self.options
        ndim = 2 if self.has_time else 1
        more = {"transform": self.multi_step()} if o.n_step > 1 else {}
        return {
            "storage": LazyTensorStorage(o.capacity, ndim=ndim),
            "batch_size": o.batch_size,
            "generator": torch.Generator().manual_seed(o.seed),
            **more,
        }

    def multi_step(self):
        return MultiStepTransform(n_steps=self.options.n_step, gamma=self.options.gamma)

    def buffer(self):
        o, shared = self.options, self.shared()
        if o.kind == "prioritized" and self.has_time:
            return ReplayBuffer(sampler=PrioritizedSampler(o.capacity, o.alpha, o.beta), **shared)
        if o.kind == "prioritized":
            return TensorDictPrioritizedReplayBuffer(alpha=o.alpha, beta=o.beta, **shared)
        if o.kind == "sequences":
            length = o.burn_in + o.length
            sampler = SliceSampler(slice_len=length, end_key=("next", "done"))
            shared["batch_size"] *= length
            return ReplayBuffer(sampler=sampler, **shared)
        if o.kind == "goals":
            # The goal that a step achieved is that of its next observation, so that it's the
            # future's.
            return HERReplayBuffer(
                reward, her_ratio=1.0, achieved_goal_key=("next", "achieved_goal"), **shared
            )
        # TensorDictReplayBuffer (and its prioritized one) fails to add one step of several envs
        # along two axes: it tells the axes of their indices by their number.
        return (ReplayBuffer if self.has_time else TensorDictReplayBuffer)(**shared)

    def add(self, turn):
        o = self.options
        e = o.num_envs
        column = lambda leaf: tensor_of(leaf)[:, None]
        done = turn.terminated | turn.truncated
        after = {
            "observation": to_torch(turn.final_obs, e),
            "reward": column(turn.reward),
            "terminated": column(turn.terminated),
            "truncated": column(turn.truncated),
            "done": column(done),
        }
        td = {"observation": to_torch(turn.obs, e), "action": tensor_of(turn.action)}
        if o.kind == "goals":
            td["desired_goal"] = -torch.ones_like(td["observation"])
            after |= {"desired_goal": td["desired_goal"], "achieved_goal": after["observation"]}
        if o.kind == "sequences":
            td["recurrent_state"] = column(turn.state)
        td = TensorDict({**td, "next": TensorDict(after, [e])}, [e])
        took = ~turn.is_reset if turn.mask is None else turn.mask & ~turn.is_reset
        if self.has_time and e > 1 and turn.mask is not None:
            raise NotOffered
        if not self.has_time or e == 1:
            td = td[torch.from_numpy(took)]
        if len(td):
            self.rb.extend(td.unsqueeze(-1) if self.has_time else td)

    def sample(self, beta=None):
        o = self.options
        if beta is not None:
            self.rb.sampler.beta = beta  # as its ParameterScheduler does
        td, info = self.rb.sample(return_info=True)
        if o.kind == "sequences":
            td = td.reshape(-1, o.burn_in + o.length)
            return Batch(
                to_numpy(td["observation"]),
                td["action"].numpy(),
                td["next", "reward"][..., 0].numpy(),
                state=td["recurrent_state"][:, 0, 0].numpy(),
            )
        # td0_return_estimate: gamma ** steps_to_next_obs, and nothing where terminated
        steps = td["steps_to_next_obs"].reshape(-1) if o.n_step > 1 else 1
        batch = Batch(
            to_numpy(td["observation"]),
            td["action"].numpy(),
            td["next", "reward"][:, 0].numpy(),
            (o.gamma**steps * (~td["next", "terminated"][:, 0]).float()).numpy(),
            to_numpy(td["next", "observation"]),
        )
        if o.kind == "prioritized":
            batch.index, batch.weight = self.index_of(info), info["priority_weight"].numpy()
        if o.kind == "goals":
            batch.goal = td["desired_goal"].numpy()
        return batch

    def index_of(self, info):
        index = info["index"]
        return torch.stack(index, -1) if isinstance(index, tuple) else index

    def update_priorities(self, index, priority):
        self.rb.update_priority(index, torch.as_tensor(np.asarray(priority, np.float32)))

    def nbytes(self):
        leaves = self.rb.storage[:].values(True, True)
        return sum(leaf.untyped_storage().nbytes() for leaf in leaves)

    def save(self, path):
        self.rb.dumps(path)

    def load(self, path):
        self.rb.loads(path)
        self.check_loaded()

    def check_loaded(self):
        if self.options.n_step > 1 and self.rb.storage[:].get("steps_to_next_obs", None) is None:
            raise NotOffered("MultiStepTransform makes targets when steps are added")

    def seed(self, seed):
        self.rb.set_rng(torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)  # the generator "has no effect on the transforms": HER


class WithOptions(Docs):
    """The same with options that are off by default: the largest priority is that of the steps
    which are stored, slots have generations, `terminated` is that of a window's last step, and
    saves are those of `torchrl.checkpoint`, which are "atomic".
    """

    name = f"torchrl {VERSION}, with options"

    def multi_step(self):
        # "All entries [...] that are not part of the done_keys or reward_keys will be mapped"
        return MultiStepTransform(self.options.n_step, self.options.gamma, done_keys=["done"])

    def buffer(self):
        o = self.options
        if o.kind != "prioritized":
            return super().buffer()
        return (ReplayBuffer if self.has_time else TensorDictReplayBuffer)(
            sampler=PrioritizedSampler(
                o.capacity, o.alpha, o.beta, max_priority_within_buffer=True
            ),
            writer=TensorDictRoundRobinWriter(track_generations=True),
            **self.shared(),
        )

    def index_of(self, info):
        return super().index_of(info), info["index_generation"]

    def update_priorities(self, index, priority):
        index, generation = index
        same = self.rb.writer.generations_of(index) == generation
        if same.any():
            super().update_priorities(index[same], np.asarray(priority)[same.numpy()])

    def reset_max_priority(self):
        pass  # it falls by itself

    def save(self, path):
        Checkpoint(buffer=self.rb).save(path)

    def load(self, path):
        Checkpoint(buffer=self.rb).load(path)
        self.check_loaded()
