"""examples/one_file.py, the replay to copy."""

import dataclasses
import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from replay import Batch, NotOffered, Replay

AUTORESET = {"lost": "same_step_no_final_obs"}


def loaded(path=pathlib.Path(__file__).parents[3] / "examples" / "one_file.py"):
    spec = importlib.util.spec_from_file_location("one_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OneFile(Replay):
    """Pure functions, jitted, with donation."""

    name = "examples/one_file.py"
    code = loaded()  # a test puts a mutated module here

    def __init__(self, options):
        super().__init__(options)
        if options.kind not in ("uniform", "prioritized"):
            raise NotOffered(f"{options.kind}")
        self.config = self.code.Config(
            capacity=-(-options.capacity // options.num_envs) * options.num_envs,
            num_envs=options.num_envs,
            autoreset=AUTORESET.get(options.autoreset, options.autoreset),
            n_step=options.n_step,
            gamma=options.gamma,
            prioritized=options.kind == "prioritized",
            alpha=options.alpha,
        )
        self._add = jax.jit(self.code.add, donate_argnums=0)
        self._sample = jax.jit(functools.partial(self.code.sample, batch_size=options.batch_size))
        self._update = jax.jit(self.code.update_priorities, donate_argnums=0)
        self.state = None
        self.seed(options.seed)

    def seed(self, seed):
        self.key = jax.random.key(seed)

    def add(self, turn):
        if self.state is None:
            one = jax.tree.map(lambda leaf: leaf[0], (turn.obs, turn.action))
            self.state = self.code.init(self.config, *one)
        final = turn.final_obs if self.options.autoreset == "same_step" else None
        step = (turn.obs, turn.action, turn.reward, turn.terminated, turn.truncated)
        self.state = self._add(self.state, *step, final_obs=final, mask=turn.mask)

    def sample(self, beta=None):
        self.key, key = jax.random.split(self.key)
        batch = self._sample(self.state, key, beta=self.options.beta if beta is None else beta)
        t, weight, probability = jax.device_get((batch.transition, batch.weight, batch.probability))
        more = {"index": batch.index, "weight": weight, "probability": probability}
        return Batch(t.obs, t.action, t.reward, t.discount, t.next_obs, **more)

    def update_priorities(self, index, priority):
        self.state = self._update(self.state, index, np.asarray(priority, np.float32))

    def reset_max_priority(self):
        self.state = dataclasses.replace(self.state, max_priority=jnp.float32(1))

    def pure(self, turn):
        def row(turn):
            step = (turn.obs, turn.action, turn.reward, turn.terminated, turn.truncated)
            return (*step, turn.final_obs)

        state = self.code.init(self.config, turn.obs[0], turn.action[0])
        sample = functools.partial(self.code.sample, batch_size=self.options.batch_size)
        return state, row, lambda state, row: self.code.add(state, *row), sample

    def nbytes(self):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))
