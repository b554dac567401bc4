"""Epochs of minibatches: each thing once in an epoch, in an order of its own."""

import math

import jax

from jaxreplay import checks, ring


def shuffled(where: str, key: jax.Array, num_items: int, name: str, num_epochs: int, num_minibatches: int) -> jax.Array:
    """Numbers of things, int32[num_epochs * num_minibatches, num_items / num_minibatches], in the order of use.

    Args:
      where: for errors. key: consumed. name: what `num_items` is, for errors.

    Raises:
      ValueError: the things do not divide into so many minibatches; it names the nearest numbers that they do divide into.
    """
    checks.check_size(where, "num_epochs", num_epochs)
    checks.check_size(where, "num_minibatches", num_minibatches)
    size, rest = divmod(num_items, num_minibatches)
    if rest or not size:
        divisors = sorted(
            {d for low in range(1, math.isqrt(num_items) + 1) if not divmod(num_items, low)[1] for d in (low, num_items // low)}
        )
        nearest = [d for d in divisors if d < num_minibatches][-1:] + [d for d in divisors if d > num_minibatches][:1]
        raise ValueError(
            f"{where}: {name} = {num_items} does not divide into num_minibatches={num_minibatches} equal ones; the nearest that do: "
            f"{' and '.join(map(str, nearest))}"
        )
    order = jax.vmap(lambda key: jax.random.permutation(key, ring.places(num_items)))(jax.random.split(key, num_epochs))
    return order.reshape(num_epochs * num_minibatches, size)
