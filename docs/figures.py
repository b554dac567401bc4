"""Drawings of the docs, each made by one function; `python docs/figures.py` writes those of the
README into `docs/images`."""

import json
import pathlib

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

BLUE, ORANGE, GREEN, GRAY, DARK = "#4c78a8", "#f58518", "#54a24b", "#9d9d9d", "#333333"
ROW, FINAL, NEXT_EPISODE = "#dbe7f3", "#fde3c8", "#d8ecd5"  # colors of boxes
HERE = pathlib.Path(__file__).parent
# Panels of `speed`: the other library's color and name, then for each row of the benchmark its
# table, name, number of rows of the buffer, and label.
FLASHBAX, SB3 = (GRAY, "flashbax 0.1.3"), (GREEN, "Stable-Baselines3 2.9.2")
PANELS = {
    "Compiled loop: add, sample, update": [
        (FLASHBAX, "main", "uniform: fused", 99_968, "uniform, 100 k rows"),
        (FLASHBAX, "main", "uniform: fused", 1_000_000, "uniform, 1 M rows"),
        (FLASHBAX, "main", "prioritized: fused", 99_968, "prioritized, 100 k rows"),
        (FLASHBAX, "main", "prioritized: fused", 1_000_000, "prioritized, 1 M rows"),
    ],
    "Single calls from Python": [
        (FLASHBAX, "main", "uniform: add, call", 1_000_000, "uniform add"),
        (FLASHBAX, "main", "uniform: sample, call", 1_000_000, "uniform sample"),
        (SB3, "sb3", "ReplayBuffer: add", None, "SB3 drop-in, add"),
        (SB3, "sb3", "ReplayBuffer: sample", None, "SB3 drop-in, sample"),
    ],
}


def rings():
    """Draw two envs' rings: an episode, its final row, the episode after it, the next write."""
    axes = _canvas(9, 2.9, 13.5, 4.2)
    rows = {
        2.6: ("env 0", [(0, 0), (0, 1), (0, 2), (0, None), (1, 0), (1, 1)]),
        0.9: ("env 1", [(0, 5), (0, 6), (0, None), (1, 0), (1, 1), (1, 2), (1, 3)]),
    }
    for y, (name, steps) in rows.items():
        axes.text(1.1, y + 0.5, name, ha="right", va="center", fontsize=10)
        for position in range(8):
            x = 1.3 + 1.5 * position
            if position >= len(steps):
                _box(axes, x, y, "", "white", width=1.5)
                continue
            episode, step = steps[position]
            color = FINAL if step is None else NEXT_EPISODE if episode else ROW
            text = (
                f"$o_{steps[position - 1][1] + 1}$"
                if step is None
                else f"$o_{step}\\;a_{step}\\;r_{step}$"
            )
            _box(axes, x, y, text, color, width=1.5)
        x = 1.3 + 1.5 * (len(steps) + 0.5)
        _arrow(axes, (x, y - 0.4), (x, y - 0.02), GREEN)
        axes.text(x, y - 0.62, "next write", ha="center", fontsize=8, color=GREEN)
    axes.text(1.3 + 1.5 * 1.5, 3.75, "an episode of 3 steps", ha="center", color=BLUE, fontsize=9)
    axes.text(1.3 + 1.5 * 3.5, 3.75, "its final row", ha="center", color=ORANGE, fontsize=9)
    plt.show()


