"""The figures of an inspection: of streams, leaves, episodes, draws, and what is suspicious about them."""

from typing import Any, NamedTuple

import numpy as np

from jaxreplay import autoreset
from jaxreplay.inspection.contents import Contents, numbers_in_order

_BINS = 30


class Running(NamedTuple):
    """Of a leaf, after some blocks: for each element of a row the least, the largest and the sum of its finite values.

    Integers are compared as they are. Of a complex number its absolute value.
    """

    least: np.ndarray
    largest: np.ndarray
    total: np.ndarray
    num_rows: int
    num_not_finite: int

    @classmethod
    def of(cls, block: np.ndarray) -> "Running":
        values = np.abs(block) if block.dtype.kind == "c" else block
        if values.dtype.kind in "uib":
            return cls(values.min(axis=0), values.max(axis=0), values.sum(axis=0, dtype=np.float64), len(values), 0)
        values = values.astype(np.float64)
        is_finite = np.isfinite(values)
        if is_finite.all():
            return cls(values.min(axis=0), values.max(axis=0), values.sum(axis=0), len(values), 0)
        low, high, some = (np.where(is_finite, values, fill) for fill in (np.inf, -np.inf, 0))
        return cls(low.min(axis=0), high.max(axis=0), some.sum(axis=0), len(values), int((~is_finite).sum()))

    def and_then(self, other: "Running") -> "Running":
        return Running(
            np.minimum(self.least, other.least),
            np.maximum(self.largest, other.largest),
            self.total + other.total,
            self.num_rows + other.num_rows,
            self.num_not_finite + other.num_not_finite,
        )


def leaf_figures(contents: Contents) -> dict[str, dict[str, Any]]:
    """Of each leaf, over the rows that were read. A row that only brings a final observation has nothing else."""
    running: dict[str, Running] = {}
    flags = contents.flags
    is_step = np.ones(contents.num_rows, bool) if flags is None else _is_step(flags)
    with np.errstate(over="ignore", invalid="ignore"):
        for rows, block in contents.blocks():
            for name, values in block.items():
                is_obs = flags is None or name.split(".")[:2] == ["steps", "obs"]
                if len(some := values if is_obs else values[is_step[rows]]):
                    found = Running.of(some)
                    running[name] = running[name].and_then(found) if name in running else found
        return {name: _of_leaf(running[name], text) if name in running else {"spec": text} for name, text in contents.leaves.items()}


def _is_step(flags: np.ndarray) -> np.ndarray:
    """Whether a row is more than a final observation: bool[...]."""
    return ((flags & autoreset.TAIL) == 0) | ((flags & (autoreset.TERMINATED | autoreset.TRUNCATED)) != 0)


def _of_leaf(running: Running, text: str) -> dict[str, Any]:
    is_seen = running.least <= running.largest
    size = running.least.size
    figures = {"spec": text, "rows read": running.num_rows, "not finite": running.num_not_finite}
    if not is_seen.any():
        return figures
    number = float if running.least.dtype.kind == "f" else int
    seen = max(running.num_rows * size - running.num_not_finite, 1)
    return figures | {
        "least": number(running.least.min()),
        "mean": float((running.total / seen).sum()),
        "largest": number(running.largest.max()),
        "elements": size,
        "constant elements": int((is_seen & (running.least == running.largest)).sum()),
    }


def stream_figures(contents: Contents) -> dict[str, Any]:
    filled = contents.end - contents.first
    return {
        "envs": len(filled),
        "rows": contents.num_rows,
        "capacity": contents.length * len(filled),
        "fill": float(filled.sum() / max(contents.length * len(filled), 1)),
        "rows of the fullest env": int(filled.max()),
        "rows of the emptiest env": int(filled.min()),
    }


