"""Batches of rows that lie on the device, in the memory of the host, and in files, beside TorchRL's
memory map and Stable-Baselines3, in one process: writes TIERS.md.

    python benchmarks/tiers.py [--quick]

Each way has the same numbers of rows, envs and items, and its turn in each round. A cold batch
comes after all pages of the files were given up; the machine's disk may have a cache of its own.
`make bench` installs TorchRL; without it its rows are left out.
"""

import argparse
import ctypes
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from gymnasium import spaces
from report import about
from stable_baselines3.common.buffers import ReplayBuffer as Sb3Buffer

import jaxreplay as jr

try:
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
except ImportError:
    TensorDict: Any = None

NUM_ENVS, BATCH, BLOCK = 64, 256, 256
_DONTNEED = 4  # of madvise, on Linux


class Way:
    """A buffer that is full of random rows.

    Attributes:
      sample: Sample a batch, and wait for it.
      evict: Give up the pages of its files; None if it has none.
    """

    def __init__(self, sample: Callable[[int], Any], evict: Callable[[], None] | None = None):
        self.sample, self.evict = sample, evict


def obs_of(shape: tuple[int, ...], dtype: Any, block: int) -> np.ndarray:
    """Return observations [BLOCK, NUM_ENVS, *shape]."""
    rng = np.random.default_rng(block)
    if np.dtype(dtype) == np.uint8:
        return rng.integers(0, 255, (BLOCK, NUM_ENVS, *shape), np.uint8)
    return rng.normal(size=(BLOCK, NUM_ENVS, *shape)).astype(dtype)


def steps_of(shape: tuple[int, ...], dtype: Any, block: int) -> jr.Step:
    zeros, never = np.zeros((BLOCK, NUM_ENVS), np.float32), np.zeros((BLOCK, NUM_ENVS), bool)
    return jr.Step(
        obs=obs_of(shape, dtype, block), action=zeros, reward=zeros, terminated=never,
        truncated=never,
    )  # fmt: skip


def buffer_of(num_rows: int, kind: str) -> Any:
    shared: dict[str, Any] = {
        "capacity": num_rows, "num_envs": NUM_ENVS, "batch_size": BATCH, "autoreset": "next_step",
    }  # fmt: skip
    if kind == "prioritized":
        return jr.prioritized(**shared, n_step=3)
    return jr.uniform(**shared)