def autoresets():
    """Draw the three forms of autoreset as timelines of what `step` returns."""
    axes = _canvas(9.5, 6.0, 14, 9.4)
    forms = {
        "next_step": "$o_3$ is the next observation. Add every step: the one after the done stores "
        "$o_3$.",
        "same_step": "$o_3$ comes beside $o'_0$. Pass it as final_obs.",
        "same_step_no_final_obs": "$o_3$ is lost. After a termination no target needs it. After a "
        "truncation, the\ntransition from $o_2$ is dropped.",
    }
    for y, (name, text) in zip((6.6, 3.5, 0.4), forms.items(), strict=True):
        axes.text(0.3, y + 2.0, f'"{name}"', fontsize=11, family="monospace", va="center")
        axes.text(0.35, y, text, fontsize=9, va="center")
        is_next = name == "next_step"
        first = 4 if is_next else 3  # column of the next episode's first observation
        for column in range(6):
            x, is_new, is_done = 0.3 + 2.3 * column, column >= first, column == 2
            is_final = is_next and column == 3
            step = column - first if is_new else column
            observation = f"$o'_{step}$" if is_new else f"$o_{step}$"
            color = FINAL if is_final else NEXT_EPISODE if is_new else ROW
            _box(axes, x, y + 0.55, observation, color, width=1.3)
            if column < 5:
                action = "ignored" if is_final else f"$a_{step}$" + " done" * is_done
                style = {"fontsize": 8, "color": ORANGE if is_done or is_final else DARK}
                axes.text(x + 1.8, y + 1.3, action, ha="center", **style)
                _arrow(axes, (x + 1.35, y + 1.05), (x + 2.25, y + 1.05))
        if name == "same_step":
            _box(axes, 7.2, y + 1.6, "$o_3$", FINAL, width=1.3, height=0.75)
            axes.text(8.65, y + 1.95, "final_obs", fontsize=9, va="center", color=ORANGE)
    plt.show()


def windows():
    """Draw which rows a 3-step transition reads, within an episode and at its end."""
    axes = _canvas(9.5, 3.2, 14, 4.7)
    left = 0.6
    for column in range(9):
        is_new, is_final = column >= 6, column == 5
        text = f"$o'_{column - 6}$" if is_new else f"$o_{column}$"
        color = FINAL if is_final else NEXT_EPISODE if is_new else ROW
        _box(axes, left + 1.4 * column, 1.8, text, color, width=1.4)
    axes.text(left + 1.4 * 5.5, 1.6, "final row", ha="center", va="top", fontsize=9, color=ORANGE)
    lines = [
        (0, 3, 3.9, "from $o_0$:  $r_0 + \\gamma r_1 + \\gamma^2 r_2 + \\gamma^3 V(o_3)$"),
        (3, 5, 3.2, "from $o_3$, cut by a time limit:  $r_3 + \\gamma r_4 + \\gamma^2 V(o_5)$"),
    ]
    for first, last, y, text in lines:
        x, end = left + 1.4 * first + 0.1, left + 1.4 * (last + 1) - 0.1
        axes.plot([x, end], [y, y], color=BLUE, linewidth=2.5)
        axes.text(end + 0.2, y, text, va="center", fontsize=9)
    x = left + 1.4 * 6
    axes.plot([x + 0.1, left + 1.4 * 9 - 0.1], [0.7, 0.7], color=GRAY, linewidth=2.5)
    text = "not sampleable yet: their windows are not complete"
    axes.text(x - 0.1, 0.7, text, va="center", ha="right", fontsize=9, color="#666666")
    plt.show()


def donation():
    """Draw the memory of an add, with the old state donated and kept."""
    axes = _canvas(9.5, 2.3, 14, 3.4)
    for x, title, boxes in (
        (0.2, "donated", [("old state = new state", BLUE)]),
        (7.2, "not donated", [("old state", BLUE), ("new state, a copy", ORANGE)]),
    ):
        axes.text(x + 0.1, 3.0, title, fontsize=10)
        for number, (text, color) in enumerate(boxes):
            y = 1.6 - 1.2 * number
            style = {"boxstyle": "round,pad=0.03", "fc": color, "ec": "none", "alpha": 0.25}
            axes.add_patch(FancyBboxPatch((x + 0.15, y), 6.2, 0.95, **style))
            axes.text(x + 0.4, y + 0.48, text, va="center", fontsize=9.5)
            if number == len(boxes) - 1:
                axes.add_patch(Rectangle((x + 3.6, y + 0.08), 0.35, 0.8, fc=GREEN, ec="none"))
                axes.text(x + 4.1, y + 0.48, "new rows", va="center", fontsize=9, color=GREEN)
    plt.show()


