"""A process that adds numbered steps to the rows of a folder until it is killed.

    python -m tests.support.row_writer FOLDER

It continues the history of the process before it. After each add it writes the number of steps so
far to its output, 8 bytes each.
"""

import os
import sys

import jax
import numpy as np

import jaxreplay as jr

LENGTH, NUM_ENVS = 50, 3


def buffer():
    return jr.prioritized(
        capacity=LENGTH * NUM_ENVS, num_envs=NUM_ENVS, batch_size=8, autoreset="next_step"
    )


def steps(numbers):
    """Return the steps of these numbers, leaves [T, E, ...]. Each value tells its step and env."""
    code = (np.asarray(numbers)[:, None] * NUM_ENVS + np.arange(NUM_ENVS)).astype(np.int32)
    return jr.Step(
        obs={
            "image": np.broadcast_to(code[..., None], (*code.shape, 1500)),  # more than a page
            "x": code,
        },
        action=code,
        reward=code.astype(np.float32),
        terminated=code // NUM_ENVS % 11 == 10,
        truncated=code // NUM_ENVS % 7 == 6,
    )


def size_of(number):
    """Return how many steps come at once after a number of steps."""
    return 10 if number % 3 else 1


def main(folder):
    tier = jr.tiered(buffer(), rows=folder, continue_streams=True)
    state = tier.init(jax.tree.map(lambda leaf: leaf[0, 0], steps([0])))
    number = int(state.lap) * LENGTH + int(state.head)
    while True:
        end = number + size_of(number)
        state = tier.extend(state, steps(range(number, end)))
        number = end
        os.write(1, number.to_bytes(8, "little"))


if __name__ == "__main__":
    main(sys.argv[1])
