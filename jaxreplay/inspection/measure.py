"""The figures of an inspection: streams, leaves, episodes, draws and a picture of the rings."""

from typing import Any

import numpy as np

from jaxreplay.inspection.contents import Contents, numbers_in_order
from jaxreplay.storage import ring, row_flags

_BINS = 30
# Red, green and blue of rows in the picture. A sampleable row is the darker the more probable.
COLORS = {
    "not written": (0.93, 0.93, 0.93),
    "sampleable": (0.45, 0.65, 0.88),
    "often sampled": (0.03, 0.19, 0.42),
    "not sampleable": (0.96, 0.62, 0.25),
    "final row": (0.2, 0.2, 0.2),
    "next write": (0.85, 0.1, 0.1),
}
_LINES, _PARTS = 64, 512  # of the picture


def leaf_figures(contents: Contents) -> dict[str, dict[str, Any]]:
    """Return the figures of each leaf, over the rows that were read.

    Rows that are only a final observation count for `steps.obs` alone.
    """
    flags, figures = contents.flags, {}
    is_step = np.ones(len(contents.rows), bool) if flags is None else _is_step(flags[contents.rows])
    with np.errstate(over="ignore", invalid="ignore"):
        for name, text in contents.leaves.items():
            is_obs = flags is None or name.split(".")[:2] == ["steps", "obs"]
            values = contents.values[name] if is_obs else contents.values[name][is_step]
            figures[name] = {"spec": text, **(_of_values(values) if len(values) else {})}
    return figures


def _is_step(flags: np.ndarray) -> np.ndarray:
    """Return True for rows with a step, False for final observations alone: bool[...]."""
    return ((flags & row_flags.FINAL) == 0) | (
        (flags & (row_flags.TERMINATED | row_flags.TRUNCATED)) != 0
    )


def _of_values(values: np.ndarray) -> dict[str, Any]:
    """Return the figures of some rows of a leaf. Integers are compared without conversion to float,
    complex numbers by their absolute value."""
    values = np.abs(values) if values.dtype.kind == "c" else values
    is_whole = values.dtype.kind in "uib"
    values = values if is_whole else values.astype(np.float64)
    is_finite = np.isfinite(values)
    num_finite = int(is_finite.sum())
    figures: dict[str, Any] = {"rows read": len(values), "not finite": values.size - num_finite}
    if not num_finite:
        return figures
    some = values if num_finite == values.size else np.ma.masked_array(values, ~is_finite)
    least, largest = some.min(axis=0), some.max(axis=0)
    number = int if is_whole else float
    return figures | {
        "least": number(least.min()),
        "mean": float((some.sum(axis=0, dtype=np.float64) / num_finite).sum()),
        "largest": number(largest.max()),
        "elements": least.size,
        "constant elements": int(np.ma.filled(least == largest, False).sum()),
    }


def stream_figures(contents: Contents) -> dict[str, Any]:
    """Return the numbers of envs and rows, and how full the buffer is."""
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
    """Return the figures of episodes.

    Lengths and returns are of episodes that are stored from start to end. A row that is only a
    final observation is not counted as a step.
    """
    flags = contents.flags
    assert flags is not None
    env, _ = numbers_in_order(contents.first, contents.end)
    is_first = (flags & row_flags.FIRST) != 0
    starts_stream = np.diff(env, prepend=-1) != 0
    done = flags & (row_flags.TERMINATED | row_flags.TRUNCATED)
    is_step = _is_step(flags)
    episode = np.cumsum(is_first | starts_stream) - 1
    count = int(episode[-1]) + 1 if len(episode) else 0

    def per_episode(values: np.ndarray) -> np.ndarray:
        return np.bincount(episode, values, minlength=count)

    lengths = per_episode(is_step).astype(np.int64)
    has_start = per_episode(is_first) > 0
    has_end = per_episode((done != 0) | ((flags & row_flags.FINAL) != 0)) > 0
    is_whole = has_start & has_end & (lengths > 0)
    figures: dict[str, Any] = {
        "whole": int(is_whole.sum()),
        "unfinished": int((~has_end).sum()),
        "cut at their start": int((has_end & ~has_start & (lengths > 0)).sum()),
        "terminated": int((is_whole & (per_episode((done & row_flags.TERMINATED) != 0) > 0)).sum()),
        "lengths": quantiles(lengths[is_whole]),
        "lengths, histogram": histogram(lengths[is_whole]),
    }
    if contents.reward is not None:
        returns = per_episode(
            np.where(is_step, np.nan_to_num(contents.reward, nan=0, posinf=0, neginf=0), 0)
        )[is_whole]
        figures |= {"returns": quantiles(returns), "returns, histogram": histogram(returns)}
    return figures


