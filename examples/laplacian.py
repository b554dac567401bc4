"""The shape of a world from random walks: eigenvectors of its Laplacian, learned from pairs at a
geometric horizon.

    python examples/laplacian.py --seed 0  # 45 s on two CPU cores; writes out/laplacian.png

Random walks through four rooms fill a `jr.future_pairs` buffer. It draws an episode, one of its
steps, and the observation k steps later, P(k) in proportion to discount^(k - 1) up to the episode's
end; a draw costs the same however long episodes are. From such pairs alone a network learns
functions of the place, each orthogonal to those before it: what varies slowest along a walk comes
first.

A random walk is as likely to go from one cell to another as back, so that the exact eigenvectors
are those of its transition matrix, and the exact eigenvalues follow from the law that pairs are
drawn by. The table compares what was learned with both.

Source: Gomez, Bowling and Machado, "Proper Laplacian Representation Learning" (2024), section 4.
Where we differ: the weight of the barrier does not grow, and the rates fall to 0.
"""

import argparse
import functools
import pathlib
import sys
import time
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import jaxreplay as jr

ROOMS = """
####################
#       #          #
#       #          #
#                  #
#       #          #
#       ########## #
#       #          #
## ######          #
#       #          #
#       #          #
####################
"""
IS_FREE = np.array([[cell == " " for cell in line] for line in ROOMS.split("\n")[1:-1]])
NUM_CELLS = int(IS_FREE.sum())
NUM_ENVS, EPISODE_LENGTH = 64, 100
DISCOUNT = 0.9  # of the horizon
NUM_VECTORS = 6  # learned; the first is constant, and neither plotted nor in the table
BARRIER = 2.0  # weight of the squared error of orthogonality
# at which the multipliers follow that error; this rate and the next fall to 0 linearly
DUAL_RATE = 0.02
LEARNING_RATE = 1e-3
CHUNKS = 20  # of a run: after each the progress bar moves

BUFFER = jr.future_pairs(
    capacity=262_144, num_envs=NUM_ENVS, batch_size=1_024, gamma=DISCOUNT, autoreset="same_step"
)
OPTIMIZER = optax.scale_by_adam()
NETWORK = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(128), nn.relu, nn.Dense(NUM_VECTORS)])


class Carry(flax.struct.PyTreeNode):
    """All that changes while learning. D = NUM_VECTORS."""

    params: Any
    opt_state: Any
    multipliers: jax.Array  # float32[D, D], lower triangular
    key: jax.Array
    step: jax.Array  # int32[]: gradient steps so far


def neighbors():
    """Return the cell that each of four moves leads to; a wall holds one back: int32[NUM_CELLS,
    4]."""
    number = np.full(IS_FREE.shape, -1)
    number[IS_FREE] = np.arange(NUM_CELLS)
    cells = np.argwhere(IS_FREE)
    there = np.stack(
        [number[tuple((cells + move).T)] for move in ((0, 1), (1, 0), (0, -1), (-1, 0))], axis=1
    )
    return np.where(there >= 0, there, np.arange(NUM_CELLS)[:, None])


def exact():
    """Eigenvalues of the Laplacian that pairs are drawn from, ascending, float64[D], and
    eigenvectors, float64[NUM_CELLS, D]."""
    walk = np.zeros((NUM_CELLS, NUM_CELLS))
    np.add.at(walk, (np.arange(NUM_CELLS)[:, None], neighbors()), 0.25)
    values, vectors = (x[..., ::-1][..., :NUM_VECTORS] for x in np.linalg.eigh(walk))
    kept = 0
    for bound in range(1, EPISODE_LENGTH + 1):  # steps to the end, all alike: k = 1 .. bound
        horizons = np.arange(1, bound + 1)
        law = DISCOUNT**horizons / np.sum(DISCOUNT**horizons)
        kept = kept + law @ values ** horizons[:, None] / EPISODE_LENGTH
    return 1 - kept, vectors


@functools.partial(jax.jit, static_argnames="num_episodes")
def collect(key, num_episodes):
    """A buffer with so many walks of each env; every one starts in any cell."""
    moves = jnp.asarray(neighbors())

    def step(carry, x):
        state, cell = carry
        time, key = x
        move_key, start_key = jax.random.split(key)
        action = jax.random.randint(move_key, (NUM_ENVS,), 0, 4)
        after = moves[cell, action]
        is_over = jnp.full(NUM_ENVS, time % EPISODE_LENGTH == EPISODE_LENGTH - 1)
        zeros = jnp.zeros(NUM_ENVS)
        state = BUFFER.add(
            state,
            jr.Step(cell, action, zeros, terminated=zeros > 0, truncated=is_over, final_obs=after),
        )
        return (state, jnp.where(is_over, starts(start_key), after)), None

    def starts(key):
        return jax.random.randint(key, (NUM_ENVS,), 0, NUM_CELLS)

    cell, number = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    flag = jax.ShapeDtypeStruct((), bool)
    state = BUFFER.init(
        jr.Step(cell, cell, number, terminated=flag, truncated=flag, final_obs=cell)
    )
    start_key, walk_key = jax.random.split(key)
    length = num_episodes * EPISODE_LENGTH
    return jax.lax.scan(
        step, (state, starts(start_key)), (jnp.arange(length), jax.random.split(walk_key, length))
    )[0][0]


def functions(params, cell):
    """The learned functions at each cell: float32[B, D]."""
    return NETWORK.apply(params, jax.nn.one_hot(cell, NUM_CELLS))


