"""Stable-Baselines3's arrays of a buffer, as copies on the host."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._util.aliases import PyTree
from jaxreplay.buffers.jitted import program
from jaxreplay.storage import ring
from jaxreplay.storage.sampleable import Sampleable
from jaxreplay.views import RowReader

_ROWS_AT_ONCE = 4096
_READ: dict[str, Any] = {
    "observations": lambda reader: reader.obs(0),
    "next_observations": lambda reader: reader.obs(1),
    "actions": lambda reader: reader.action(0),
    "rewards": lambda reader: reader.reward(0),
    "dones": lambda reader: reader.is_terminated(0) | reader.is_truncated(0),
    "timeouts": lambda reader: reader.is_truncated(0),
}
NAMES = tuple(_READ)


def read(
    name: str, buffer: Any, state: Any, counts: np.ndarray, num_steps: int, buffer_size: int
) -> PyTree:
    """Return an array of Stable-Baselines3's buffer, leaves [buffer_size, n_envs, ...].

    The step with number t, counted from the first ever, is in row `t modulo buffer_size`. Rows that
    are not stored are 0.

    Args:
      name: One of `NAMES`.
      buffer: The `ReplayBuffer` of the rows.
      state: Its state.
      counts: int64[n_envs], number of transitions in each env's ring.
      num_steps: Number of steps of each env so far.
      buffer_size: Number of rows of each env.
    """
    ago = ring.position_of(num_steps - 1 - np.arange(buffer_size), buffer_size)[:, None]
    nth = counts - 1 - ago  # in the ring of each env
    env = np.broadcast_to(np.arange(len(counts)), nth.shape)
    places = np.flatnonzero((nth >= 0) & (ago < num_steps))
    one = np.zeros(1, np.int32)
    kind = jax.eval_shape(functools.partial(_rows, name=name), buffer, state, one, one)
    column = jax.tree.map(lambda leaf: np.zeros((nth.size, *leaf.shape[1:]), leaf.dtype), kind)
    for start in range(0, len(places), _ROWS_AT_ONCE):
        part = places[start : start + _ROWS_AT_ONCE]
        padded = np.resize(part, _ROWS_AT_ONCE)  # one program for all parts
        chosen = [index.reshape(-1)[padded].astype(np.int32) for index in (env, nth)]
        rows = _rows(buffer, state, *chosen, name=name)
        for leaf, values in zip(jax.tree.leaves(column), jax.tree.leaves(rows), strict=True):
            leaf[part] = np.asarray(values)[: len(part)]
    return jax.tree.map(lambda leaf: leaf.reshape((*nth.shape, *leaf.shape[1:])), column)


@functools.partial(program, static=("name",))
def _rows(buffer: Any, state: Any, env: jax.Array, nth: jax.Array, name: str) -> PyTree:
    """Return the `nth` transitions of envs, int32[B] both: leaves [B, ...]."""
    del buffer
    row = transitions(state).select(env, nth)
    return jax.vmap(lambda row: _READ[name](RowReader(state, row)))(row)


def transitions(state: Any) -> Sampleable:
    """Return the set of all transitions, also those whose window is not complete."""
    none = jnp.zeros((state.layout.num_envs,), jnp.int32)
    return Sampleable(state, none, none)
