"""The result of an inspection: figures, likely mistakes, and their form as text, JSON or a page."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxreplay._util.names import printable
from jaxreplay.inspection import measure
from jaxreplay.inspection.contents import Contents
from jaxreplay.inspection.page import page
from jaxreplay.inspection.resets import wrong_autoreset
from jaxreplay.inspection.text import text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Figures of a buffer's contents. `str()` gives a text.

    Figures of many values, such as lengths of episodes, are a dict of quantiles, and a histogram
    with the lists "edges" and "counts".

    Attributes:
      buffer: Description of the buffer.
      source: Path, step, bytes on the disk and metadata of a checkpoint, or "" for a state.
      streams: Figures of all envs together, by name: number of envs, number of rows, capacity, fill
        as a fraction, and rows of the fullest and of the emptiest env.
      leaves: Figures of each leaf by its path in the step, such as "steps.obs": dtype and shape,
        rows that were read, least, mean and largest value, values that are not finite, and elements
        that are the same in all rows.
      episodes: Figures of episodes, by name: how many are stored as a whole, are unfinished, are
        cut at their start, or terminated; lengths in steps, and undiscounted returns if rewards are
        scalar. The last three are of whole episodes alone. None for items.
      draws: Figures of sampling, by name: sampleable rows, their probabilities relative to uniform
        sampling, ages of sampled rows, and effective sample size with importance weights, as a
        fraction of the batch. None if probabilities are not known.
      counters: Scalars of the sampler's state, by name, such as "max_priority".
      suspicious: Likely mistakes, one line of text each.
      rings: Picture of the rings, float32[lines, points, 3] in [0, 1]: colors of each env's rows
        by position. Text and JSON leave it out.
    """

    buffer: str
    source: str
    streams: dict[str, Any]
    leaves: dict[str, dict[str, Any]]
    episodes: dict[str, Any] | None
    draws: dict[str, Any] | None
    counters: dict[str, float]
    suspicious: list[str]
    rings: np.ndarray = dataclasses.field(repr=False, compare=False)

    def to_json(self) -> str:
        """Return all figures as JSON. Figures that are not finite become null."""
        return json.dumps(self._each(_finite), indent=1, allow_nan=False)

    def to_figure(self) -> "Figure":
        """Return the text, a picture of the rings, and a plot of each histogram, as a
        `matplotlib.figure.Figure`.

        The picture has a line for each env, up to 64: rows from the ring's first position to its
        last. A sampleable row is the darker the more probable it is.

        Raises:
          ImportError: matplotlib is not installed.
        """
        return page(str(self), self.rings, self.streams, [self.episodes, self.draws])

    def __str__(self) -> str:
        return text(self._each(lambda one: printable(one) if isinstance(one, str) else one))

    def _each(self, change: Callable[[Any], Any]) -> Any:
        return _each({k: v for k, v in vars(self).items() if k != "rings"}, change)


def _each(found: Any, change: Callable[[Any], Any]) -> Any:
    """Change each name and each value of nested dicts and lists."""
    if isinstance(found, dict):
        return {change(name): _each(value, change) for name, value in found.items()}
    if isinstance(found, list):
        return [_each(value, change) for value in found]
    return change(found)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def inspection_of(contents: Contents) -> Inspection:
    """Return the figures of a buffer's contents.

    Args:
      contents: Rows of the buffer, read from a state or from a checkpoint.
    """
    leaves = measure.leaf_figures(contents)
    episodes = None if contents.flags is None else measure.episode_figures(contents)
    draws = None if contents.probability is None else measure.draw_figures(contents)
    return Inspection(
        buffer=contents.buffer,
        source=contents.source,
        streams=measure.stream_figures(contents),
        leaves=leaves,
        episodes=episodes,
        draws=draws,
        counters=contents.counters,
        suspicious=list(_suspicious(contents, leaves, episodes, draws)),
        rings=measure.rings(contents),
    )


def _suspicious(
    contents: Contents,
    leaves: dict[str, dict[str, Any]],
    episodes: dict[str, Any] | None,
    draws: dict[str, Any] | None,
):
    """Yield what is suspicious, one line of text each."""
    if not contents.num_rows:
        yield "the buffer is empty"
        return
    for name, found in leaves.items():
        is_constant = found.get("elements") and found["constant elements"] == found["elements"]
        if found.get("not finite"):
            yield (
                f"{name} has {found['not finite']:,} values that are NaN or infinite, in "
                f"{found['rows read']:,} rows"
            )
        elif is_constant and found["rows read"] > 1:
            what = (
                f"is {found['least']:g} in all"
                if found["least"] == found["largest"]
                else "is the same in all"
            )
            yield f"{name} {what} of {found['rows read']:,} rows"
    if contents.resets is not None and (wrong := wrong_autoreset(contents.resets)):
        yield wrong
    if episodes is not None and not episodes["whole"]:
        yield "no episode is stored from its start to its end"
    if draws is None:
        return
    count, shared = (
        draws["rows that can be drawn"],
        draws.get("rows that share their probability", 0),
    )
    if not count:
        yield "no row is sampleable"
    elif "max_priority" in contents.counters:
        if shared == count > 1:
            yield (
                f"all {count:,} rows are equally likely: priorities are equal, or have no effect "
                "(alpha=0)"
            )
        elif shared > 1 and shared >= count / 10:
            yield (
                f"{shared:,} of {count:,} rows share one probability: their priorities were never "
                "updated, or are equal"
            )
    if contents.counters.get("num_lost"):
        yield (
            f"{contents.counters['num_lost']:,.0f} new rows were overwritten before they were "
            "sampled, since they came faster than batches took them"
        )
    for name, what in (
        ("num_bad_priorities", "priorities were NaN, infinite or negative"),
        (
            "num_stale_updates",
            "updates named rows that are not sampleable (sampled before `can_sample`, or "
            "overwritten since)",
        ),
    ):
        if contents.counters.get(name):
            yield f"{contents.counters[name]:,.0f} {what}, and were ignored"
