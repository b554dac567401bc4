"""Flags of rows (terminated, truncated, final, first, skipped), and the rows that a step writes.

Observations are stored once: the next observation of a row is in the next row of its stream. So an
episode ends in a *final row*, which has the final observation and is no transition: its action and
reward are never read. The form of `autoreset` decides where it comes from:

`"next_step"`: the row after a done has the final observation and becomes the final row. Its own
done flags are ignored.

`"same_step"`: a done writes two rows: the step, and its final row.

`"same_step_no_final_obs"`: a terminated row needs no final row, since its target reads no next
observation. A truncated row becomes the final row itself, since its observation is the last one
known: its transition is dropped, because its next observation is unknown.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import Autoreset

# Bits of a row's flags, a uint8.
TERMINATED, TRUNCATED, FINAL, FIRST, SKIPPED = 1, 2, 4, 8, 16
NO_STEP = FIRST | FINAL


class BlockRows(NamedTuple):
    """Rows that a block of T steps of E envs writes, in the order of time. K is T, or 2 T if a step
    may write its final row, too."""

    flags: jax.Array  # uint8[K, E]
    is_written: jax.Array  # bool[K, E]


def rows_of(
    form: Autoreset,
    terminated: jax.Array,
    truncated: jax.Array,
    mask: jax.Array,
    last_flags: jax.Array,
) -> BlockRows:
    """Return the rows that each step of a block writes.

    Args:
      form: What the env does when an episode ends.
      terminated: bool[T, E].
      truncated: bool[T, E].
      mask: bool[T, E]; False where the env took no step.
      last_flags: uint8[E], flags of each stream's newest row.
    """
    bits = TERMINATED * terminated.astype(jnp.uint8) + TRUNCATED * truncated.astype(jnp.uint8)
    done = terminated | truncated
    if form == "next_step":
        is_final = final_rows(done, mask, last_flags)
        bits = jnp.where(is_final, jnp.uint8(FINAL), bits)
    elif form == "same_step":
        bits = jnp.stack([bits, jnp.full_like(bits, FINAL)], axis=1).reshape((-1, *bits.shape[1:]))
        mask = jnp.stack([mask, mask & done], axis=1).reshape((-1, *mask.shape[1:]))
    else:
        bits = jnp.where(truncated & ~terminated, bits | FINAL, bits)
    closes = closes_episode(bits, form)
    first = before(closes, mask, closes_episode(last_flags, form))
    return BlockRows(bits + FIRST * first.astype(jnp.uint8), mask)


def has_no_action(flags: jax.Array) -> jax.Array:
    """Return which rows have a final observation alone: bool[...], from their flags, uint8[...]."""
    return (flags & (FINAL | TRUNCATED)) == FINAL


def is_of_episode(flags: jax.Array) -> jax.Array:
    """Return which rows belong to an episode: bool[...], from their flags, uint8[...]. A final row
    that is the first one belongs to none."""
    return (flags & NO_STEP) != NO_STEP


def skip_without_action(flags: jax.Array) -> jax.Array:
    """Return the flags of rows, uint8[...], where those without an action are skipped."""
    return jnp.where(has_no_action(flags), flags | SKIPPED, flags)


def rows_per_step(form: Autoreset | None) -> int:
    """Return the largest number of rows that a step writes: 2 if it may write its final row, too,
    else 1."""
    return 2 if form == "same_step" else 1


def closes_episode(flags: jax.Array, form: Autoreset) -> jax.Array:
    """Return whether a row is the last one of its episode: a final row or, if terminated rows have
    none after them, a terminated row."""
    bits = FINAL | TERMINATED if form == "same_step_no_final_obs" else FINAL
    return (flags & bits) != 0


def owes_final_row(last_flags: jax.Array) -> jax.Array:
    """Return whether each stream's next row is a final row, with next-step autoreset: bool[E], from
    the flags of its newest row, uint8[E]."""
    return ((last_flags & (TERMINATED | TRUNCATED)) != 0) & ((last_flags & FINAL) == 0)


def after_clear(form: Autoreset | None, last_flags: jax.Array) -> jax.Array:
    """Return the newest row's flags after a clear: uint8[E].

    They are those of a final row, so that the next row opens an episode. If the next row is still
    to be a final row, they stay as they are.
    """
    return (
        jnp.where(owes_final_row(last_flags), last_flags, FINAL)
        if form == "next_step"
        else jnp.full_like(last_flags, FINAL)
    )


def final_rows(done: jax.Array, mask: jax.Array, last_flags: jax.Array) -> jax.Array:
    """Return whether each row is a final row, with next-step autoreset: bool[T, E].

    A row is a final row if the row before it is done and no final row itself. In a run of dones
    every other row is one.
    """
    # Each row maps "this row is a final row" to "the next row is a final row". Such maps of a bit
    # compose, so that the scan over time is parallel. As (image of False, image of True): not done
    # -> (0, 0), done -> (1, 0), masked -> (0, 1).
    maps = (mask & done, ~mask)
    image_of_false, image_of_true = jax.lax.associative_scan(
        lambda f, g: (jnp.where(f[0], g[1], g[0]), jnp.where(f[1], g[1], g[0])), maps, axis=0
    )
    start = owes_final_row(last_flags)
    after = jnp.where(start, image_of_true, image_of_false)
    return jnp.concatenate([start[None], after[:-1]])


def before(value: jax.Array, mask: jax.Array, initial: jax.Array) -> jax.Array:
    """Return for each row the `value` of the row written before it in its stream: bool[K, E, ...].

    Args:
      value: bool[K, E, ...].
      mask: bool[K, E, ...], True for rows that are written.
      initial: bool[E, ...], the value of the newest row before.
    """
    seen, latest = jax.lax.associative_scan(
        lambda a, b: (a[0] | b[0], jnp.where(b[0], b[1], a[1])), (mask, value), axis=0
    )
    return jnp.concatenate([initial[None], jnp.where(seen, latest, initial)[:-1]])