def tiers():
    """Draw what goes between the device, the host's memory and the disk."""
    axes = _canvas(9.5, 2.9, 14, 4.2)
    boxes = {
        0.3: ("device", "index: flags, counters,\npriorities; 5 to 22 bytes a row", ROW),
        5.3: ("host", "gathers the rows of a batch\nin a thread", NEXT_EPISODE),
        10.3: ("memory or files", "all rows", FINAL),
    }
    for x, (name, text, color) in boxes.items():
        _box(axes, x, 1.6, "", color, width=3.4, height=2.2)
        axes.text(x + 1.7, 3.5, name, ha="center", va="center", fontsize=10)
        axes.text(x + 1.7, 2.6, text, ha="center", va="center", fontsize=8)
    arrows = [
        ((3.7, 3.2), (5.3, 3.2), "1  row numbers", 3.3),
        ((5.3, 2.2), (3.7, 2.2), "3  the batch", 2.3),
        ((10.3, 2.7), (8.7, 2.7), "2  these rows", 2.8),
    ]
    for start, end, text, y in arrows:
        _arrow(axes, start, end)
        middle = (start[0] + end[0]) / 2
        axes.text(middle, y, text, ha="center", fontsize=8, color=BLUE)
    axes.text(7.0, 0.75, "steps of the envs", ha="center", fontsize=9, color=GREEN)
    _arrow(axes, (8.6, 0.85), (12.0, 1.55), GREEN)
    axes.text(11.2, 0.75, "values", fontsize=8, color=GREEN)
    _arrow(axes, (5.4, 0.85), (2.0, 1.55), GREEN)
    axes.text(2.3, 0.75, "flags, a byte each", fontsize=8, color=GREEN)
    plt.show()


def actors():
    """Draw what goes between actors and the learner."""
    axes = _canvas(9.5, 3.3, 14, 5.0)
    for y, name in ((3.1, "actor 0"), (1.7, "actor 1"), (0.3, "...")):
        _box(axes, 0.3, y, "", ROW, width=3.2, height=1.1)
        text = name if name == "..." else f"{name}: its envs, the policy"
        axes.text(1.9, y + 0.55, text, ha="center", va="center", fontsize=8)
    _box(axes, 5.6, 0.9, "", NEXT_EPISODE, width=3.0, height=2.7)
    text = "one block of each actor,\nin order, each once:\none add of all"
    axes.text(7.1, 2.25, text, ha="center", va="center", fontsize=8)
    axes.text(7.1, 4.0, "a thread of the learner", ha="center", fontsize=9)
    _box(axes, 10.6, 0.9, "", FINAL, width=3.1, height=2.7)
    axes.text(12.15, 2.6, "rows, index, priorities", ha="center", va="center", fontsize=8)
    axes.text(12.15, 1.7, "samples, updates", ha="center", va="center", fontsize=8)
    axes.text(12.15, 4.0, "the learner's device", ha="center", fontsize=9)
    _arrow(axes, (3.5, 3.65), (5.6, 2.9), GREEN)
    _arrow(axes, (3.5, 2.25), (5.6, 2.25), GREEN)
    _arrow(axes, (8.6, 2.25), (10.6, 2.25), GREEN)
    axes.text(4.5, 3.7, "blocks of 64 steps", ha="center", fontsize=8, color=GREEN)
    axes.text(9.6, 2.4, "steps, once", ha="center", fontsize=8, color=GREEN)
    _arrow(axes, (5.6, 1.4), (3.5, 1.95))
    axes.text(4.6, 0.75, "which blocks\nmay begin", ha="center", fontsize=8, color=BLUE)
    _arrow(axes, (12.15, 0.9), (12.15, 0.35))
    axes.text(8.0, 0.3, "parameters and their version, to all actors", fontsize=8, color=BLUE)
    plt.show()


