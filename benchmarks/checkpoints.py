"""Checkpoints of a buffer of 1 GB by jaxreplay, pickle, orbax and flashbax's Vault, beside a plain
write of the same bytes in chunks: of images, and of small rows with priorities.

python benchmarks/checkpoints.py [--quick]        # writes CHECKPOINTS.md next to this file
python benchmarks/checkpoints.py --kind images    # writes one of its parts

Each way runs in processes of its own, in turn, round after round. Each process saves and restores
twice, and the second time counts. It restores three times from the disk and three times from the
system's memory; the medians count.
"""

import argparse
import contextlib
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
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from checkpoint_ways import PORT, Kind, images, prepare, small, state_bytes

_RESTORES = 3  # from the disk, and from memory; allocating new memory is slow at times
_HERE = pathlib.Path(__file__).resolve().parent
_WAYS = {
    "plain": "a plain write in chunks",
    "jaxreplay": "jaxreplay, `compression_level=None`",
    "zstd": "jaxreplay, zstd (the default)",
    "pickle": "pickle",
    "orbax": "orbax",
    "vault": "flashbax's Vault",
    "bucket": "jaxreplay, zstd, to a bucket",
}
# kinds of rows, and which ways are measured for each
_KINDS = {
    "images": ("plain", "jaxreplay", "zstd", "pickle", "orbax", "vault"),
    "rows, 1 M": ("plain", "jaxreplay", "zstd", "bucket", "pickle", "orbax"),
    "rows, 10 M": ("plain", "jaxreplay", "zstd", "pickle", "orbax"),
}
_LIBRARIES = ("jax", "google-crc32c", "zstandard", "orbax-checkpoint", "tensorstore", "flashbax")
_INTRO = """\
# Checkpoints

Medians over {rounds} processes for each way, in turn, and over {restores} restores in each;
seconds, until the disk has everything (`sync`). Files are read from the disk (cold), and again from
the system's memory (warm). Memory is the most that the process took beside the state; in a restore,
beside the one that was restored. **A plain write** is of the same bytes: 64 MiB at a time, `fsync`,
and read back into one array. It checks nothing. A save of 1 % more reads the bytes of all files
that it opens.

{versions}; {machine}; {date}; `python benchmarks/checkpoints.py`.
"""
_TITLES = {
    "images": """Images

{rows:,} rows of 16 envs with an observation uint8[84, 84], half of it noise and half black, an
action, a reward and two flags: {gigabytes:.2f} GB in all.
""",
    "rows, 1 M": """Small rows, 1 M

{rows:,} rows of 64 envs with an observation float32[22], an action, a reward and two flags, with
priorities and a table of episodes: {gigabytes:.2f} GB in all. The bucket is moto's, which speaks as
S3 does, in a process on this machine.
""",
    "rows, 10 M": """Small rows, 10 M

{rows:,} of these rows: {gigabytes:.2f} GB in all.
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a small buffer, once: to see that it runs"
    )
    parser.add_argument("--kind", choices=_KINDS, help="one kind of rows; default: all")
    parser.add_argument(
        "--way",
        choices=_WAYS,
        help="one process, whose figures go to the standard output as JSON",
    )
    parser.add_argument("--folder", help="where files are written; a temporary one by default")
    options = parser.parse_args()
    if options.way:
        kind = _kind(options.kind, options.quick)
        print(json.dumps(_measured(options.way, kind, pathlib.Path(options.folder))))
        return
    file, text = _HERE / "CHECKPOINTS.md", _intro(1 if options.quick else 3)
    before = file.read_text().split("\n## ")[1:] if options.kind else []
    parts = {part.splitlines()[0]: part for part in before}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, _server():
        for name in [options.kind] if options.kind else _KINDS:
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in _KINDS[name]}
            for _ in range(1 if options.quick else 3):
                for way, own in runs.items():
                    print(name, way, file=sys.stderr)
                    own.append(_in_a_process(way, name, options.quick, folder))
            part = _part(_TITLES[name], runs, _kind(name, options.quick))
            parts[part.splitlines()[0]] = part
    text = "\n## ".join([text, *parts.values()])
    if options.quick:
        print(text)
    else:
        file.write_text(text)


def _kind(name: str, is_quick: bool) -> Kind:
    if name == "images":
        return images(0.02 if is_quick else 1.0)
    return small((10 if "10" in name else 1) * (10_000 if is_quick else 1_000_000))


@contextlib.contextmanager
def _server() -> Iterator[None]:
    """Run a server with an empty bucket."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(PORT)]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **silent) as server:
        try:
            for _ in range(100):
                with contextlib.suppress(OSError):
                    place = f"http://127.0.0.1:{PORT}/bucket"
                    urllib.request.urlopen(urllib.request.Request(place, method="PUT")).close()
                    break
                time.sleep(0.2)
            yield
        finally:
            server.terminate()


def _in_a_process(way: str, kind: str, is_quick: bool, folder: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, "--kind", kind, "--folder", folder]
    command += ["--quick"] * is_quick
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={"JAX_PLATFORMS": "cpu"} | dict(os.environ),
    )
    return json.loads(done.stdout.splitlines()[-1])


