"""flashbax: its flat, item and trajectory buffers, used as its README and its examples do.

Pure functions, jitted, the state donated. Importance weights are those of its
`anakin_prioritised_dqn_example`. The README leaves ends of episodes to the user ("Handling Episode
Truncation"); each class says how it handles them.
"""

import contextlib
import importlib.metadata
import io
import os
import shutil
from typing import ClassVar

import flashbax as fbx
import jax
import jax.numpy as jnp
import numpy as np
from replay import Batch, NotOffered, Replay
from streams import Stream

REQUIREMENTS = "flashbax==0.1.3 jax==0.10.2 numpy==2.4.6"
PYTHON = "3.11"
VERSION = importlib.metadata.version(fbx.__name__.partition(".")[0])
SLOTS = {
    "late_updates_change_no_other_step": "its `set_priorities` takes locations in the buffer, "
    "by its docstring, and not rows"
}
DUPLICATES = {
    "observations_are_stored_once": "flashbax's README says that transitions with a next "
    "observation have duplicate observations, for ease and speed"
}


class _Buffer(Replay):
    """What the buffers have in common."""

    kinds = ("uniform", "prioritized")
    arguable: ClassVar = SLOTS

    def __init__(self, options):
        super().__init__(options)
        if options.kind not in self.kinds:
            raise NotOffered(options.kind)
        buffer = self.make()
        self.buffer = buffer.replace(
            init=jax.jit(buffer.init),
            add=jax.jit(buffer.add, donate_argnums=0),
            sample=jax.jit(buffer.sample),
        )
        if options.kind == "prioritized":
            set_priorities = jax.jit(buffer.set_priorities, donate_argnums=0)
            self.buffer = self.buffer.replace(set_priorities=set_priorities)
        self.state = self.vault = None
        self.seed(options.seed)

    def seed(self, seed):
        self.key = jax.random.key(seed)

    def put(self, rows):
        """Add rows with leaves [E, T, ...], or [T, ...] of items."""
        self.state = self.buffer.add(self.state, rows)
        if self.vault is not None:  # "you must write to the vault at least every T - 1 timesteps"
            self.unsaved += jax.tree.leaves(rows)[0].shape[self.time_axis]
            if self.unsaved >= self.size() - self.options.num_envs:
                self.write()

    def init(self, row):
        """Make the state, from a row with leaves [E, ...]."""
        if self.state is None:
            self.state = self.buffer.init(jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), row))

    def sample(self, beta=None):
        while True:
            self.key, key = jax.random.split(self.key)
            sample = jax.device_get(self.buffer.sample(self.state, key))
            fields, valid = self.read(sample.experience)
            if valid.any():
                break
        if self.options.kind == "prioritized":
            beta = self.options.beta if beta is None else beta
            weight = (1.0 / sample.probabilities) ** beta
            fields["index"], fields["probability"] = sample.indices, sample.probabilities
            fields["weight"] = weight / weight.max()
        # items that the user has to mask are left out
        return Batch(**jax.tree.map(lambda leaf: leaf[valid], fields))

    def update_priorities(self, index, priority):
        if self.options.kind != "prioritized":
            raise NotOffered
        priority = jnp.asarray(priority, jnp.float32)
        self.state = self.buffer.set_priorities(self.state, jnp.asarray(index), priority)

    def nbytes(self):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def pure(self, turn):
        buffer = self.make()
        row = lambda turn: _one(self.row(turn)) if self.time_axis else self.row(turn)
        state = buffer.init(jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), self.row(turn)))
        return state, row, buffer.add, buffer.sample

    def size(self):
        return jax.tree.leaves(self.state.experience)[0].shape[1]

    def save(self, path):
        """Write what is new to a Vault, which is the way of the README to store a buffer."""
        if self.options.kind == "prioritized":
            raise NotOffered("a Vault has no priorities")
        if self.vault is None:
            shutil.rmtree(path, ignore_errors=True)
            self.vault = self.vault_at(path, self.state.experience)
            now, size = int(self.state.current_index), self.size()
            pieces = [(0, now)]
            if self.state.is_full:  # the oldest rows are after the newest
                pieces = [(now, size), *pieces]
            with contextlib.redirect_stdout(io.StringIO()):
                for start, stop in pieces:  # a write copies its rows
                    for at in range(start, stop, 1_024):
                        interval = (at, min(at + 1_024, stop))
                        self.vault.write(self.state, source_interval=interval)
            self.unsaved = 0
        else:
            self.write()

    def write(self):
        with contextlib.redirect_stdout(io.StringIO()):
            self.vault.write(self.state)
        self.unsaved = 0

    def load(self, path):
        """Add the newest steps of a Vault to an empty buffer.

        The state that `Vault.read` returns is a full one of as many steps as were read, which would
        be the capacity from now on (instadeepai/flashbax#15). A user who goes on adds them.
        """
        self.init(self.row(Stream(self.options).turn()))
        vault = self.vault_at(path)
        steps = min(self.size(), vault.vault_index)
        self.put(self.of_vault(vault.read(timesteps=steps).experience))

    def vault_at(self, path, structure=None):
        try:
            from flashbax.vault import Vault
        except ImportError as error:
            raise NotOffered from error
        folder, name = os.path.split(path)
        with contextlib.redirect_stdout(io.StringIO()):
            return Vault(name, structure, rel_dir=folder, vault_uid="vault")

    time_axis = 1
    of_vault = staticmethod(lambda experience: experience)


