"""An inspection as text: one line for each figure, and a table of the leaves."""

import math
from typing import Any

# figures of a leaf
COLUMNS = ("spec", "least", "mean", "largest", "not finite", "constant elements", "rows read")
# titles of sections, and the fields of `Inspection` that they show if not empty
SECTIONS = (("episodes", "episodes"), ("draws", "draws"), ("sampler", "counters"))


def text(found: dict[str, Any]) -> str:
    """Return the text. `found` has the fields of an `Inspection`."""
    lines = [
        found["buffer"],
        *([found["source"]] if found["source"] else []),
        "",
        *_section("streams", found["streams"]),
    ]
    for title, name in SECTIONS:
        if found[name]:
            lines += _section(title, found[name])
    lines += _table(found["leaves"])
    alarms = found["suspicious"]
    return "\n".join(
        [
            *lines,
            *(
                ["suspicious:", *(f"  {line}" for line in alarms)]
                if alarms
                else ["nothing suspicious"]
            ),
        ]
    )


def number(value: Any) -> str:
    """Format a figure of any type; whole numbers have no decimal point."""
    if (
        isinstance(value, float)
        and math.isfinite(value)
        and value == int(value)
        and abs(value) < 1e15
    ):
        value = int(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def singles(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that are one value."""
    return {name: value for name, value in figures.items() if not isinstance(value, dict)}


def groups(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures that are several values with names, such as quantiles."""
    return {
        name: value
        for name, value in figures.items()
        if isinstance(value, dict) and value and "edges" not in value
    }


def histograms(figures: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return the figures that are histograms with at least one bin."""
    return {
        name: value
        for name, value in figures.items()
        if isinstance(value, dict) and value.get("edges")
    }


def _section(title: str, figures: dict[str, Any]) -> list[str]:
    lines = [f"  {name:36}{number(value)}" for name, value in singles(figures).items()]
    for name, group in groups(figures).items():
        lines.append(
            f"  {name:36}" + ", ".join(f"{key} {number(one)}" for key, one in group.items())
        )
    return [title, *lines, ""]


def _table(leaves: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        ("leaf", *COLUMNS),
        *(
            (name, *(number(found.get(column, "")) for column in COLUMNS))
            for name, found in leaves.items()
        ),
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ] + [""]
