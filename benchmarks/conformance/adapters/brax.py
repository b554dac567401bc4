"""brax: the queue of its SAC, `brax.training.replay_buffers.UniformSamplingQueue`."""

import importlib.metadata

import jax
import numpy as np
from brax.training import replay_buffers
from brax.training.types import Transition
from replay import Batch, NotOffered, Replay

REQUIREMENTS = "brax==0.14.2 jax==0.10.2 numpy==2.4.6"
PYTHON = "3.11"


class Queue(Replay):
    """Transitions as `acting.actor_step` makes them, inserted a batch of envs at a time.

    Its wrappers lose the final observation: there a truncation has a discount of 0, and the loss of
    SAC masks it. Where the env gives the final observation, `next_observation` is that one, and
    there is nothing to mask. Turns that are no transition are not inserted.
    """

    name = f"brax {importlib.metadata.version('brax')}, UniformSamplingQueue"

    def __init__(self, options):
        super().__init__(options)
        if options.kind != "uniform" or options.n_step != 1:
            raise NotOffered
        self.queue = None

    def add(self, turn):
        transitions = self.transitions(turn)
        if self.queue is None:
            self.queue = self.queue_for(transitions)
            self.insert = jax.jit(self.queue.insert_internal, donate_argnums=0)
            self.draw = jax.jit(self.queue.sample_internal, donate_argnums=0)
            self.state = self.queue.init(jax.random.key(self.options.seed))
        taken = ~turn.is_reset
        if turn.mask is not None:
            taken &= turn.mask
        if taken.any():
            transitions = jax.tree.map(lambda leaf: leaf[taken], transitions)
            self.queue.check_can_insert(self.state, transitions, 1)
            self.state = self.insert(self.state, transitions)

    def queue_for(self, transitions):
        return replay_buffers.UniformSamplingQueue(
            self.options.capacity,
            jax.tree.map(lambda leaf: leaf[0], transitions),
            self.options.batch_size,
        )

    def pure(self, turn):
        queue = self.queue_for(self.transitions(turn))
        sample = lambda state, key: queue.sample_internal(state.replace(key=key))[1]
        return queue.init(jax.random.key(0)), self.transitions, queue.insert_internal, sample

    def transitions(self, turn):
        is_lost = turn.final_obs is None
        ends = turn.terminated | turn.truncated if is_lost else turn.terminated
        truncation = turn.truncated if is_lost else np.zeros_like(turn.truncated)
        return jax.tree.map(
            np.asarray,
            Transition(
                observation=turn.obs,
                action=turn.action,
                reward=turn.reward,
                discount=1 - ends.astype(np.float32),
                next_observation=turn.next_obs if is_lost else turn.final_obs,
                extras={
                    "policy_extras": {},
                    "state_extras": {"truncation": truncation.astype(np.float32)},
                },
            ),
        )

    def sample(self, beta=None):
        valid = np.zeros(1, bool)
        while not valid.any():
            self.state, batch = self.draw(self.state)
            t = jax.device_get(batch)
            valid = t.extras["state_extras"]["truncation"] == 0  # as its loss masks them
        t = jax.tree.map(lambda leaf: leaf[valid], t)
        discount = self.options.gamma * t.discount
        return Batch(t.observation, t.action, t.reward, discount, t.next_observation)

    def nbytes(self):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def seed(self, seed):
        self.state = self.state.replace(key=jax.random.key(seed))
