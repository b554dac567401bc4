"""The results as Markdown."""

import dataclasses
import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import numpy as np
import ragged
from cases import ONE_THREAD, Row

import jaxreplay

INTRO = """\
Microseconds per iteration: the median over {rounds} rounds, with the quartiles in brackets. Ratios
are of medians. Each library ran in a process of its own; in a round all columns of a row are timed
one after another, and the next round goes through them in reverse. All buffers are full, of steps
with obs float32[8], action int32, reward float32, terminated and truncated; about 1 % of the steps
end an episode. An add brings one step of each of 64 envs; a sample draws 256 items; states are
donated.

- **call**: one jitted call after another, dispatch included, waited for once at the end of the
  loop; jaxreplay's are those of `jr.jit`, or of `jax.jit` where measured before 2026-11-26, and in
  populations. **scan**: an iteration of a `lax.scan` in one jitted program. **fused**: such a scan
  around add, sample and, where the buffer has priorities, new ones from the sampled rewards.
- Every sampled leaf is used: a loop carries the sampled items on, while the probabilities feed the
  new priorities, with a factor of 0, which is flashbax's fast form. **carried**: the whole sample
  is carried on, and the probabilities feed nothing. **weights**: importance weights from the
  probabilities go into a loss, and the new priorities do not depend on them, as in a training loop.
  In these two XLA copies flashbax's tree twice an iteration, in no other row anything.
- **limit**: NumPy moving the same bytes from a Python loop: `np.copyto` for an add; for a sample
  `np.take`, at rows drawn before, into arrays that are used again; for an update a plain write of
  the new priorities. It draws nothing, checks nothing and keeps no tree.
"""


@dataclasses.dataclass(frozen=True)
class Result:
    row: Row
    times: dict[str, list[float]]  # microseconds per iteration, one a round

    def median(self, name: str) -> float:
        return float(np.median(self.times[name]))

    def quartiles(self, name: str) -> list[float]:
        return [float(value) for value in np.percentile(self.times[name], [25, 75])]

    def ratio(self, above: str, below: str) -> str:
        return f"{self.median(above) / self.median(below):.2f}"

    def cell(self, name: str) -> str:
        low, high = self.quartiles(name)
        return f"{_digits(self.median(name))} [{_digits(low)}, {_digits(high)}]"


def about(quick: bool) -> dict[str, str]:
    found = {one.name.replace("-", "_") for one in importlib.metadata.distributions()}
    versions = {
        name: importlib.metadata.version(name)
        for name in ("flashbax", "jax", "jaxlib", "numpy", "torch", "torchrl", "stable_baselines3")
        if name in found
    }
    return {
        "machine": f"{_cpu_model()}, {os.cpu_count()} cores",
        "platform": os.environ.get("JAX_PLATFORMS", "cpu"),
        "python": platform.python_version(),
        "jaxreplay": jaxreplay.__version__,
        **versions,
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/run.py" + (" --quick" if quick else ""),
    }


def markdown(results: list[Result], about: dict[str, str], intro: str) -> str:
    sections = [
        "# Benchmarks",
        "\n".join(f"- {key}: {value}" for key, value in about.items()),
        intro,
    ]
    tables = {}
    for result in results:
        key = (result.row.table, result.row.capacity if result.row.table in ("main", "flat") else 0)
        tables.setdefault(key, []).append(result)
    return (
        "\n\n".join(sections + [_TABLES[table](chosen) for (table, _), chosen in tables.items()])
        + "\n"
    )


def _main(results: list[Result]) -> str:
    lines = [
        [
            r.row.name,
            r.cell("jaxreplay"),
            r.cell("flashbax"),
            r.cell("limit"),
            r.ratio("flashbax", "jaxreplay"),
            r.ratio("jaxreplay", "limit"),
        ]
        for r in results
    ]
    title = f"## {results[0].row.capacity:,} rows"
    return _table(
        title,
        ["", "jaxreplay", "flashbax", "limit", "flashbax / jaxreplay", "jaxreplay / limit"],
        lines,
    )


def _threads(results: list[Result]) -> str:
    ours, theirs = "jaxreplay", "flashbax"
    one = {library: library + ONE_THREAD for library in (ours, theirs)}
    lines = [
        [
            r.row.name,
            *(r.cell(column) for library in (ours, theirs) for column in (library, one[library])),
            *(r.ratio(library, one[library]) for library in (ours, theirs)),
            r.ratio(one[theirs], one[ours]),
        ]
        for r in results
    ]
    title = """## One thread

The fused loop again, and in processes with `NPROC=1`, where XLA has one thread. With more it hands
even work of a microsecond from thread to thread, and splits each read from a leaf of 512 KiB or
more. Time with all threads / with one; and, of one thread, flashbax /
jaxreplay."""
    head = [
        "",
        ours,
        "one thread",
        theirs,
        "one thread",
        f"{ours}: all / one",
        f"{theirs}: all / one",
        "one thread: flashbax / jaxreplay",
    ]
    return _table(title, head, lines)


