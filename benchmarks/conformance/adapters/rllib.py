"""RLlib's episode replay buffers of the new API stack, as EnvRunners fill and DQN samples them."""

import pathlib
import pickle
from typing import ClassVar

import numpy as np
import ray
import tree
from ray import cloudpickle
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer
from replay import Batch, NotOffered, Replay

REQUIREMENTS = "ray[rllib]==2.60.0 torch==2.13.0 gymnasium==1.2.2 numpy==2.4.6"
PYTHON = "3.11"


def stacked(items):
    return tree.map_structure(lambda *leaves: np.stack(leaves), *items)


class Episodes(Replay):
    """`EpisodeReplayBuffer`. Chunks of `n_step` steps of an episode are added, and shorter ones at
    its end, as EnvRunners return them: DQN and SAC refuse a `rollout_fragment_length` below."""

    name = f"ray {ray.__version__}, EpisodeReplayBuffer"

    def __init__(self, options):
        super().__init__(options)
        if options.autoreset == "lost":
            raise NotOffered("the last observation of an episode is part of it")
        self.buffer = self.make()
        self.ongoing = [SingleAgentEpisode() for _ in range(options.num_envs)]
        self.seed(options.seed)

    def make(self):
        if self.options.kind not in ("uniform", "sequences"):
            raise NotOffered
        return EpisodeReplayBuffer(self.options.capacity)

    def seed(self, seed):
        self.buffer.rng = np.random.default_rng(seed)

    def add(self, turn):
        steps = ~turn.is_reset if turn.mask is None else turn.mask & ~turn.is_reset
        of_env = lambda leaves, env: tree.map_structure(lambda leaf: leaf[env], leaves)
        chunks = []
        for env in np.flatnonzero(steps):
            episode = self.ongoing[env]
            if not episode.is_reset:
                episode.add_env_reset(of_env(turn.obs, env))
            more = {} if turn.state is None else {"extra_model_outputs": {"state": turn.state[env]}}
            episode.add_env_step(
                of_env(turn.final_obs, env),
                turn.action[env],
                turn.reward[env],
                terminated=bool(turn.terminated[env]),
                truncated=bool(turn.truncated[env]),
                **more,
            )
            if episode.is_done or len(episode) == self.options.n_step:
                # an EnvRunner goes on in a chunk with the same id, or with a new episode
                self.ongoing[env] = SingleAgentEpisode() if episode.is_done else episode.cut()
                chunks.append(episode.to_numpy())
        if chunks:
            self.buffer.add(chunks)

    def draw(self, beta):
        return self.buffer.sample(
            num_items=self.options.batch_size,
            n_step=self.options.n_step,
            batch_length_T=0,
            gamma=self.options.gamma,
            beta=self.options.beta if beta is None else beta,
            sample_episodes=True,
        )

    def sample(self, beta=None):
        if self.options.kind == "sequences":
            return self.sequences()
        episodes = self.draw(beta)
        # as the learner's connectors and DQNTorchLearner have it
        n_step, weight = (
            np.array([e.get_extra_model_outputs(name, 0) for e in episodes])
            for name in ("n_step", "weights")
        )
        terminated = np.array([e.is_terminated for e in episodes])
        return Batch(
            stacked([e.get_observations(0) for e in episodes]),
            np.array([e.get_actions(0) for e in episodes]),
            np.array([e.get_rewards(0) for e in episodes]),
            self.options.gamma**n_step * (1.0 - terminated),
            stacked([e.get_observations(-1) for e in episodes]),
            weight=weight,
        )

    def sequences(self):
        """As DQN samples for a recurrent module; a short one is padded, with a mask, as the
        learner's connectors do."""
        length = self.options.burn_in + self.options.length
        episodes = self.buffer.sample(
            num_items=self.options.batch_size,
            n_step=1,
            batch_length_T=length,
            lookback=0,
            gamma=self.options.gamma,
            beta=self.options.beta,
            sample_episodes=True,
            include_extra_model_outputs=True,
        )

        def padded(items):
            items = np.asarray(items)
            return np.concatenate([items, np.zeros((length - len(items), *items.shape[1:]))])

        return Batch(
            np.stack([padded(e.get_observations()[: len(e)]) for e in episodes]),
            np.stack([padded(e.get_actions()) for e in episodes]),
            np.stack([padded(e.get_rewards()) for e in episodes]),
            mask=np.stack([np.arange(length) < len(e) for e in episodes]),
            state=np.array([e.get_extra_model_outputs("state", 0) for e in episodes]),
        )

    def nbytes(self):
        leaves = tree.flatten([episode.get_state() for episode in self.buffer.episodes])
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray))

    def save(self, path):
        """`get_state` in a file of each save, as `Algorithm.save_to_path` has a folder of each. The
        episodes that go on belong to the EnvRunners; they are kept for a loop that goes on, too.
        """
        number = len(list(pathlib.Path(path).parent.glob("save_*.pkl")))
        with open(f"{path}_{number}.pkl", "wb") as file:
            cloudpickle.dump((self.buffer.get_state(), self.ongoing), file)

    def load(self, path):
        """Load the newest file; of one that was cut short, the user would take the one before."""
        number = lambda file: int(file.stem.split("_")[-1])
        files = sorted(pathlib.Path(path).parent.glob("save_*.pkl"), key=number)
        while files:
            try:
                with open(files.pop(), "rb") as file:
                    state, self.ongoing = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                continue
            self.buffer.set_state(state)
            return
        raise FileNotFoundError(path)


class PrioritizedEpisodes(Episodes):
    """`PrioritizedEpisodeReplayBuffer`; with an alpha of 0, "no prioritization", if uniform."""

    name = f"ray {ray.__version__}, PrioritizedEpisodeReplayBuffer"
    arguable: ClassVar[dict[str, str]] = {
        "n_step_targets_of_the_last_steps": "its docs (of _update_sample_metrics): a step too near "
        "to the episode's end to cover n_step is drawn again"
    }

    def make(self):
        options = self.options
        if options.kind not in ("uniform", "prioritized"):
            raise NotOffered
        alpha = options.alpha if options.kind == "prioritized" else 0.0
        self.num_samples = 0
        return PrioritizedEpisodeReplayBuffer(options.capacity, alpha=alpha)

    def add(self, turn):
        if max(episode.t for episode in self.ongoing) >= self.options.capacity:
            # the docs of `add`: it evicts whole episodes, so "the user is advised to select a large
            # enough buffer with regard to the maximum expected episode length"
            raise NotOffered("no episode may be longer than the buffer")
        super().add(turn)

    def sample(self, beta=None):
        batch = super().sample(beta)
        self.num_samples += 1
        batch.index = self.num_samples
        return batch

    def update_priorities(self, index, priority):
        if index != self.num_samples:  # its docs: to sample and to update need to alternate
            raise NotOffered("priorities are updated of the last sample alone")
        self.buffer.update_priorities(priority)
