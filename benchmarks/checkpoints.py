"""Checkpoints of a buffer of 1 GB by jaxreplay, pickle, orbax and flashbax's Vault, beside a plain
write of the same bytes in chunks.

python benchmarks/checkpoints.py [--quick]        # writes CHECKPOINTS.md next to this file

Each way runs in processes of its own, in turn, round after round. Each process saves and restores
twice, and the second time counts. It restores three times from the disk and three times from the
system's memory; the medians count.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from checkpoint_ways import filled, num_rows_of, prepare, state_bytes, steps_of

_RESTORES = 3  # from the disk, and from memory; allocating new memory is slow at times
_HERE = pathlib.Path(__file__).resolve().parent
_WAYS = {
    "plain": "a plain write in chunks",
    "jaxreplay": "jaxreplay, `compression_level=None`",
    "zstd": "jaxreplay, zstd (the default)",
    "pickle": "pickle",
    "orbax": "orbax",
    "vault": "flashbax's Vault",
}
_LIBRARIES = ("jax", "google-crc32c", "zstandard", "orbax-checkpoint", "tensorstore", "flashbax")
_INTRO = """\
# Checkpoints

{rows:,} rows of 16 envs with an observation uint8[84, 84], half of it noise and half black, an
action, a reward and two flags: {gigabytes:.2f} GB in all. Medians over {rounds} processes for each
way, in turn, and over {restores} restores in each; seconds, until the disk has everything (`sync`).
Files are read from the disk (cold), and again from the system's memory (warm). Memory is the most
that the process took beside the state; in a restore, beside the one that was restored. **A plain
write** is of the same bytes: 64 MiB at a time, `fsync`, and read back into one array. It checks
nothing.

{versions}; {machine}; {date}; `python benchmarks/checkpoints.py`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a small buffer, once: to see that it runs"
    )
    parser.add_argument(
        "--way",
        choices=[*_WAYS, "loop"],
        help="one process, whose figures go to the standard output as JSON",
    )
    parser.add_argument("--folder", help="where files are written; a temporary one by default")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    arguments = parser.parse_args()
    gigabytes = 0.02 if arguments.quick else arguments.gigabytes
    if arguments.way:
        found = (_loop if arguments.way == "loop" else _measured)(
            arguments.way, gigabytes, pathlib.Path(arguments.folder)
        )
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in [*_WAYS, "loop"]}
        for _ in range(1 if arguments.quick else 3):
            for way, found in runs.items():
                print(way, file=sys.stderr)
                found.append(_in_a_process(way, gigabytes, folder))
    text = _report(runs, gigabytes)
    (_HERE / "CHECKPOINTS.md").write_text(text)
    print(text)


def _in_a_process(way: str, gigabytes: float, folder: str) -> dict[str, float]:
    command = [
        sys.executable,
        __file__,
        "--way",
        way,
        "--folder",
        folder,
        "--gigabytes",
        str(gigabytes),
    ]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={"JAX_PLATFORMS": "cpu"} | dict(os.environ),
    )
    return json.loads(done.stdout.splitlines()[-1])


def _measured(way: str, gigabytes: float, folder: pathlib.Path) -> dict[str, float]:
    state, save, restore, more = prepare(way, num_rows_of(gigabytes))
    times, memory = {}, {"save memory": 0, "restore memory": 0}
    for name in ("first", "second"):
        path = folder / name
        os.sync()
        times["save"], extra, _ = _taken(lambda path=path: save(path, state[0]))
        memory["save memory"] = max(memory["save memory"], extra)
        times["bytes"] = _size(path)
        if more is not None:
            state[0] = more.add(state[0])
            times["save 1 %"], _, _ = _taken(lambda: more.save(state[0]))
            times["bytes of 1 %"] = _size(path) - times["bytes"]
        size = state_bytes(state[0])
        if name == "second":
            state.clear()
        for kind in ("cold", "warm"):
            found = []
            for _ in range(_RESTORES if name == "second" else 1):
                if kind == "cold":
                    _evict(path)
                seconds, extra, restored = _taken(lambda path=path: restore(path))
                found.append(seconds)
                memory["restore memory"] = max(memory["restore memory"], extra - size)
                del restored
            times[f"restore {kind}"] = statistics.median(found)
        shutil.rmtree(path)
    return times | memory


