"""An inspection as one page that matplotlib draws: its text, and bars of each histogram."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FONT = {"family": "monospace", "size": 8}
_CHARACTER, _LINE = 0.069, 0.135  # inches, of that font
_PLOT_WIDTH, _PLOT_HEIGHT = 2.6, 1.7  # inches


def page(text: str, sections: list[dict[str, Any] | None]) -> "Figure":
    """Draw the page.

    Args:
      text: The inspection as text.
      sections: Figures by name, of which the histograms are drawn.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
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
    height = _LINE * len(lines) + 0.6 + _PLOT_HEIGHT * bool(histograms)
    figure = Figure(figsize=(width, height))
    figure.text(0.3 / width, 1 - 0.2 / height, text, va="top", parse_math=False, fontdict=_FONT)
    for number, (title, found) in enumerate(histograms.items()):
        left, bottom = 0.5 + _PLOT_WIDTH * number, 0.35
        size = (_PLOT_WIDTH - 0.6) / width, (_PLOT_HEIGHT - 0.7) / height
        axes = figure.add_axes((left / width, bottom / height, *size))
        axes.stairs(found["counts"], found["edges"], fill=True)
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=7)
    return figure
