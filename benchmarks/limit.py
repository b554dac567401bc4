"""The limit set by memory: NumPy moves the same bytes, without sampling, checks or a tree.

An add is `np.copyto` of a step's leaves to adjacent rows. A sample is `np.take` of the sampled
leaves at random rows, chosen before. An update of priorities writes them to their rows. Forms of a
sample: "into" reused arrays (the default, too), or "fresh" arrays in each call, as JAX returns
them.
"""

import itertools
from collections.abc import Callable

import numpy as np
from cases import BATCH_SIZE, NUM_ENVS, Case
from steps import random_obs, random_steps
from timing import stopwatch

# Different batches, a million rows in all: the cache does not hold those of the last cycle.
_BATCHES = 4096


class Storage:
    """Rows ordered by time, then env: the rows of one step are adjacent."""

    def __init__(self, case: Case):
        rng = np.random.default_rng(1)
        self.capacity = case.capacity
        self.leaves = {"obs": random_obs(rng, case, (case.capacity,))}
        if case.obs == "vector":
            self.leaves |= {
                name: rng.integers(2, size=case.capacity).astype(dtype)
                for name, dtype in _SCALARS.items()
            }
        self.priority = rng.random(case.capacity, dtype=np.float32)
        self.head = 0

    def add(self, step: dict[str, np.ndarray]) -> None:
        for name, leaf in self.leaves.items():
            np.copyto(leaf[self.head : self.head + NUM_ENVS], step[name])
        self.head = (self.head + NUM_ENVS) % self.capacity


_SCALARS = {"action": np.int32, "reward": np.float32, "terminated": bool, "truncated": bool}


def prepare(case: Case) -> Callable[[], float]:
    storage = Storage(case)
    take = _take(case, storage)
    steps = random_steps(case)
    steps = itertools.cycle(
        [{name: leaf[i] for name, leaf in steps.items()} for i in range(len(steps["obs"]))]
    )
    rows = itertools.cycle(
        list(
            np.random.default_rng(2).integers(case.capacity - NUM_ENVS, size=(_BATCHES, BATCH_SIZE))
        )
    )
    priority = storage.priority[:BATCH_SIZE].copy()
    adds, samples = case.operation in ("add", "fused"), case.operation in ("sample", "fused")
    updates = case.operation == "update" or (
        case.operation == "fused" and case.buffer == "prioritized"
    )

    def run() -> None:
        for _ in range(case.iterations):
            batch = next(rows)
            if adds:
                storage.add(next(steps))
            if samples:
                take(batch)
            if updates:
                storage.priority[batch] = priority

    return stopwatch(run, case.iterations)


def _take(case: Case, storage: Storage) -> Callable[[np.ndarray], object]:
    """Return a function that takes the leaves of a sample.

    A transition also takes its next observation; one flag stands for its discount.
    """
    leaves = [leaf for name, leaf in storage.leaves.items() if name != "truncated"]
    next_obs = [] if case.buffer == "items" else [storage.leaves["obs"]]
    if case.form == "fresh":
        return lambda rows: (
            [np.take(leaf, rows, axis=0) for leaf in leaves]
            + [np.take(leaf, rows + NUM_ENVS, axis=0) for leaf in next_obs]
        )
    into = [np.zeros((BATCH_SIZE, *leaf.shape[1:]), leaf.dtype) for leaf in leaves + next_obs]

    def take_into(rows: np.ndarray) -> None:
        # Without mode="clip", NumPy buffers `out`, because it might have to raise.
        for leaf, out in zip(leaves, into, strict=False):
            np.take(leaf, rows, axis=0, out=out, mode="clip")
        for leaf in next_obs:
            np.take(leaf, rows + NUM_ENVS, axis=0, out=into[-1], mode="clip")

    return take_into
