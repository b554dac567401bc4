"""Eigenvectors of a world's Laplacian, learned from pairs at a geometric horizon.

    python examples/laplacian.py   # 2 minutes on two CPU cores; writes out/laplacian.png

Copy `BUFFER` and `loss`. Random walks through four rooms fill a `jr.future_pairs` buffer. A sample
chooses an episode, one of its steps, and the observation k steps later, with P(k) in proportion to
gamma ** (k - 1) up to the episode's end. From such pairs, a network learns functions of the place.
Each is orthogonal to those before it, and those that vary most slowly along a walk come first.

The random walk is symmetric. The exact eigenvectors are therefore those of its transition matrix,
and the exact eigenvalues follow from the distribution of the pairs. The table compares both with
the learned ones.

References:
  Gomez, Bowling and Machado, "Proper Laplacian Representation Learning" (2024), section 4.
  Here the weight of the barrier is constant, and the learning rates decay to 0.
"""

import functools
import sys
import time
from typing import Any

import _common as common
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
GAMMA = 0.9  # of the horizon
NUM_VECTORS = 6  # the first is constant, and therefore neither plotted nor in the table
BARRIER = 2.0  # weight of the squared error of orthogonality
DUAL_RATE = 0.02  # of the multipliers; both rates decay to 0 linearly
LEARNING_RATE = 1e-3
CHUNKS = 20  # of a run: the progress bar moves after each

BUFFER = jr.future_pairs(
    capacity=262_144, num_envs=NUM_ENVS, batch_size=1_024, gamma=GAMMA, autoreset="same_step"
)
OPTIMIZER = optax.scale_by_adam()
NETWORK = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(128), nn.relu, nn.Dense(NUM_VECTORS)])


class Carry(flax.struct.PyTreeNode):
    """The state of learning. D = NUM_VECTORS."""

    params: Any
    opt_state: Any
    multipliers: jax.Array  # float32[D, D], lower triangular
    key: jax.Array
    step: jax.Array  # int32[]: gradient steps so far


def neighbors():
    """Return the cell that each of four moves leads to, int32[NUM_CELLS, 4]. A move into a wall
    stays in its cell."""
    number = np.full(IS_FREE.shape, -1)
    number[IS_FREE] = np.arange(NUM_CELLS)
    cells = np.argwhere(IS_FREE)
    there = np.stack(
        [number[tuple((cells + move).T)] for move in ((0, 1), (1, 0), (0, -1), (-1, 0))], axis=1
    )
    return np.where(there >= 0, there, np.arange(NUM_CELLS)[:, None])


def exact():
    """Return the eigenvalues of the Laplacian that pairs are sampled from, ascending, float64[D],
    and its eigenvectors, float64[NUM_CELLS, D]."""
    walk = np.zeros((NUM_CELLS, NUM_CELLS))
    np.add.at(walk, (np.arange(NUM_CELLS)[:, None], neighbors()), 0.25)
    values, vectors = (x[..., ::-1][..., :NUM_VECTORS] for x in np.linalg.eigh(walk))
    kept = 0
    for bound in range(1, EPISODE_LENGTH + 1):  # steps to the end, equally often: k = 1 .. bound
        horizons = np.arange(1, bound + 1)
        distribution = GAMMA**horizons / np.sum(GAMMA**horizons)
        kept = kept + distribution @ values ** horizons[:, None] / EPISODE_LENGTH
    return 1 - kept, vectors


@functools.partial(jax.jit, static_argnames="num_episodes")
def collect(key, num_episodes):
    """Return a buffer's state with so many walks of each env. Each walk starts in a random
    cell."""
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
    """Return the learned functions at each cell, float32[B, D]."""
    return NETWORK.apply(params, jax.nn.one_hot(cell, NUM_CELLS))


@functools.partial(jax.jit, static_argnames="num_steps")
def learn(carry, buffer_state, total_steps, num_steps):
    """Return the carry after so many gradient steps, and the squared error of orthogonality of
    each, float32[num_steps]."""

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
    """Return the augmented Lagrangian, float32[], and the error of orthonormality, float32[D, D],
    lower triangular."""
    here, there = functions(params, pairs.obs), functions(params, pairs.future_obs)
    smoothness = 0.5 * jnp.square(here - there).mean(axis=0).sum()
    # Each function has a gradient from those before it, and not from those after it: otherwise any
    # rotation of all functions would be a solution.
    # The product of two halves of the batch is an unbiased estimate; the square of one mean is not.
    one, other = (
        jnp.tril(half.T @ jax.lax.stop_gradient(half) / len(half) - jnp.eye(NUM_VECTORS))
        for half in jnp.split(here, 2)
    )
    error = jax.lax.stop_gradient(one + other) / 2
    return smoothness + jnp.sum(multipliers * (one + other) / 2) + BARRIER * jnp.sum(
        one * other
    ), error


def compare(carry):
    """Return learned and exact eigenvalues, [D], and learned and exact vectors of unit length and
    equal sign, [NUM_CELLS, D]."""
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
    parser = common.parser(__doc__, out="out/laplacian.png", steps=12_000)
    parser.add_argument("--episodes", type=int, default=40, help="walks of each env")
    parser.add_argument("--target", type=float, default=0.95, help="of the smallest cosine")
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
    smallest = round(float(cosine.min()), 4)
    return common.report(
        smallest >= args.target,
        gradient_steps=int(carry.step),
        pairs_sampled=int(carry.step) * BUFFER.batch_size,
        smallest_cosine=smallest,
        seconds=round(time.perf_counter() - began, 1),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: a cosine is below the target")
