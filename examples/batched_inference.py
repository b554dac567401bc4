"""The DQN of actors_dqn.py, whose actors are threads: one program computes the actions of all.

    python examples/batched_inference.py   # two minutes on two cores; writes a plot

Parameters stay on the learner's device, where actions are computed, too, as in SEED RL: in one
batch for the actors that have asked while the one before was computed. This is for large networks,
and envs that compute without Python's lock. Copy `Inference` and `act`.

References:
  Espeholt et al., "SEED RL: Scalable and Efficient Deep-RL with Accelerated Central Inference"
  (2020).
"""

import concurrent.futures
import functools
import queue
import sys
import threading

import actors_dqn as dqn
import gymnasium
import numpy as np

import jaxreplay as jr


class Inference:
    """Values of actions, computed for all actors in one batch."""

    def __init__(self):
        self._params, self._asked = None, queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def take(self, params):
        """Compute with these parameters from now on. Return None, to be published: actors learn
        their version alone."""
        self._params = params

    def values(self, envs, obs):
        """Return the values [e, A] of the actions in some envs."""
        answer = concurrent.futures.Future()
        self._asked.put((envs, obs, answer))
        return answer.result()

    def _run(self):
        obs = np.zeros((dqn.NUM_ENVS, 4), np.float32)  # of one shape, so that one program is enough
        while True:
            asked = [self._asked.get()]
            while not self._asked.empty():
                asked.append(self._asked.get())
            for envs, its, _ in asked:
                obs[envs] = its
            values = np.asarray(dqn.q(self._params, obs))
            for envs, _, answer in asked:
                answer.set_result(values[envs])


def act(inference, actor):
    """Take steps in the envs of one actor. Runs in a thread."""
    envs = gymnasium.make_vec(dqn.ENV, num_envs=actor.num_envs)
    random = np.random.default_rng(actor.seed)
    epsilon = 0.4 ** (1 + 7 * actor.index / max(actor.num_actors - 1, 1))
    obs, _ = envs.reset(seed=actor.seed)
    while actor.running:
        actor.params()  # None: `actor.version` is what acts now
        greedy = inference.values(actor.envs, obs).argmax(-1)
        explores = random.random(actor.num_envs) < epsilon
        action = np.where(explores, random.integers(2, size=actor.num_envs), greedy)
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        actor.add(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
        obs = next_obs


def main(argv=None):
    inference = Inference()
    options = {"act": functools.partial(act, inference), "published": inference.take}
    return dqn.main(argv, __doc__, "batched_inference", jr.actors.threads(), **options)


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the mean return is below the target")
