"""Figures of the pages, read from what benchmarks/ measured."""

import json
import pathlib
import re

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
FULL = ("99,968 rows", "1,000,000 rows")  # sections of RESULTS.md, with full buffers
# Rows of the table of a GPU: label, rows of GPU.md.
ON_A_GPU = {
    "fused loop: add, sample, new priorities": ["1,000,000, prioritized: fused"],
    "fused loop, uniform": ["1,000,000, uniform: fused"],
    "the same, 20,000 images uint8[84, 84, 4]": ["20,000 images, uniform: fused"],
    "the same, 16 / 256 buffers of 16,000 rows, `vmap`": [
        "16 buffers, uniform: fused",
        "256 buffers, uniform: fused",
    ],
    "fused loop, prioritized, 256 buffers, `vmap`": ["256 buffers, prioritized: fused"],
    "uniform sample in a loop, batches of 32 / 4,096 / 16,384": [
        f"uniform: sample, scan, {batch}" for batch in ("32", "4,096", "16,384")
    ],
    "add / sample / update, prioritized, single calls": [
        f"1,000,000, prioritized: {call}, call" for call in ("add", "sample", "update")
    ],
    "add / sample, uniform, single calls": [
        f"1,000,000, uniform: {call}, call" for call in ("add", "sample")
    ],
}


def rows_of(page):
    """Return the rows of a page's tables, as {(section, label): {column: first number as text}}."""
    found, section, columns = {}, "", []
    for line in (BENCHMARKS / page).read_text().splitlines():
        if line.startswith("## "):
            section, columns = line[3:], []
        elif line.startswith("| ") and not line.startswith("| ---"):
            label, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            if columns:
                firsts = [cell.partition(" [")[0] for cell in cells]
                found[section, label] = dict(zip(columns, firsts, strict=True))
            else:
                columns = cells
        elif line.startswith("|  |"):
            columns = [cell.strip() for cell in line.strip("|").split("|")[1:]]
    return found


def number(text):
    return float(text.replace(",", ""))


def between(ratios):
    """Return the least and the largest ratio as text."""
    low, high = f"{min(ratios):.2g}", f"{max(ratios):.2g}"
    return low if low == high else f"{low} to {high}"


def substitutions():
    """Return the figures that pages name as `{{ name }}`."""
    cpu, gpu = rows_of("RESULTS.md"), rows_of("GPU.md")

    def ours(pattern, rows=cpu, sections=FULL):
        """Return our time by flashbax's, of the rows whose label matches."""
        return [
            number(row["jaxreplay"]) / number(row["flashbax"])
            for (section, label), row in rows.items()
            if re.fullmatch(pattern, label) and (sections is None or section in sections)
        ]

    about = json.loads((BENCHMARKS / "results.json").read_text())["about"]
    (measured,) = (key for key, tables in about.items() if "main" in tables.split(", "))
    drop_in = [
        [number(cell.split(", ")[-1]) for cell in row.values()]
        for (_, label), row in rows_of("SB3_RETURNS.md").items()
        if label == "median"
    ]
    forms = {label: row["time: form / plain"] for (_, label), row in cpu.items() if "form" in row}
    lengths = [row["time: slowest / fastest"] for row in cpu.values() if "10 steps" in row]
    return {
        "measured": measured.removeprefix("measured "),
        "python": about["python"],
        "jax": about["jax"],
        "fused": between(ours(".*: fused")),
        "fused_weights": between(ours(".*: fused, weights")),
        "call_add": between(ours(".*: add, call")),
        "call_uniform_sample": between(ours("uniform: sample, call")),
        "call_prioritized": between(ours("prioritized: (sample|update), call")),
        "final_obs_uniform": forms["uniform: final_obs"],
        "final_obs_prioritized": forms["prioritized: final_obs"],
        "lengths": max(lengths, key=number),
        "sb3_run": between([same / theirs for theirs, same, *_ in drop_in]),
        "gpu": gpu_table(gpu),
        "gpu_measured": _about_gpu(),
        "gpu_behind_vmap": between(ours("256 buffers, uniform: fused", gpu, None)),
        "gpu_behind_batch": between(ours("uniform: sample, scan, 16,384", gpu, None)),
        "gpu_behind_calls": f"{max(ours('.*uniform: sample, call.*', gpu, None)):.2g}",
    }


def gpu_table(rows):
    by_label = {label: row for (_, label), row in rows.items()}
    columns = ("jaxreplay", "flashbax", "torchrl")

    def cell(labels, column):
        return " / ".join(filter(None, (by_label[label].get(column, "") for label in labels)))

    lines = [
        [label, *(cell(labels, column) for column in columns)] for label, labels in ON_A_GPU.items()
    ]
    head = [["", "jaxreplay", "flashbax", "TorchRL, on the host"], ["---", *["---:"] * 3]]
    return "\n".join(f"| {' | '.join(line)} |" for line in head + lines)


def _about_gpu():
    about = dict(re.findall(r"^- (\w+): (.*)$", (BENCHMARKS / "GPU.md").read_text(), re.MULTILINE))
    return "{device}, jax {jax}, flashbax {flashbax}, TorchRL {torchrl}, {date}".format(**about)
