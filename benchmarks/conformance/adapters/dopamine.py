"""dopamine: its replay for JAX, `dopamine.jax.replay_memory`, with accumulator and samplers.

It is made for one env. Of several, each has its own, and gives its part of the batch.
"""

import importlib.metadata
import os
import pathlib
from typing import ClassVar

import jax
import numpy as np
from dopamine.jax.replay_memory import accumulator, elements, replay_buffer, samplers
from replay import Batch, NotOffered, Replay

REQUIREMENTS = (
    "jax==0.10.2 flax==0.12.8 numpy==2.4.6 orbax-checkpoint==0.12.8 gin-config==0.5.0 absl-py "
    "msgpack python-snappy==0.7.3\n--no-deps dopamine-rl==4.1.2"
)
PYTHON = "3.11"
VERSION = importlib.metadata.version("dopamine-rl")


class _Replays(Replay):
    """A `ReplayBuffer` for each env, with the accumulator of its agents and no stacked frames."""

    arguable: ClassVar = {
        "observations_are_stored_once": "the docs of its ReplayBuffer say that it stores whole "
        "states, compressed, since to put them together at a sample takes time"
    }

    def __init__(self, options):
        super().__init__(options)
        if options.kind not in ("uniform", "prioritized") or isinstance(options.obs, dict):
            raise NotOffered
        self.capacity = -(-options.capacity // options.num_envs)
        self.generators = [np.random.default_rng() for _ in range(options.num_envs)]
        self.replays = [self.make(generator) for generator in self.generators]
        self.seed(options.seed)
        self.saves = 0

    def seed(self, seed):
        """Seed the generators that the samplers were made with; they draw from nothing else."""
        for env, generator in enumerate(self.generators):
            generator.bit_generator.state = np.random.default_rng(seed + env).bit_generator.state

    def make(self, generator):
        options = self.options
        if options.kind == "prioritized":
            sampler = samplers.PrioritizedSamplingDistribution(
                generator, priority_exponent=options.alpha, max_capacity=self.capacity
            )
        else:
            sampler = samplers.UniformSamplingDistribution(generator)
        return replay_buffer.ReplayBuffer(
            accumulator.TransitionAccumulator(
                stack_size=1, update_horizon=options.n_step, gamma=options.gamma
            ),
            sampler,
            batch_size=options.batch_size // options.num_envs,
            max_capacity=self.capacity,
        )

    def add(self, turn):
        for env, replay in enumerate(self.replays):
            if turn.is_reset[env] or not (turn.mask is None or turn.mask[env]):
                continue
            for element in self.elements_of(turn, env):
                more = {}
                if self.options.kind == "prioritized":  # as `JaxDQNAgent._store_transition` does
                    tree = replay._sampling_distribution._sum_tree
                    more["priority"] = tree.max_recorded_priority
                replay.add(element, **more)

    def sample(self, beta=None):
        drawn = [replay.sample(with_sample_metadata=True) for replay in self.replays]
        t = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(one for one, _ in drawn))
        more = {}
        if self.options.kind == "prioritized":
            keys = [metadata.keys for _, metadata in drawn]
            env = np.repeat(np.arange(len(keys)), [len(own) for own in keys])
            more["index"] = np.stack([env, np.concatenate(keys)])
            probability = np.concatenate([metadata.probabilities for _, metadata in drawn])
            # `JaxRainbowAgent._train_step` has an exponent of 1/2
            weight = (1 / probability) ** (self.options.beta if beta is None else beta)
            more["weight"] = weight / weight.max()
            more["probability"] = probability / len(keys)
        discount = self.options.gamma**self.options.n_step * (1.0 - t.is_terminal)
        state, next_state = t.state[..., 0], t.next_state[..., 0]
        return Batch(state, t.action, t.reward, discount, next_state, **more)

    def update_priorities(self, index, priority):
        for env, replay in enumerate(self.replays):
            own = index[0] == env
            if own.any():
                replay.update(index[1][own], priorities=np.asarray(priority)[own])

    def nbytes(self):
        """Return what a full replay takes, by the items that are stored: it grows."""
        items = [item for replay in self.replays for item in replay._memory.values()]
        each = sum(np.asarray(leaf).nbytes for item in items for leaf in jax.tree.leaves(item))
        return each / len(items) * self.capacity * len(self.replays)

    def save(self, path):
        for env, replay in enumerate(self.replays):
            replay.save(os.path.join(path, str(env)), self.saves)
        pathlib.Path(path, "n_step").write_text(str(self.options.n_step))
        self.saves += 1

    def load(self, path):
        """Load the newest iteration that all envs have."""
        if pathlib.Path(path, "n_step").read_text() != str(self.options.n_step):
            raise NotOffered("what is stored are targets, of one n")
        folders = [os.path.join(path, str(env)) for env in range(len(self.replays))]
        newest = [max(int(name) for name in os.listdir(f) if name.isdigit()) for f in folders]
        for folder, replay in zip(folders, self.replays, strict=True):
            replay.load(folder, min(newest))
        self.saves = min(newest) + 1


class AsItsAgents(_Replays):
    """As `JaxDQNAgent.step` and `end_episode` add: each step with its reward and its end.

    The accumulator takes an end to be reached one step earlier, and the last step is never stored
    (google/dopamine#228 has it for stacked frames).
    """

    name = f"dopamine-rl {VERSION}, as its agents add"

    def elements_of(self, turn, env):
        terminated = bool(turn.terminated[env])
        yield elements.TransitionElement(
            turn.obs[env],
            int(turn.action[env]),
            float(turn.reward[env]),
            terminated,
            terminated or bool(turn.truncated[env]),
        )


class WithFinalObs(_Replays):
    """With one more element at an end: the final observation, of no reward, has the flags.

    Its agents do not add it, and the docs do not name it. It is the way that lets the accumulator
    see an episode's last step.
    """

    name = f"dopamine-rl {VERSION}, with final observations added"

    def elements_of(self, turn, env):
        terminated, truncated = bool(turn.terminated[env]), bool(turn.truncated[env])
        is_lost = turn.final_obs is None
        action, reward = int(turn.action[env]), float(turn.reward[env])
        yield elements.TransitionElement(
            turn.obs[env], action, reward, False, truncated and is_lost
        )
        if terminated or (truncated and not is_lost):
            final = turn.obs if is_lost else turn.final_obs  # no target has that of a termination
            yield elements.TransitionElement(final[env], 0, 0.0, terminated, True)