def _taken(function: Callable[[], Any]) -> tuple[float, int, Any]:
    """Return the seconds until the disk has everything, the peak memory beyond that at the start,
    and the function's result."""
    before = _memory("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    start = time.perf_counter()
    result = function()
    os.sync()
    return time.perf_counter() - start, _memory("VmHWM") - before, result


def _memory(field: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _evict(path: pathlib.Path) -> None:
    """Drop files from the system's memory, so that the next read is from the disk."""
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def _size(path: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _loop(_: str, gigabytes: float, folder: pathlib.Path) -> dict[str, float]:
    """Time a loop of adds and samples, in microseconds per iteration, alone and during a
    nonblocking save."""
    import itertools

    import jax

    import jaxreplay as jr
    from jaxreplay.checkpoint import Checkpointer

    saved, _, state = filled(num_rows_of(gigabytes))
    buffer, steps = jr.jit(saved), steps_of(8, 7)
    each = itertools.cycle([jax.tree.map(lambda leaf, t=t: leaf[t], steps) for t in range(8)])
    keys = itertools.cycle(list(jax.random.split(jax.random.key(0), 64)))
    found: dict[str, float] = {}
    for name in ("first", "second"):
        checkpointer = Checkpointer(folder / name, saved, compression_level=None)
        for what in ("alone", "saving", "alone after"):
            os.sync()
            start, count = time.perf_counter(), 0
            if what == "saving":
                checkpointer.save(state, blocking=False)
                found["pause"] = time.perf_counter() - start
            loop_start = time.perf_counter()
            while count < 2_000:
                state = buffer.add(state, next(each))
                jax.block_until_ready(buffer.sample(state, next(keys)))
                count += 1
            found[what] = (time.perf_counter() - loop_start) / count * 1e6
            if what == "saving":
                checkpointer.wait_until_finished()
                found["seconds"] = time.perf_counter() - start
        shutil.rmtree(folder / name)
    return found


def _report(runs: dict[str, list[dict[str, float]]], gigabytes: float) -> str:
    median = {
        way: {name: statistics.median(run[name] for run in found) for name in found[0]}
        for way, found in runs.items()
    }
    num_rows = num_rows_of(gigabytes)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES]
    intro = _INTRO.format(
        rows=num_rows,
        gigabytes=median["plain"]["bytes"] / 1e9,
        rounds=len(runs["plain"]),
        restores=_RESTORES,
        versions=", ".join(versions),
        machine=f"{_cpu_model()}, {os.cpu_count()} cores",
        date=datetime.date.today().isoformat(),
    )
    lines = [
        "| | save | restore, cold | restore, warm | memory of the save | of the restore | bytes "
        "written | save of 1 % more | its bytes |",
        "| --- | " + " | ".join(["---:"] * 8) + " |",
    ]
    for way, title in _WAYS.items():
        found = median[way]
        more = (
            [f"{found['save 1 %']:.3f}", f"{found['bytes of 1 %'] / 1e6:,.1f} MB"]
            if "save 1 %" in found
            else ["", ""]
        )
        cells = [
            *(f"{found[name]:.2f}" for name in ("save", "restore cold", "restore warm")),
            *(
                f"{max(found[name], 0) / 2**20:,.0f} MiB"
                for name in ("save memory", "restore memory")
            ),
            f"{found['bytes'] / 1e9:.2f} GB",
            *more,
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    ours, plain, loop = median["jaxreplay"], median["plain"], median["loop"]
    speeds = [
        f"{name} {plain[name] / ours[name]:.2f}"
        for name in ("save", "restore cold", "restore warm")
    ]
    last = f"""
Not compressed, jaxreplay's speed over that of the plain write: {", ".join(speeds)}. A save of 1 %
more took {ours["save 1 %"] / ours["save"]:.0%} of the full one's time and
{ours["bytes of 1 %"] / ours["bytes"]:.1%} of its bytes.

A loop of an add of 16 steps and a sample of 32, one jitted call after another, took
{loop["alone"]:,.0f} microseconds an iteration alone ({loop["alone after"]:,.0f} afterwards), and
{loop["saving"]:,.0f} after `save(state, blocking=False)` of everything with
`compression_level=None`, whose call took {loop["pause"] * 1e3:,.0f} ms: all but three files are
written by then. The save and 2,000 iterations took {loop["seconds"]:.2f} seconds.
"""
    return intro + "\n" + "\n".join(lines) + "\n" + last


def _cpu_model() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "a CPU"
    )


if __name__ == "__main__":
    main()