def _lockstep(turn):
    if turn.mask is not None:
        raise NotOffered("each add has a step of each env")


def _one(row):
    """Return a step as a sequence of one, leaves [E, 1, ...]."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:, None], row)


class Flat(_Buffer):
    """`make_flat_buffer`: pairs of rows that follow each other.

    Where a pair goes from one episode to the next, the user masks it: of envs that reset in the
    next step the row of the reset, of others that of a truncation whose final observation is lost.
    Where it is not, the README advises the item buffer.
    """

    name = f"flashbax {VERSION}, flat buffer"

    def make(self):
        options = self.options
        if options.n_step != 1:
            raise NotOffered("n-step")
        rows = -(-options.capacity // options.num_envs) * options.num_envs
        sizes = {"max_length": rows, "min_length": 1, "add_batch_size": options.num_envs}
        sizes["sample_batch_size"] = min(options.batch_size, rows)  # more raises ValueError
        if options.kind == "prioritized":
            return fbx.make_prioritised_flat_buffer(
                **sizes, add_sequences=True, priority_exponent=options.alpha
            )
        return fbx.make_flat_buffer(**sizes, add_sequences=True)

    def row(self, turn):
        masked = turn.is_reset if self.options.autoreset == "next_step" else turn.truncated
        return {
            "obs": turn.obs,
            "action": turn.action,
            "reward": turn.reward,
            "discount": 1 - turn.terminated.astype(np.float32),
            "masked": masked,
        }

    def add(self, turn):
        _lockstep(turn)
        if self.options.autoreset == "same_step" and turn.truncated.any():
            raise NotOffered("the README: use the item buffer")
        row = self.row(turn)
        self.init(row)
        self.put(_one(row))

    def read(self, pair):
        first = pair.first
        fields = {name: first[name] for name in ("obs", "action", "reward")}
        fields["discount"] = self.options.gamma * first["discount"]
        fields["next_obs"] = pair.second["obs"]
        return fields, ~first["masked"]


class Items(_Buffer):
    """`make_item_buffer`: transitions, each with its next observation.

    The README has it for truncations ("only the data that is explicitly inserted can be sampled"),
    at the price of storing observations twice. Turns that are no transition are not added, and of
    envs that lose the final observation no truncation.
    """

    name = f"flashbax {VERSION}, item buffer"
    arguable: ClassVar = SLOTS | DUPLICATES
    time_axis = 0
    of_vault = staticmethod(lambda experience: jax.tree.map(lambda leaf: leaf[0], experience))

    def make(self):
        options = self.options
        if options.n_step != 1:
            raise NotOffered("n-step")
        sizes = {"max_length": options.capacity, "min_length": 1}
        sizes["sample_batch_size"] = min(options.batch_size, options.capacity)
        if options.kind == "prioritized":
            return fbx.make_prioritised_item_buffer(
                **sizes, add_sequences=True, priority_exponent=options.alpha
            )
        return fbx.make_item_buffer(**sizes, add_sequences=True)

    def row(self, turn):
        return {
            "obs": turn.obs,
            "action": turn.action,
            "reward": turn.reward,
            "discount": 1 - turn.terminated.astype(np.float32),
            "next_obs": turn.next_obs if turn.final_obs is None else turn.final_obs,
        }

    def add(self, turn):
        row = self.row(turn)
        self.init(row)
        taken = ~turn.is_reset
        if turn.mask is not None:
            taken &= turn.mask
        if turn.final_obs is None:
            taken &= ~turn.truncated
        if taken.any():
            self.put(jax.tree.map(lambda leaf: np.asarray(leaf)[taken], row))

    def read(self, t):
        t["discount"] = self.options.gamma * t["discount"]
        return t, np.ones(len(t["reward"]), bool)


class Trajectories(_Buffer):
    """`make_trajectory_buffer`: sequences, and windows of which the learner computes the n-step
    target, as the README has it.

    Rows say where an episode begins. For targets they have the next observation too, as those of
    Stoix do, which the README names; a row that is a reset opens no window, nor is a window
    complete that was truncated without its final observation: the user masks them.
    """

    name = f"flashbax {VERSION}, trajectory buffer"
    arguable: ClassVar = SLOTS | DUPLICATES
    kinds = ("uniform", "prioritized", "sequences")

    def make(self):
        options = self.options
        is_sequence = options.kind == "sequences"
        length = options.burn_in + options.length if is_sequence else options.n_step
        sizes = {
            "add_batch_size": options.num_envs,
            "sample_batch_size": options.batch_size,
            "sample_sequence_length": length,
            "period": 1,
            "min_length_time_axis": length,
            "max_length_time_axis": max(-(-options.capacity // options.num_envs), length),
        }
        self.is_first = np.ones(options.num_envs, bool)
        if options.kind == "prioritized":
            return fbx.make_prioritised_trajectory_buffer(**sizes, priority_exponent=options.alpha)
        return fbx.make_trajectory_buffer(**sizes)

    def row(self, turn):
        row = {"obs": turn.obs, "action": turn.action, "reward": turn.reward}
        if self.options.kind == "sequences":
            return row | {"is_first": self.is_first, "state": turn.state}
        return row | {
            "next_obs": turn.next_obs if turn.final_obs is None else turn.final_obs,
            "terminated": turn.terminated,
            "truncated": turn.truncated,
            "is_reset": turn.is_reset,
        }

    def add(self, turn):
        _lockstep(turn)
        row = self.row(turn)
        self.init(row)
        self.put(_one(row))
        done = turn.terminated | turn.truncated
        self.is_first = turn.is_reset if self.options.autoreset == "next_step" else done

    def read(self, t):
        if self.options.kind == "sequences":
            t["state"] = t["state"][:, 0]
            return t, np.ones(len(t["reward"]), bool)
        done = t["terminated"] | t["truncated"]
        before = np.cumsum(done, axis=1) - done  # ends before each step
        last = (before == 0).sum(axis=1) - 1  # of the window
        item = np.arange(len(last))
        discounts = self.options.gamma ** np.arange(done.shape[1]) * (before == 0)
        fields = {
            "obs": jax.tree.map(lambda leaf: leaf[:, 0], t["obs"]),
            "action": t["action"][:, 0],
            "reward": (discounts * t["reward"]).sum(axis=1),
            "discount": self.options.gamma ** (last + 1.0) * ~t["terminated"][item, last],
            "next_obs": jax.tree.map(lambda leaf: leaf[item, last], t["next_obs"]),
        }
        is_lost = (self.options.autoreset == "lost") & t["truncated"][item, last]
        return fields, ~t["is_reset"][:, 0] & ~is_lost
