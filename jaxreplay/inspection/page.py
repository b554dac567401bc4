"""An inspection as one HTML page. Plots are inline SVG: it needs no script and no network."""

import html
from typing import Any

from jaxreplay.inspection.text import COLUMNS, SECTIONS, groups, histograms, number, singles

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #f7f8fa;
  margin: 0 auto; max-width: 1080px; padding: 32px 24px }
h1 { font-size: 24px; margin: 0 } h2 { font-size: 17px; margin: 0 0 12px }
code { font-size: 13px; color: #52606d; overflow-wrap: anywhere }
section { background: #fff; border: 1px solid #e4e7eb; border-radius: 8px;
  padding: 20px; margin-top: 20px }
.alarm { border-left: 4px solid #d64545 } .calm { border-left: 4px solid #3f9142 }
.tiles, .plots { display: flex; flex-wrap: wrap; gap: 12px 32px } .plots { margin-top: 16px }
.tile span { display: block; font-size: 13px; color: #616e7c }
.tile b { font-size: 19px; font-weight: 600 }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: 5px 12px 5px 0; border-bottom: 1px solid #e4e7eb;
  white-space: nowrap }
th { font-weight: 500; font-size: 13px; color: #616e7c }
th:first-child, td:first-child { text-align: left }
figure { margin: 0 } figcaption { font-size: 13px; color: #616e7c }
svg text { font: 11px system-ui, sans-serif; fill: #616e7c }
"""
_WIDTH, _HEIGHT = 300, 130


def page(found: dict[str, Any]) -> str:
    """Return the page. `found` has the fields of an `Inspection`."""
    alarms = found["suspicious"]
    parts = [
        "<h1>A look inside</h1>",
        *(
            f"<div><code>{_text(line)}</code></div>"
            for line in (found["buffer"], found["source"])
            if line
        ),
        _section(
            "Suspicious" if alarms else "Nothing suspicious",
            _items(alarms),
            "alarm" if alarms else "calm",
        ),
        _section("Streams", _tiles(found["streams"])),
    ]
    for title, name in SECTIONS:
        if found[name]:
            parts.append(
                _section(
                    title.capitalize(),
                    _tiles(found[name]) + _quantiles(found[name]) + _plots(found[name]),
                )
            )
    parts.append(_section("Leaves", _leaves(found["leaves"])))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    )
    head += f"<title>A look inside a replay buffer</title><style>{_STYLE}</style>"
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _section(title: str, body: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{_text(title)}</h2>{body}</section>'


def _items(lines: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _tiles(figures: dict[str, Any]) -> str:
    tiles = (
        f'<div class="tile"><span>{_text(name)}</span><b>{number(value)}</b></div>'
        for name, value in singles(figures).items()
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _quantiles(figures: dict[str, Any]) -> str:
    return "".join(
        _table(name, list(row), [[number(value) for value in row.values()]])
        for name, row in groups(figures).items()
    )


def _table(
    corner: str, head: list[str], rows: list[list[str]], first: list[str] | None = None
) -> str:
    names = first if first is not None else [""] * len(rows)
    cells = "".join(
        "<tr><td>" + "</td><td>".join([_text(name), *row]) + "</td></tr>"
        for name, row in zip(names, rows, strict=True)
    )
    title = "".join(f"<th>{_text(name)}</th>" for name in [corner, *head])
    return f'<div class="scroll"><table><tr>{title}</tr>{cells}</table></div>'


def _leaves(leaves: dict[str, dict[str, Any]]) -> str:
    rows = [
        [_text(number(found.get(column, ""))) for column in COLUMNS] for found in leaves.values()
    ]
    return _table("leaf", list(COLUMNS), rows, list(leaves))


def _plots(figures: dict[str, Any]) -> str:
    plots = "".join(_plot(name, value) for name, value in histograms(figures).items())
    return f'<div class="plots">{plots}</div>'


def _plot(name: str, found: dict[str, list[float]]) -> str:
    """Return a histogram as SVG bars, with the first and the last edge below them."""
    edges, counts = found["edges"], found["counts"]
    most, width = max(counts) or 1, _WIDTH / len(counts)
    bars = "".join(
        f'<rect x="{at * width:.2f}" y="{_HEIGHT * (1 - count / most):.2f}" '
        f'width="{max(width - 1, 0.5):.2f}" '
        f'height="{_HEIGHT * count / most:.2f}" fill="#3e7cb1"><title>{number(low)} to '
        f"{number(high)}: {number(count)}</title></rect>"
        for at, (count, low, high) in enumerate(zip(counts, edges[:-1], edges[1:], strict=True))
    )
    axis = f'<line x1="0" x2="{_WIDTH}" y1="{_HEIGHT}" y2="{_HEIGHT}" stroke="#9aa5b1"/>'
    ends = f'<text x="0" y="{_HEIGHT + 15}">{number(edges[0])}</text>'
    ends += f'<text x="{_WIDTH}" y="{_HEIGHT + 15}" text-anchor="end">{number(edges[-1])}</text>'
    label = _text(name.removesuffix(", histogram"))
    return (
        f'<figure><figcaption>{label}</figcaption><svg role="img" aria-label="{label}" '
        f'width="{_WIDTH}" height="{_HEIGHT + 20}">'
        f"{bars}{axis}{ends}</svg></figure>"
    )


def _text(value: str) -> str:
    return html.escape(value)