def _batches(results: list[Result]) -> str:
    title = f"""## Batches of 32 to 16,384

At {results[0].row.capacity:,} rows."""
    return _beside_flashbax(title, results)


def _gpu(results: list[Result]) -> str:
    return _beside_flashbax("## Loops and calls, by rows", results)


def _compat(results: list[Result]) -> str:
    title = """## flashbax's interface

`jaxreplay.compat.flashbax` (compat) beside flashbax: the same calls, jitted in the same way."""
    return _beside_flashbax(title, results)


def _jits(results: list[Result]) -> str:
    title = """## Single calls of jr.jit and of jax.jit

Where the time of an add goes (2026-11-30, AMD EPYC, 2 cores, jax 0.10.2; us): to pass the arrays of
the state through a program, in place: 16 for 6 arrays (flashbax: 16, 7 arrays), with priorities 25
for 14 (21, 10: four arrays are levels of the tree, three are counts and the largest priority). The
kernels: 10 in 3 (13 in 3), with priorities 34 in 12 (26 in 9 to 12). By `jax.jit` XLA hands the 34
from core to core: 32. `jr.jit`'s own Python takes 5: a look for NumPy arrays among the arguments,
which it copies, 2.2; whether this call is traced, 1.4; the fields and the number of rows, 1.4."""
    return _beside_flashbax(title, results)


def _populations(results: list[Result]) -> str:
    title = f"""## Populations

Buffers of {results[0].row.capacity:,} rows under `vmap`, each of 64 envs, with batches of 256. All
buffers add the same steps; each samples with a key of its own."""
    return _beside_flashbax(title, results)


def _beside_flashbax(title: str, results: list[Result]) -> str:
    names = list(dict.fromkeys(name for r in results for name in r.row.columns))
    ours, *others = names
    lines = [
        [
            r.row.name,
            *(r.cell(name) if name in r.row.columns else "" for name in names),
            *(r.ratio(name, ours) if name in r.row.columns else "" for name in others),
        ]
        for r in results
    ]
    return _table(title, ["", *names, *(f"{name} / {ours}" for name in others)], lines)


def _forms(results: list[Result]) -> str:
    lines = [
        [r.row.name, r.cell("form"), r.cell("plain"), r.ratio("form", "plain")] for r in results
    ]
    title = f"""## What a form costs

The fused loop of jaxreplay at {results[0].row.capacity:,} rows, with one thing changed:
`autoreset="next_step"`; `same_step` with a final
observation in every step; 3-step transitions; importance weights in a loss,
over the batch's largest (weights) or the buffer's."""
    return _table(title, ["", "form", "plain", "form / plain"], lines)


def _flat(results: list[Result]) -> str:
    small, large = (results[0].row.columns[name][1].capacity for name in ("small", "large"))
    lines = [
        [
            r.row.name,
            r.cell("small"),
            r.cell("large"),
            r.ratio("large", "small"),
            r.ratio("limit_large", "limit_small"),
        ]
        for r in results
    ]
    title = f"""## Writes at {small:,} and {large:,} rows

A write of jaxreplay that copied a leaf of the buffer would be slower by up to the ratio of the
capacities, {large // small}. Target: at most 1.6. What is left comes from the caches, from the
tree's depth, and from XLA's threads, which split a read from a leaf of 512 KiB or
more; it shows most in a scan, where nothing else is paid. The limit,
NumPy's plain write of the same rows, has the first."""
    return _table(
        title, ["", f"{small:,} rows", f"{large:,} rows", "ratio", "the limit's ratio"], lines
    )


def _image(results: list[Result]) -> str:
    lines = [
        [
            r.row.name,
            r.cell("jaxreplay"),
            r.cell("fresh"),
            r.cell("into"),
            r.ratio("jaxreplay", "fresh"),
            r.ratio("jaxreplay", "into"),
        ]
        for r in results
    ]
    title = f"""## Samples of images

256 of {results[0].row.capacity:,} items uint8[84, 84, 4]. `np.take` returns new arrays, as a call
of jaxreplay does, or fills arrays that
are used again, as the scan does. Target for one take: at most 1.3."""
    return _table(
        title,
        ["", "jaxreplay", "take", "take, out=", "jaxreplay / take", "jaxreplay / take, out="],
        lines,
    )


