"""Plain steps, a state that has some, and parts of pytrees."""

import jax
import numpy as np

import jaxreplay as jr


def nth(tree, place):
    """Return what each leaf has at a place, or at several."""
    return jax.tree.map(lambda leaf: leaf[place], tree)


def stacked(trees):
    """Return trees as one, whose leaves have an axis more in front."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def num_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def plain_step(number, **fields):
    """Return a step, or several, whose observation, action and reward are `number`, in an episode
    without end. `fields` take the place of these fields."""
    no = np.zeros(np.shape(number), bool)
    plain = {"obs": number, "action": number, "reward": number, "terminated": no, "truncated": no}
    return jr.Step(**plain | fields)


def begun(buffer, steps, *mask):
    """Return a state after steps `[time, num_envs, ...]`."""
    return buffer.extend(buffer.init(nth(steps, (0, 0))), steps, *mask)