def draw_figures(contents: Contents) -> dict[str, Any]:
    """Return the figures of sampling: probabilities relative to uniform ones, ages of sampled rows,
    and the effective sample size with importance weights."""
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
        "age of a draw": {
            name: int(age[drawn][order][np.searchsorted(below, q * below[-1])])
            for name, q in _QUANTILES.items()
        },
        "age of a draw, histogram": histogram(age[drawn], share),
        "effective sample size": {
            f"weights with beta {beta}": _effective(share, ratio, beta) for beta in (0.4, 1.0)
        },
    }


def rings(contents: Contents) -> np.ndarray:
    """Return a picture of the rings, a line an env: float32[min(E, 64), min(length, 512), 3].

    A point has the mean color of its rows; the point of the next write has one of its own.
    """
    env, number = numbers_in_order(contents.first, contents.end)
    num_envs, length, flags = len(contents.first), contents.length, contents.flags
    lines, parts = min(num_envs, _LINES), min(length, _PARTS)
    line_of = np.arange(num_envs) * lines // num_envs
    part_of = np.arange(length) * parts // length
    color = {name: np.array(value, np.float32) for name, value in COLORS.items()}

    probability, strength = contents.probability, np.zeros(len(env), np.float32)
    is_sampleable = np.ones(len(env), bool) if probability is None else probability > 0
    if probability is not None and is_sampleable.any():
        ratio = probability / probability[is_sampleable].mean()
        strength = np.log10(np.maximum(ratio, 1e-9)).clip(0, 1).astype(np.float32)
    colors = color["sampleable"] + strength[:, None] * (
        color["often sampled"] - color["sampleable"]
    )
    colors[~is_sampleable] = color["not sampleable"]
    if flags is not None:
        colors[~_is_step(flags)] = color["final row"]

    point = line_of[env] * parts + part_of[ring.position_of(number, length)]
    sums = [np.bincount(point, channel, lines * parts) for channel in colors.T]
    written = np.bincount(point, minlength=lines * parts)
    size = np.outer(np.bincount(line_of), np.bincount(part_of)).reshape(-1)
    empty = (size - written)[:, None] * color["not written"]
    picture = (np.stack(sums, axis=-1) + empty) / size[:, None]
    picture = picture.reshape(lines, parts, 3).astype(np.float32)
    picture[line_of, part_of[ring.position_of(contents.end, length)]] = color["next write"]
    return picture


def _effective(share: np.ndarray, ratio: np.ndarray, beta: float) -> float:
    """Return the effective sample size of a large batch, as a fraction: (E w)^2 / E w^2.

    Weights are w = ratio ** -beta; `share` has the probability of each row.
    """
    weight = ratio**-beta
    return float((share * weight).sum() ** 2 / (share * weight**2).sum())


_QUANTILES = {"least": 0.0, "quarter": 0.25, "median": 0.5, "three quarters": 0.75, "largest": 1.0}


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Return quantiles and mean, or {} if `values` is empty."""
    if not len(values):
        return {}
    found = np.quantile(values, list(_QUANTILES.values()))
    return {
        **{name: float(value) for name, value in zip(_QUANTILES, found, strict=True)},
        "mean": float(values.mean()),
    }


def histogram(values: np.ndarray, weights: np.ndarray | None = None) -> dict[str, Any]:
    """Return n counts, or sums of weights, and the n + 1 edges of their bins. Bins of integers
    contain equally many integers each."""
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
