"""An inspection as one page that matplotlib draws: its text, the rings, and bars of each
histogram."""

import functools
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxreplay.inspection.measure import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FONT = {"family": "monospace", "size": 8}
_CHARACTER, _LINE = 0.069, 0.135  # inches, of that font
_PLOT_WIDTH, _PLOT_HEIGHT = 2.6, 1.7  # inches


def page(
    text: str, rings: np.ndarray, streams: dict[str, Any], sections: list[dict[str, Any] | None]
) -> "Figure":
    """Draw the page.

    Args:
      text: The inspection as text.
      rings: float32[lines, points, 3], the picture of the rings.
      streams: Figures of all envs, by name.
      sections: Figures by name, of which the histograms are drawn.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ImportError("a page needs matplotlib: pip install matplotlib") from None
    histograms = {
        name.removesuffix(", histogram"): value
        for figures in sections
        for name, value in (figures or {}).items()
        if isinstance(value, dict) and value.get("edges")
    }
    lines = text.splitlines()
    width = max(_CHARACTER * max(map(len, lines)), _PLOT_WIDTH * len(histograms)) + 0.8
    rings_height = min(0.5 + 0.2 * len(rings), _PLOT_HEIGHT)
    below = _PLOT_HEIGHT * bool(histograms)  # height of the histograms, below the rings
    height = _LINE * len(lines) + 0.6 + below + rings_height + 0.9
    figure = Figure(figsize=(width, height))
    vars(figure)["_repr_png_"] = functools.partial(_png, figure)  # what a notebook shows
    figure.text(0.3 / width, 1 - 0.2 / height, text, va="top", parse_math=False, fontdict=_FONT)
    size = (width - 1) / width, rings_height / height
    axes = figure.add_axes((0.5 / width, (below + 0.45) / height, *size))
    envs = streams["envs"]
    axes.imshow(rings, aspect="auto", extent=(0, streams["capacity"] // envs, envs, 0))
    axes.set_title("rings: a line an env, rows by position", fontsize=8, loc="left")
    axes.tick_params(labelsize=7)
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "frameon": False, "ncols": 6}
    axes.legend(handles=handles, fontsize=7, **above)
    for number, (title, found) in enumerate(histograms.items()):
        left, bottom = 0.5 + _PLOT_WIDTH * number, 0.35
        size = (_PLOT_WIDTH - 0.6) / width, (_PLOT_HEIGHT - 0.7) / height
        axes = figure.add_axes((left / width, bottom / height, *size))
        axes.stairs(found["counts"], found["edges"], fill=True)
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=7)
    return figure


def _png(figure: "Figure") -> bytes:
    figure.savefig(content := io.BytesIO(), format="png")
    return content.getvalue()