def speed():
    """Draw microseconds beside flashbax and Stable-Baselines3, from benchmarks/results.json."""
    rows = {(row["table"], row["name"], _capacity(row)): row for row in measured()["rows"]}
    figure, panels = plt.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
    for axes, (title, bars) in zip(panels, PANELS.items(), strict=True):
        for number, ((color, _), *key, _) in enumerate(bars):
            medians = [column["median_us"] for column in rows[tuple(key)]["columns"].values()]
            for value, shift, shade in zip(medians, (0.19, -0.19), (BLUE, color), strict=False):
                axes.barh(shift - number, value, height=0.36, color=shade)
                axes.text(value, shift - number, f" {value:.0f}", va="center", fontsize=8)
        axes.set_yticks([-number for number in range(len(bars))], [bar[-1] for bar in bars])
        axes.set(title=title, xlabel="microseconds, median of 9 rounds")
        axes.spines[["top", "right"]].set_visible(False)
        others = dict(bar[0] for bar in bars)
        handles = [Rectangle((0, 0), 1, 1, color=color) for color in (BLUE, *others)]
        axes.legend(handles, ["jaxreplay 0.1.0", *others.values()], frameon=False)
    return figure


def _capacity(row):
    return (
        next(iter(row["columns"].values()))["case"].get("capacity")
        if row["table"] == "main"
        else None
    )


COSTS = (
    ("main", "uniform: add, scan", "jaxreplay", "uniform: add of 64 envs"),
    ("main", "uniform: sample, scan", "jaxreplay", "uniform: sample of 256"),
    ("main", "prioritized: add, scan", "jaxreplay", "prioritized: add of 64 envs"),
    ("main", "prioritized: sample, scan", "jaxreplay", "prioritized: sample of 256"),
    ("main", "prioritized: update, scan", "jaxreplay", "prioritized: update of 256"),
    ("lengths", "hindsight, scan", "1000", "hindsight: sample of 256"),
    ("lengths", "episodes, scan", "1000", "future_pairs: sample of 256"),
    ("lengths", "sequences, scan", "1000", "sequences: sample of 256"),
)


def costs():
    """Draw what each operation costs in a compiled loop, from benchmarks/results.json."""
    rows = {(row["table"], row["name"]): row["columns"] for row in measured()["rows"]}
    axes = plt.subplots(figsize=(8, 3.2), layout="constrained")[1]
    for number, (*key, column, _) in enumerate(COSTS):
        value = rows[tuple(key)][column]["median_us"]
        axes.barh(-number, value, height=0.6, color=GREEN if "add" in key[1] else BLUE)
        axes.text(value, -number, f" {value:.0f}", va="center", fontsize=8)
    axes.set_yticks([-number for number in range(len(COSTS))], [cost[-1] for cost in COSTS])
    axes.set(xlabel="microseconds an iteration of a compiled loop, median of 9 rounds")
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()


def measured():
    """Return what `benchmarks/run.py` measured."""
    return json.loads((HERE.parent / "benchmarks" / "results.json").read_text())


def _canvas(width, height, x, y):
    axes = plt.subplots(figsize=(width, height), layout="constrained")[1]
    axes.set(xlim=(0, x), ylim=(0, y), aspect="equal")
    axes.axis("off")
    return axes


def _box(axes, x, y, text, color, width=1.0, height=1.0):
    style = {"fc": color, "ec": "#555555", "linewidth": 0.8}
    axes.add_patch(Rectangle((x + 0.04, y + 0.04), width - 0.08, height - 0.08, **style))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)


def _arrow(axes, start, end, color=DARK):
    style = {"arrowstyle": "->", "color": color, "linewidth": 1.2}
    axes.annotate("", end, start, arrowprops=style)


if __name__ == "__main__":
    speed().savefig(HERE / "images" / "speed.png", dpi=120)
