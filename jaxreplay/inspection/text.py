"""An inspection as text: one line for each figure, and a table of the leaves."""

from typing import Any

# figures of a leaf
_COLUMNS = ("spec", "least", "mean", "largest", "not finite", "constant elements", "rows read")


def text(found: dict[str, Any]) -> str:
    """Return the text. `found` has the fields of an `Inspection`."""
    lines = [found["buffer"], found["source"], ""] if found["source"] else [found["buffer"], ""]
    for title in ("streams", "episodes", "draws", "counters"):
        if found[title]:
            lines += _section("sampler" if title == "counters" else title, found[title])
    lines += _table(found["leaves"])
    alarms = [f"  {line}" for line in found["suspicious"]]
    lines += ["suspicious:", *alarms] if alarms else ["nothing suspicious"]
    return "\n".join(lines)


def _number(value: Any) -> str:
    """Format a figure of any type; whole numbers have no decimal point."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _section(title: str, figures: dict[str, Any]) -> list[str]:
    """Return a line for each value, then one for each group of values, such as quantiles."""
    groups = {name: value for name, value in figures.items() if isinstance(value, dict)}
    lines = [f"  {name:36}{_number(figures[name])}" for name in figures if name not in groups]
    for name, group in groups.items():
        if group and "edges" not in group:  # histograms are for the page
            shown = ", ".join(f"{key} {_number(one)}" for key, one in group.items())
            lines.append(f"  {name:36}{shown}")
    return [title, *lines, ""]


def _table(leaves: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        ("leaf", *_COLUMNS),
        *(
            (name, *(_number(found.get(column, "")) for column in _COLUMNS))
            for name, found in leaves.items()
        ),
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ] + [""]
