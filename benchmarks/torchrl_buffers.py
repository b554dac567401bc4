"""TorchRL's prioritized buffer: calls from Python, with rows and tree on the GPU if it can."""

from collections.abc import Callable

import torch
from cases import NUM_ENVS, Case
from steps import random_steps
from tensordict import TensorDict
from timing import stopwatch
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import (
    CudaSumSegmentTreeFp32,
    PrioritizedSampler,
    SumSegmentTreeFp32,
)


def device() -> str | None:
    """Return where the rows and the tree lie, or None if TorchRL has no tree here: each of its
    builds is for one version of torch, and not all have a tree for GPUs."""
    if torch.cuda.is_available() and CudaSumSegmentTreeFp32 is not None:
        return "cuda"
    return None if SumSegmentTreeFp32 is None else "cpu"


def prepare(case: Case) -> Callable[[], float]:
    """Fill a buffer; return a function that measures microseconds per call."""
    where = device()
    sampler = PrioritizedSampler(max_capacity=case.capacity, alpha=0.6, beta=0.4, device=where)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(case.capacity, device=where),
        sampler=sampler,
        batch_size=case.batch_size,
    )
    arrays = {name: torch.from_numpy(leaf).to(where) for name, leaf in random_steps(case).items()}
    steps = [
        TensorDict({name: leaf[nth] for name, leaf in arrays.items()}, [NUM_ENVS], device=where)
        for nth in range(case.iterations)
    ]
    for nth in range(case.capacity // NUM_ENVS):
        buffer.extend(steps[nth % len(steps)])
    index = buffer.sample(return_info=True)[1]["index"]
    priority = torch.rand(case.batch_size, device=where) + 0.1

    def once(nth: int) -> None:
        if case.operation == "add":
            buffer.extend(steps[nth])
        elif case.operation == "sample":
            buffer.sample()
        else:
            buffer.update_priority(index, priority)

    def run() -> None:
        for nth in range(case.iterations):
            once(nth)
        if where == "cuda":
            torch.cuda.synchronize()

    return stopwatch(run, case.iterations)