def _measured(way: str, kind: Kind, folder: pathlib.Path) -> dict[str, float]:
    state, save, restore, more = prepare(way, kind)
    times, memory = {}, {"save memory": 0, "restore memory": 0}
    for name in ("first", "second"):
        path = folder / name
        os.sync()
        times["save"], extra, _ = _taken(lambda path=path: save(path, state[0]))
        memory["save memory"] = max(memory["save memory"], extra)
        times["bytes"] = _size(path)
        if more is not None:
            state[0] = more.add(state[0])
            before = _bytes_read()
            times["save 1 %"], _, _ = _taken(lambda: more.save(state[0]))
            times["bytes read by it"] = _bytes_read() - before
            times["bytes of 1 %"] = _size(path) - times["bytes"]
        size = state_bytes(state[0])
        if name == "second":
            state.clear()
        for heat in ("cold", "warm"):
            found = []
            for _ in range(_RESTORES if name == "second" else 1):
                if heat == "cold":
                    _evict(path)
                seconds, extra, restored = _taken(lambda path=path: restore(path))
                found.append(seconds)
                memory["restore memory"] = max(memory["restore memory"], extra - size)
                del restored
            times[f"restore {heat}"] = statistics.median(found)
        shutil.rmtree(path, ignore_errors=True)  # a bucket has none
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


def _bytes_read() -> int:
    line = pathlib.Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.removeprefix("rchar: "))


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


def _intro(rounds: int) -> str:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES]
    return _INTRO.format(
        rounds=rounds,
        restores=_RESTORES,
        versions=", ".join(versions),
        machine=f"{_cpu_model()}, {os.cpu_count()} cores",
        date=datetime.date.today().isoformat(),
    )


def _part(title: str, runs: dict[str, list[dict[str, float]]], kind: Kind) -> str:
    median = {
        way: {figure: statistics.median(run[figure] for run in found) for figure in found[0]}
        for way, found in runs.items()
    }
    plain, ours = median["plain"], median["jaxreplay"]
    lines = [
        "| | save | restore, cold | restore, warm | memory of the save | of the restore | bytes "
        "written | save of 1 % more | it writes | it reads |",
        "| --- | " + " | ".join(["---:"] * 9) + " |",
    ]
    for way, what in _WAYS.items():
        if found := median.get(way):
            cells = [
                *(f"{found[one]:.2f}" for one in ("save", "restore cold", "restore warm")),
                *(
                    f"{max(found[one], 0) / 2**20:,.0f} MiB"
                    for one in ("save memory", "restore memory")
                ),
                f"{found['bytes'] / 1e9:.2f} GB" if found["bytes"] else "",
                f"{found['save 1 %']:.3f}" if "save 1 %" in found else "",
                *(
                    f"{found[one] / 1e6:,.1f} MB" if found["bytes"] and one in found else ""
                    for one in ("bytes of 1 %", "bytes read by it")
                ),
            ]
            lines.append(f"| {what} | {' | '.join(cells)} |")
    speeds = [
        f"{one} {plain[one] / ours[one]:.2f}" for one in ("save", "restore cold", "restore warm")
    ]
    text = title.format(rows=kind.num_rows, gigabytes=plain["bytes"] / 1e9)
    text += "\n" + "\n".join(lines) + "\n"
    text += f"""
Not compressed, jaxreplay's speed over that of the plain write: {", ".join(speeds)}. A save of 1 %
more took {ours["save 1 %"] / ours["save"]:.0%} of the full one's time and
{ours["bytes of 1 %"] / ours["bytes"]:.1%} of its bytes.
"""
    return text


def _cpu_model() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "a CPU"
    )


if __name__ == "__main__":
    main()