def episode_figures(contents: Contents) -> dict[str, Any]:
    """Of those that are held from their first row to their end. A row that only brings a final observation is no step."""
    flags = contents.flags
    assert flags is not None
    env, _ = numbers_in_order(contents.first, contents.end)
    is_first = (flags & autoreset.FIRST) != 0
    starts_stream = np.diff(env, prepend=-1) != 0
    done = flags & (autoreset.TERMINATED | autoreset.TRUNCATED)
    is_step = _is_step(flags)
    episode = np.cumsum(is_first | starts_stream) - 1
    count = int(episode[-1]) + 1 if len(episode) else 0

    def per_episode(values: np.ndarray) -> np.ndarray:
        return np.bincount(episode, values, minlength=count)

    lengths = per_episode(is_step).astype(np.int64)
    has_start = per_episode(is_first) > 0
    has_end = per_episode((done != 0) | ((flags & autoreset.TAIL) != 0)) > 0
    is_whole = has_start & has_end & (lengths > 0)
    figures: dict[str, Any] = {
        "whole": int(is_whole.sum()),
        "unfinished": int((~has_end).sum()),
        "cut at their start": int((has_end & ~has_start & (lengths > 0)).sum()),
        "terminated": int((is_whole & (per_episode((done & autoreset.TERMINATED) != 0) > 0)).sum()),
        "lengths": quantiles(lengths[is_whole]),
        "lengths, histogram": histogram(lengths[is_whole]),
    }
    if contents.reward is not None:
        returns = per_episode(np.where(is_step, np.nan_to_num(contents.reward, nan=0, posinf=0, neginf=0), 0))[is_whole]
        figures |= {"returns": quantiles(returns), "returns, histogram": histogram(returns)}
    return figures


def draw_figures(contents: Contents) -> dict[str, Any]:
    """How rows are drawn: how much more often than evenly, how old they are, and what the importance weights leave of a batch."""
    probability = contents.probability
    assert probability is not None
    env, number = numbers_in_order(contents.first, contents.end)
    age = contents.end[env] - 1 - number
    drawn = probability > 0
    count = int(drawn.sum())
    figures: dict[str, Any] = {"rows that can be drawn": count}
    if not count:
        return figures
    share = probability[drawn] / probability[drawn].sum()
    ratio = share * count
    _, repeats = np.unique(share, return_counts=True)
    order = np.argsort(age[drawn], kind="stable")
    below = np.cumsum(share[order])
    return figures | {
        "probability over an even one": quantiles(ratio),
        "log10 of it, histogram": histogram(np.log10(ratio)),
        "rows that share their probability": int(repeats.max()),
        "age of a draw": {name: int(age[drawn][order][np.searchsorted(below, q * below[-1])]) for name, q in _QUANTILES.items()},
        "age of a draw, histogram": histogram(age[drawn], share),
        "effective sample size": {f"weights with exponent {exponent}": _effective(share, ratio, exponent) for exponent in (0.4, 1.0)},
    }


def _effective(share: np.ndarray, ratio: np.ndarray, exponent: float) -> float:
    """Of a large batch, the part that as many equal weights would be worth: (E w)^2 / E w^2."""
    weight = ratio**-exponent
    return float((share * weight).sum() ** 2 / (share * weight**2).sum())


_QUANTILES = {"least": 0.0, "quarter": 0.25, "median": 0.5, "three quarters": 0.75, "largest": 1.0}


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Of no values: nothing."""
    if not len(values):
        return {}
    found = np.quantile(values, list(_QUANTILES.values()))
    return {**{name: float(value) for name, value in zip(_QUANTILES, found, strict=True)}, "mean": float(values.mean())}


def histogram(values: np.ndarray, weights: np.ndarray | None = None) -> dict[str, Any]:
    """Counts, or sums of weights, and the edges between them, one more; whole numbers have bins of whole numbers."""
    if not len(values):
        return {"edges": [], "counts": []}
    low, high = float(values.min()), float(values.max())
    if values.dtype.kind in "iu":
        width = max(1, -(-int(high - low + 1) // _BINS))
        edges = np.arange(low - 0.5, high + width, width)
    elif not np.isfinite(high - low):
        return {"edges": [], "counts": []}
    elif high - low > 1e-9 * max(abs(low), abs(high)):
        edges = np.linspace(low, high, _BINS + 1)
    else:
        edges = np.array([low - 0.5, high + 0.5])
    counts, _ = np.histogram(values, edges, weights=weights)
    return {"edges": edges.tolist(), "counts": counts.tolist()}
