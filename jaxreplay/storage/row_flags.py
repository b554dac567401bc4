"""Flags of a row: a step, its episode's first, a final row; and the rows that a step writes.

Observations are stored once: the next observation of a row is the next row of its stream. So every
episode ends in a *final row*, which holds the final observation and is no transition: its action
and reward are never read. Where it comes from, the form of `autoreset` says:

`"next_step"`: the row after a done is the final observation, and becomes the final row. Its own
done flags mean nothing.

`"same_step"`: a done writes two rows: the step, and its final row.

`"same_step_no_final_obs"`: a terminated row needs no final row, for nothing lies beyond it. A
truncated row becomes the final row itself, since its own observation is the last one known: one
transition is given up rather than a wrong target made.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay._util.aliases import Autoreset

# What a row is, as bits of its flags: a uint8.
TERMINATED, TRUNCATED, FINAL, FIRST, SKIPPED = 1, 2, 4, 8, 16
# never drawn: a final row, or a transition between two that are `period` apart
NO_CANDIDATE = FINAL | SKIPPED


class Rows(NamedTuple):
    """The rows that a block of steps writes, in the order of time. K is T, or 2 T where a step may
    write its final row beside it."""

    flags: jax.Array  # uint8[K, E]
    is_written: jax.Array  # bool[K, E]


def rows_of(
    form: Autoreset,
    terminated: jax.Array,
    truncated: jax.Array,
    mask: jax.Array,
    last_flags: jax.Array,
) -> Rows:
    """What each step of a block writes.

    Args:
      form: what the env does when an episode ends.
      terminated, truncated, mask: bool[T, E]; where `mask` is False the env took no step.
      last_flags: uint8[E], the flags of each stream's newest row.
    """
    bits = TERMINATED * terminated.astype(jnp.uint8) + TRUNCATED * truncated.astype(jnp.uint8)
    done = terminated | truncated
    if form == "next_step":
        is_final = _alternate(done, mask, last_flags)
        bits = jnp.where(is_final, jnp.uint8(FINAL), bits)
    elif form == "same_step":
        bits = jnp.stack([bits, jnp.full_like(bits, FINAL)], axis=1).reshape((-1, *bits.shape[1:]))
        mask = jnp.stack([mask, mask & done], axis=1).reshape((-1, *mask.shape[1:]))
    else:
        bits = jnp.where(truncated & ~terminated, bits | FINAL, bits)
    closes = closes_episode(bits, form)
    first = _before(closes, mask, closes_episode(last_flags, form))
    return Rows(bits + FIRST * first.astype(jnp.uint8), mask)


def rows_per_step(form: Autoreset | None) -> int:
    """Return the most rows that a step writes: 2 if its final row comes beside it, else 1."""
    return 2 if form == "same_step" else 1


def termination_has_final_row(form: Autoreset) -> bool:
    """Whether a terminated row is followed by a final row, as every truncated one is (or is
    itself)."""
    return form != "same_step_no_final_obs"


def closes_episode(flags: jax.Array, form: Autoreset) -> jax.Array:
    """Whether a row is the last one of its episode: its final row or, where terminated rows have
    none, a terminated row."""
    bits = FINAL if termination_has_final_row(form) else FINAL | TERMINATED
    return (flags & bits) != 0


def owes_final_row(last_flags: jax.Array) -> jax.Array:
    """With next-step autoreset: whether the next row is the newest one's final row. `last`:
    uint8[E]; bool[E]."""
    return ((last_flags & (TERMINATED | TRUNCATED)) != 0) & ((last_flags & FINAL) == 0)


def after_clear(form: Autoreset | None, last_flags: jax.Array) -> jax.Array:
    """The newest row's flags once all rows are forgotten: as if a final row had been written, but
    for a final row that is still to come: uint8[E]."""
    return (
        jnp.where(owes_final_row(last_flags), last_flags, FINAL)
        if form == "next_step"
        else jnp.full_like(last_flags, FINAL)
    )


def _alternate(done: jax.Array, mask: jax.Array, last_flags: jax.Array) -> jax.Array:
    """Whether each row is a final row: the row before it is done and no final row itself, so in a
    run of dones every other row is one.

    A row maps "am I a final row" to "is the next one a final row", which is one of three maps of a
    bit; maps compose, so a scan over time is a parallel one.
    """
    # The map as (image of False, image of True): not done -> (0, 0), done -> (1, 0), masked -> (0,
    # 1).
    maps = (mask & done, ~mask)
    image_of_false, image_of_true = jax.lax.associative_scan(
        lambda f, g: (jnp.where(f[0], g[1], g[0]), jnp.where(f[1], g[1], g[0])), maps, axis=0
    )
    start = owes_final_row(last_flags)
    after = jnp.where(start, image_of_true, image_of_false)
    return jnp.concatenate([start[None], after[:-1]])


def _before(value: jax.Array, mask: jax.Array, initial: jax.Array) -> jax.Array:
    """For each row, `value` of the row written before it in its stream: bool[K, E]."""
    seen, latest = jax.lax.associative_scan(
        lambda a, b: (a[0] | b[0], jnp.where(b[0], b[1], a[1])), (mask, value), axis=0
    )
    return jnp.concatenate([initial[None], jnp.where(seen, latest, initial)[:-1]])