def ours(num_rows: int, kind: str, shape: Any, dtype: Any, rows: Any) -> Way:
    """Return a buffer of ours: "device" or, as for `jaxreplay.tiered`, somewhere else."""
    buffer = buffer_of(num_rows, kind)
    own: Any = jr.jit(buffer) if rows == "device" else jr.tiered(buffer, rows=rows)
    state = own.init(jax.tree.map(lambda leaf: leaf[0, 0], steps_of(shape, dtype, 0)))
    for block in range(num_rows // (NUM_ENVS * BLOCK)):
        state = own.extend(state, steps_of(shape, dtype, block))

    def sample(nth: int) -> None:
        jax.block_until_ready(own.sample(state, jax.random.key(nth)))

    if rows in ("device", "host"):
        return Way(sample)
    own.flush()
    store = own._store

    def evict() -> None:
        for array in store._files.arrays.values():
            give_up(array.ctypes.data, array.nbytes)
        give_up_files(pathlib.Path(rows))
        store._is_cold.clear()

    return Way(sample, evict)


def torchrl(num_rows: int, kind: str, shape: Any, dtype: Any, folder: Any) -> Way:
    """Return TorchRL's buffer, in a folder or in memory. It stores the next observations, too."""
    if folder:
        storage = LazyMemmapStorage(num_rows, scratch_dir=folder)
    else:
        storage = LazyTensorStorage(num_rows)
    buffer = ReplayBuffer(storage=storage, batch_size=BATCH)
    for block in range(num_rows // (NUM_ENVS * BLOCK)):
        obs = torch.from_numpy(obs_of(shape, dtype, block).reshape(-1, *shape))
        zeros = torch.zeros(len(obs))
        buffer.extend(
            TensorDict(
                {
                    "obs": obs,
                    "action": zeros,
                    "next": TensorDict(
                        {"obs": obs, "reward": zeros, "done": zeros > 0}, [len(obs)]
                    ),
                },
                [len(obs)],
            )
        )

    def evict() -> None:
        for leaf in buffer._storage._storage.values(True, True):
            give_up(leaf.data_ptr(), leaf.nbytes)
        give_up_files(pathlib.Path(folder))

    return Way(lambda _: buffer.sample(), evict if folder else None)


def sb3(num_rows: int, kind: str, shape: Any, dtype: Any, _: Any) -> Way:
    """Return Stable-Baselines3's buffer, which stores the next observations, too."""
    low, high = (0, 255) if np.dtype(dtype) == np.uint8 else (-np.inf, np.inf)
    space = spaces.Box(low, high, shape, dtype)
    buffer = Sb3Buffer(num_rows, space, spaces.Discrete(2), n_envs=NUM_ENVS)
    for block in range(num_rows // (NUM_ENVS * BLOCK)):
        at = slice(block * BLOCK, (block + 1) * BLOCK)
        buffer.observations[at] = buffer.next_observations[at] = obs_of(shape, dtype, block)
    buffer.full = True
    return Way(lambda _: buffer.sample(BATCH))


def give_up(address: int, size: int) -> None:
    """Unmap the pages of mapped memory, so that the system can give them up."""
    start = -(-address // os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PAGE_SIZE")
    if size > start - address:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size - (start - address)), _DONTNEED)


def give_up_files(folder: pathlib.Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measured(ways: dict[str, Way], rounds: int, each: int) -> dict[str, float]:
    """Return the median microseconds of a batch of each way, warm, and cold where it has files."""
    seconds: dict[str, list[float]] = {}
    for way in ways.values():
        way.sample(0)
    for turn in range(rounds):
        for name, way in ways.items():
            kinds = ["", *([", cold"] if way.evict else [])]
            for kind in kinds:
                found = seconds.setdefault(name + kind, [])
                if not kind:  # in memory again after the last cold batch
                    for nth in range(each):
                        way.sample(nth)
                for nth in range(each if not kind else max(each // 8, 2)):
                    if kind:
                        way.evict()
                    start = time.perf_counter()
                    way.sample(nth if not kind else turn * each + nth + 10**6)
                    found.append(time.perf_counter() - start)
    return {name: statistics.median(found) * 1e6 for name, found in seconds.items()}


def prefetched(num_rows: int, folder: pathlib.Path, rounds: int) -> dict[str, float]:
    """Return the milliseconds of a training step of 40 ms with a cold batch, by `prefetch`."""
    found = {}
    for prefetch in (0, 1):
        own = folder / f"prefetch{prefetch}"
        replay = jr.Replay(buffer_of(num_rows, "uniform"), rows=own, prefetch=prefetch)
        for block in range(num_rows // (NUM_ENVS * BLOCK)):
            replay.add(steps_of((21,), np.float32, block))
        store: Any = replay._owner.place.tier._store
        store.flush()
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            jax.block_until_ready(replay.sample())
            time.sleep(0.04)
            times.append(time.perf_counter() - start)
            for array in store._files.arrays.values():
                give_up(array.ctypes.data, array.nbytes)
            give_up_files(own)
            store._is_cold.clear()
        replay.close()
        found[f"prefetch={prefetch}"] = statistics.median(times[2:]) * 1e3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small buffers, no report")
    parser.add_argument("--folder", default="out", help="a folder on the disk to measure")
    options = parser.parse_args()
    size = 16 if options.quick else 1
    rounds, each = (2, 4) if options.quick else (12, 24)
    pathlib.Path(options.folder).mkdir(exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(dir=options.folder))
    lines, cases = [], {
        "uniform, float32[21]": ("uniform", 2**21 // size, (21,), np.float32),
        "prioritized, 3 steps, float32[21]": ("prioritized", 2**21 // size, (21,), np.float32),
        "uniform, uint8[84, 84]": ("uniform", 2**17 // size, (84, 84), np.uint8),
    }  # fmt: skip
    try:
        for nth, (title, (kind, *given)) in enumerate(cases.items()):
            num_rows, shape, dtype = given
            makers: dict[str, Any] = {
                "jaxreplay, on the device": (ours, "device"),
                'jaxreplay, rows="host"': (ours, "host"),
                "jaxreplay, files": (ours, folder / f"rows{nth}"),
            }
            if kind == "uniform":
                makers["Stable-Baselines3"] = (sb3, None)
                if TensorDict is not None:
                    makers["TorchRL, tensors"] = (torchrl, None)
                    makers["TorchRL, memory map"] = (torchrl, folder / f"torchrl{nth}")
            ways = {
                name: make(num_rows, kind, shape, dtype, place)
                for name, (make, place) in makers.items()
            }
            found = measured(ways, rounds, each)
            del ways
            base = found["jaxreplay, on the device"]
            lines += [
                f"\n## {title}, {num_rows:,} rows\n",
                "| way | µs a batch | of the buffer on the device |\n| --- | ---: | ---: |",
                *(f"| {name} | {time:,.0f} | {time / base:.2f} |" for name, time in found.items()),
            ]
            print("\n".join(lines[-2 - len(found) :]), flush=True)
        found = prefetched(2**21 // size, folder, 6 if options.quick else 60)
        lines += [
            "\n## A training step of 40 ms, with a cold batch\n",
            "| | ms a step |\n| --- | ---: |",
            *(f"| {name} | {time:.1f} |" for name, time in found.items()),
        ]
        print("\n".join(lines[-4:]))
    finally:
        shutil.rmtree(folder)
    if not options.quick:
        machine = about(False) | {"command": "python benchmarks/tiers.py"}
        path = pathlib.Path(__file__).parent / "TIERS.md"
        path.write_text(
            "\n".join([HEAD, *(f"- {name}: {text}" for name, text in machine.items()), *lines, ""])
        )


HEAD = f"""# Rows on the device, on the host, and in files

Microseconds of a batch of {BATCH} items of {NUM_ENVS} envs: medians, by
`python benchmarks/tiers.py`. Each way has its turn in each round. "cold": after all pages of its
files were given up. TorchRL and Stable-Baselines3 store each next observation again. The last
column is a way's time over that of a jaxreplay buffer on the device, here a CPU: above 1 the way is
slower.
"""

if __name__ == "__main__":
    main()
