"""Flags of several agents that share an env, whose episodes may end one by one.

An env's episode ends where the flags of all its agents are True. An agent's flag stays True from
its own last step to the end of the env's episode. A row has a byte for each agent: the flags of its
step, and `GONE` if the agent had ended before.
"""

import jax
import jax.numpy as jnp

from jaxreplay.storage import row_flags
from jaxreplay.storage.row_flags import TERMINATED, TRUNCATED

GONE = row_flags.FINAL
_DONE = TERMINATED | TRUNCATED


def flags_of_env(stored: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the flags of the env: bool[...] each. Where its episode ends, it terminates if no
    agent that acted was truncated.

    Args:
      stored: uint8[..., A], bytes of the agents.
    """
    done = ((stored & _DONE) != 0).all(axis=-1)
    terminated = ((stored & (TERMINATED | GONE)) != 0).all(axis=-1)
    return done & terminated, done & ~terminated


def bytes_of(
    terminated: jax.Array,
    truncated: jax.Array,
    is_written: jax.Array,
    has_ended: jax.Array,
    last_flags: jax.Array | None,
) -> jax.Array:
    """Return the byte of each agent in each row of a block: uint8[T, E, A]; 0 in final rows.

    Args:
      terminated: bool[T, E, A].
      truncated: bool[T, E, A].
      is_written: bool[T, E], False where the env took no step.
      has_ended: bool[E, A], True for agents that ended before the block, in the env's episode.
      last_flags: uint8[E], flags of each stream's newest row, with next-step autoreset; else None.
    """
    done = terminated | truncated
    is_step = is_written
    if last_flags is not None:
        is_step = ~row_flags.final_rows(done.all(axis=-1), is_written, last_flags)
    done &= is_step[..., None]
    goes_on = done & ~done.all(axis=-1, keepdims=True)
    is_gone = done & row_flags.before(goes_on, is_written[..., None], has_ended)
    bits = TERMINATED * terminated.astype(jnp.uint8) + TRUNCATED * truncated.astype(jnp.uint8)
    return jnp.where(is_step[..., None], bits + GONE * is_gone.astype(jnp.uint8), jnp.uint8(0))


def ended(newest: jax.Array) -> jax.Array:
    """Return which agents have ended in an episode that goes on: bool[..., A].

    Args:
      newest: uint8[..., A], bytes of the newest row.
    """
    done = (newest & _DONE) != 0
    return done & ~done.all(axis=-1, keepdims=True)
