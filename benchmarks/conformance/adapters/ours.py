"""jaxreplay in each of its forms."""

import atexit
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from replay import Batch, Replay
from streams import Stream

import jaxreplay as jr
from jaxreplay import checkpoint

AUTORESET = {"lost": "same_step_no_final_obs"}


def buffer_of(options):
    shared = {
        "capacity": 2 * options.capacity if options.kind == "goals" else options.capacity,
        "num_envs": options.num_envs,
        "batch_size": options.batch_size,
        "autoreset": AUTORESET.get(options.autoreset, options.autoreset),
        "allow_mask": True,
    }
    steps = {"n_step": options.n_step, "gamma": options.gamma}
    if options.kind == "prioritized":
        return jr.prioritized(**shared, **steps, alpha=options.alpha, beta=options.beta)
    if options.kind == "sequences":
        more = {"length": options.length, "burn_in": options.burn_in}
        return jr.sequences(**shared, **more, recurrent_state_key="state")
    buffer = jr.uniform(**shared, **steps)
    if options.kind == "goals":
        return jr.hindsight(buffer, reward, relabel_fraction=1.0)
    return buffer


def reward(achieved, goal, step):
    return jnp.where((achieved == goal).all(-1), 0.0, -1.0)


def step_of(turn, options):
    """Return a step of all envs. The row of a reset is added, too, and never sampled."""
    obs, final = turn.obs, turn.final_obs
    if options.kind == "goals":
        goal = -np.ones_like(obs)
        obs = {"observation": obs, "achieved_goal": obs, "desired_goal": goal}
        final = {"observation": final, "achieved_goal": final, "desired_goal": goal}
    fields = {"terminated": turn.terminated, "truncated": turn.truncated}
    if options.autoreset == "same_step":
        fields["final_obs"] = final
    if options.kind == "sequences":
        fields["extras"] = {"state": turn.state}
    return jr.Step(obs, turn.action, turn.reward, **fields)


def batch_of(batch, options):
    t = jax.device_get(batch.experience)
    same = {"index": batch.index, "weight": np.asarray(batch.weight)}
    same["probability"] = np.asarray(batch.probability)
    if options.kind == "sequences":
        return Batch(
            t.obs, t.action, t.reward, mask=t.mask, is_first=t.is_first, state=t.recurrent_state
        )
    if options.kind == "goals":
        obs = t.obs
        return Batch(
            obs["observation"], t.action, t.reward, index=batch.index, goal=obs["desired_goal"]
        )
    return Batch(t.obs, t.action, t.reward, t.discount, t.next_obs, **same)


class Jitted(Replay):
    """Pure functions, jitted, with donation."""

    name = f"jaxreplay {jr.__version__}, jr.jit"

    def __init__(self, options):
        super().__init__(options)
        self.buffer = jr.jit(buffer_of(options))
        self.state = None
        self.seed(options.seed)

    def seed(self, seed):
        self.key = jax.random.key(seed)

    def add(self, turn):
        step = step_of(turn, self.options)
        if self.state is None:
            self.example = jax.tree.map(lambda leaf: leaf[0], step)
            self.state = self.buffer.init(self.example)
        self.state = self.buffer.add(self.state, step, turn.mask)

    def sample(self, beta=None):
        self.key, key = jax.random.split(self.key)
        given = {} if beta is None else {"beta": beta}
        return batch_of(self.buffer.sample(self.state, key, **given), self.options)

    def update_priorities(self, index, priority):
        priority = np.asarray(priority, np.float32)
        self.state = self.buffer.update_priorities(self.state, index, priority)

    def reset_max_priority(self):
        self.state = self.buffer.reset_max_priority(self.state)

    def nbytes(self):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def pure(self, turn):
        buffer, row = self.buffer.buffer, lambda turn: step_of(turn, self.options)
        state = buffer.init(jax.tree.map(lambda leaf: leaf[0], row(turn)))
        return state, row, buffer.add, buffer.sample

    def save(self, path):
        checkpoint.save(path, self.buffer.buffer, self.state)

    def load(self, path):
        turn = Stream(self.options).turn()
        self.example = jax.tree.map(lambda leaf: leaf[0], step_of(turn, self.options))
        self.state = checkpoint.restore(path, self.buffer.buffer, self.example)


class OnDevice(Replay):
    """`jr.Replay`."""

    name = f"jaxreplay {jr.__version__}, Replay"
    is_threadsafe = True
    rows = staticmethod(lambda: "device")

    def __init__(self, options):
        super().__init__(options)
        buffer = buffer_of(options)
        self.replay = jr.Replay(buffer, framework="numpy", seed=options.seed, rows=self.rows())

    def add(self, turn):
        self.replay.add(step_of(turn, self.options), mask=turn.mask)

    def sample(self, beta=None):
        given = {} if beta is None else {"beta": beta}
        return batch_of(self.replay.sample(**given), self.options)

    def update_priorities(self, index, priority):
        self.replay.update_priorities(index, np.asarray(priority, np.float32))

    def reset_max_priority(self):
        self.replay.reset_max_priority()

    def nbytes(self):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.replay.state))

    def save(self, path):
        self.replay.save(path)

    def load(self, path):
        self.replay.load(path)


class OnHost(OnDevice):
    """`jr.Replay(rows="host")`."""

    name = f"jaxreplay {jr.__version__}, rows on the host"
    rows = staticmethod(lambda: "host")


class InFiles(OnDevice):
    """`jr.Replay(rows=folder)`."""

    name = f"jaxreplay {jr.__version__}, rows in files"

    @staticmethod
    def rows():
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def save(self, path):
        self.replay.save(path, copy=True)
