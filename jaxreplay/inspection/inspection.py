"""What was found in a buffer, as a value, text or JSON, and what of it is suspicious."""

import dataclasses
import json
import math
from typing import Any

from jaxreplay._util.names import printable
from jaxreplay.inspection import measure
from jaxreplay.inspection.contents import Contents
from jaxreplay.inspection.page import page
from jaxreplay.inspection.resets import wrong_autoreset
from jaxreplay.inspection.text import text


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Figures of a buffer's contents. `str()` gives a text, `to_json()` all of them, `to_html()` a
    page with plots."""

    buffer: str  # its description
    source: str  # the path and the step of a checkpoint; "" of a state
    streams: dict[str, Any]
    leaves: dict[str, dict[str, Any]]
    episodes: dict[str, Any] | None  # None for items, which have none
    draws: dict[str, Any] | None  # None where the probabilities are not known
    counters: dict[str, float]  # of the sampler
    suspicious: list[str]

    def to_json(self) -> str:
        """A figure that is not finite is null."""
        return json.dumps(_finite(dataclasses.asdict(self)), indent=1, allow_nan=False)

    def to_html(self) -> str:
        """One page that needs nothing else: no network, no script."""
        return page(_printable(dataclasses.asdict(self)))

    def __str__(self) -> str:
        return text(_printable(dataclasses.asdict(self)))


def _printable(found: Any) -> Any:
    if isinstance(found, dict):
        return {printable(name): _printable(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_printable(value) for value in found]
    return printable(found) if isinstance(found, str) else found


def _finite(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _finite(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def inspection_of(contents: Contents) -> Inspection:
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
    )


def _suspicious(
    contents: Contents,
    leaves: dict[str, dict[str, Any]],
    episodes: dict[str, Any] | None,
    draws: dict[str, Any] | None,
):
    """One line each."""
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
        yield "no episode is held from its start to its end"
    if draws is None:
        return
    count, shared = (
        draws["rows that can be drawn"],
        draws.get("rows that share their probability", 0),
    )
    if not count:
        yield "no row can be drawn"
    elif "max_priority" in contents.counters:
        if shared == count > 1:
            yield (
                f"all {count:,} rows are equally likely: priorities are equal, or do not count "
                "(alpha 0, or no rerank yet)"
            )
        elif shared > 1 and shared >= count / 10:
            yield (
                f"{shared:,} of {count:,} rows share one probability, as rows do that were "
                "never updated, or whose errors are equal"
            )
    for name, what in (
        ("num_bad_priorities", "priorities were NaN, infinite or negative"),
        (
            "num_stale_updates",
            "updates named no row that can be drawn (from a sample before `can_sample`, or "
            "overwritten since)",
        ),
    ):
        if contents.counters.get(name):
            yield f"{contents.counters[name]:,.0f} {what}, and were ignored"