def _lengths(results: list[Result]) -> str:
    names = list(results[0].row.columns)
    lines = []
    for r in results:
        medians = [r.median(name) for name in names]
        lines.append(
            [r.row.name, *(r.cell(name) for name in names), f"{max(medians) / min(medians):.2f}"]
        )
    title = f"""## Look-ups in short and long episodes

Samples of jaxreplay at {results[0].row.capacity:,} rows of 4 envs whose episodes are all as long as
the column says: `jr.future_pairs`, `jr.hindsight` (goals of a later step) and `jr.sequences` (16
steps and a burn-in of 4). Target for the slowest over the fastest: at
most 1.3."""
    return _table(
        title, ["", *(f"{int(name):,} steps" for name in names), "slowest / fastest"], lines
    )


def _numpy(results: list[Result]) -> str:
    lines = [
        [
            r.row.name,
            *(r.cell(name) for name in ("call", "scan", "sort", "search")),
            r.ratio("sort", "call"),
            r.ratio("search", "call"),
            r.ratio("search", "scan"),
        ]
        for r in results
    ]
    title = """## Pairs at a geometric horizon, beside NumPy

100 episodes of 100 steps: an episode, a step of it, how many steps there are to the end, a horizon,
and both observations. NumPy knows
all ends beforehand, and sorts the distances to them (sort) or searches them (search)."""
    head = [
        "",
        "call",
        "scan",
        "NumPy: sort",
        "NumPy: search",
        "sort / call",
        "search / call",
        "search / scan",
    ]
    return _table(title, head, lines)


def _ragged(results: list[Result]) -> str:
    lines = [
        [r.row.name, r.cell("streamed"), r.cell("joined"), r.ratio("joined", "streamed")]
        for r in results
    ]
    title = f"""## Ragged trajectories

{ragged.num_bytes(results[0].row.capacity) / 1e9:.2f} GB on the host go to the device: by
`Rollout.from_trajectories`, in chunks; or
by `np.concatenate` and a copy of each leaf."""
    return _table(title, ["", "streamed", "concatenated", "concatenated / streamed"], lines)


def _crossing(results: list[Result]) -> str:
    lines = []
    for r in results:
        ours, *others = r.row.columns
        lines.append(
            [
                f"{r.row.name}: {ours}",
                r.cell(ours),
                *(f"{_CROSSINGS[name]}: {r.cell(name)}" for name in others),
                *[""] * (2 - len(others)),
            ]
        )
    title = """## Eight leaves of a batch to PyTorch, and back

Leaves float32[256, 8]. jaxreplay's functions check each leaf; `from_torch` makes copies that nobody
else can write to."""
    return _table(title, ["", "jaxreplay", "beside it", "beside it"], lines)


_CROSSINGS = {
    "numpy": "torch.from_numpy(np.asarray(x))",
    "dlpack": "torch.from_dlpack(x)",
    "copied": "jnp.array(x.numpy())",
}


def _sb3(results: list[Result]) -> str:
    lines = [
        [r.row.name, r.cell("ours"), r.cell("theirs"), r.ratio("theirs", "ours")] for r in results
    ]
    title = """## Buffers for Stable-Baselines3

One call after another, as its algorithms make them: an `add` of one env's transition; a `sample` of
256, to tensors. Observations: 31
numbers; for `DictReplayBuffer` beside an image 84x84x3 uint8; for `HerReplayBuffer` beside two
goals of 3 numbers.

On a CPU a flat uniform batch of at most 4 envs is read from memory without a program since
2026-11-30. At the commit before, on that day and machine, a sample took 246 us where
Stable-Baselines3's took 70; with Dict observations 1,415 (1,690), with n steps 332 (153), with
goals 544 (320); whole runs of DQN on CartPole took 1.40 times
Stable-Baselines3's time, of SAC on Pendulum 1.13 times."""
    return _table(
        title,
        ["", "jaxreplay.sb3", "Stable-Baselines3", "Stable-Baselines3 / jaxreplay.sb3"],
        lines,
    )


_TABLES = {
    "crossing": _crossing,
    "sb3": _sb3,
    "main": _main,
    "threads": _threads,
    "compat": _compat,
    "jits": _jits,
    "gpu": _gpu,
    "batches": _batches,
    "populations": _populations,
    "forms": _forms,
    "flat": _flat,
    "image": _image,
    "lengths": _lengths,
    "numpy": _numpy,
    "ragged": _ragged,
}


def _table(title: str, head: list[str], lines: list[list[str]]) -> str:
    head = [f"time: {name}" if " / " in name else name for name in head]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1), *lines]
    return title + "\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _digits(microseconds: float) -> str:
    return f"{microseconds:,.0f}" if microseconds >= 100 else f"{microseconds:.3g}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