@functools.partial(jax.jit, static_argnames="num_steps")
def learn(carry, buffer_state, total_steps, num_steps):
    """The carry after so many gradient steps, and the loss of each, float32[num_steps]."""

    def step(carry, _):
        key, sample_key = jax.random.split(carry.key)
        pairs = BUFFER.sample(buffer_state, sample_key).experience
        gradient, error = jax.grad(loss, has_aux=True)(carry.params, carry.multipliers, pairs)
        updates, opt_state = OPTIMIZER.update(gradient, carry.opt_state)
        left = 1 - carry.step / total_steps
        params = optax.apply_updates(carry.params, optax.tree.scale(-LEARNING_RATE * left, updates))
        return Carry(
            params, opt_state, carry.multipliers + DUAL_RATE * left * error, key, carry.step + 1
        ), jnp.square(error).sum()

    return jax.lax.scan(step, carry, length=num_steps)


def loss(params, multipliers, pairs):
    """The augmented Lagrangian, float32[], and how far the functions are from orthonormal,
    float32[D, D], lower triangular."""
    here, there = functions(params, pairs.obs), functions(params, pairs.future_obs)
    smoothness = 0.5 * jnp.square(here - there).mean(axis=0).sum()
    # A function answers for those before it, not they for it: else any rotation of all would do as
    # well.
    # Of two halves, as the square of one mean is no mean of squares.
    one, other = (
        jnp.tril(half.T @ jax.lax.stop_gradient(half) / len(half) - jnp.eye(NUM_VECTORS))
        for half in jnp.split(here, 2)
    )
    error = jax.lax.stop_gradient(one + other) / 2
    return smoothness + jnp.sum(multipliers * (one + other) / 2) + BARRIER * jnp.sum(
        one * other
    ), error


def compare(carry):
    """Compare what was learned with what is exact.

    Returns:
      Eigenvalues, learned and exact, [D]; vectors of unit length and one sign, learned and exact,
        [NUM_CELLS, D].
    """
    values, vectors = exact()
    learned = np.asarray(functions(carry.params, jnp.arange(NUM_CELLS)))
    learned = learned / np.linalg.norm(learned, axis=0)
    learned = learned * np.where((learned * vectors).sum(axis=0) < 0, -1, 1)
    return -np.diag(carry.multipliers) / 2, values, learned, vectors


def plot(path, learned_values, values, learned, vectors):
    figure = Figure(figsize=(2.4 * (NUM_VECTORS - 1), 3.9), layout="constrained")
    for row, (name, numbers, heights) in enumerate(
        (("learned", learned_values, learned), ("exact", values, vectors))
    ):
        for column in range(1, NUM_VECTORS):
            axes = figure.add_subplot(2, NUM_VECTORS - 1, row * (NUM_VECTORS - 1) + column)
            image = np.full(IS_FREE.shape, np.nan)
            image[IS_FREE] = heights[:, column]
            size = np.abs(vectors[:, column]).max()
            axes.imshow(image, cmap="RdBu", vmin=-size, vmax=size)
            axes.set(
                title=f"{name}, λ = {numbers[column]:.3f}", xticks=[], yticks=[], facecolor="0.35"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(argv=None):
    """Walk, learn, compare, plot and print a table; returns its figures, and whether the claim
    holds."""
    parser = argparse.ArgumentParser(
        description="Laplacian eigenvectors from pairs at a geometric horizon."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=12_000, help="gradient steps, rounded down to whole chunks"
    )
    parser.add_argument("--episodes", type=int, default=40, help="walks of each env")
    parser.add_argument(
        "--target",
        type=float,
        default=0.95,
        help="the exit status is 1 where a vector has a smaller cosine",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("out/laplacian.png"),
        help="where the plot goes",
    )
    args = parser.parse_args(argv)
    began = time.perf_counter()
    walk_key, network_key, key = jax.random.split(jax.random.key(args.seed), 3)
    buffer_state = jax.block_until_ready(collect(walk_key, args.episodes))
    num_steps = max(1, args.steps // CHUNKS)
    params = NETWORK.init(network_key, jnp.zeros((1, NUM_CELLS)))
    carry = Carry(
        params, OPTIMIZER.init(params), jnp.zeros((NUM_VECTORS, NUM_VECTORS)), key, jnp.int32(0)
    )
    for _ in (bar := tqdm(range(CHUNKS), unit="chunk")):
        carry, error = learn(carry, buffer_state, CHUNKS * num_steps, num_steps)
        _, _, learned, vectors = compare(carry)
        cosine = (learned * vectors).sum(axis=0)
        bar.set_postfix(
            {"smallest cosine": f"{cosine.min():.3f}", "error": f"{float(error.mean()):.1e}"}
        )

    learned_values, values, learned, vectors = compare(carry)
    plot(args.out, learned_values, values, learned, vectors)
    print("eigenvector    learned λ    exact λ    cosine")
    for i in range(1, NUM_VECTORS):
        print(f"{i:11} {learned_values[i]:12.4f} {values[i]:10.4f} {cosine[i]:9.4f}")
    figures = {
        "gradient_steps": int(carry.step),
        "pairs_drawn": int(carry.step) * BUFFER.batch_size,
        "smallest_cosine": round(float(cosine.min()), 4),
        "seconds": round(time.perf_counter() - began, 1),
        "plot": str(args.out),
    }
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):18}", value if isinstance(value, str) else f"{value:,}")
    return figures | {"reached": figures["smallest_cosine"] >= args.target}


if __name__ == "__main__":
    sys.exit(
        0
        if main()["reached"]
        else "not reached: a cosine is below the target, which is for a full run; the eigenvalues "
        "settle last"
    )
