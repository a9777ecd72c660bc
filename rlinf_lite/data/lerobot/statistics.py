"""Statistics in LeRobot's form, exact: quantiles are those of all values, not bounds put together from episodes'.

Pictures count as values in [0, 1] by channel. Their statistics follow from how often each of the 256 values occurs,
so that those of any number of pictures need no second look at them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_VALUES_AT_ONCE = 2**24
Statistics = dict[str, Any]
"""min, max, mean, std, q01 ... q99: lists of the feature's shape; count: frames."""


def of_numbers(values: NDArray[Any]) -> Statistics:
    """Of [n, D], as many dimensions at a time as fit into some memory."""
    step = max(1, _VALUES_AT_ONCE // len(values))
    blocks = [values[:, dim : dim + step].astype(np.float64) for dim in range(0, values.shape[1], step)]
    functions: dict[str, Callable[..., Any]] = {"min": np.min, "max": np.max, "mean": np.mean, "std": np.std}
    found: Statistics = {
        name: np.concatenate([function(block, axis=0) for block in blocks]).tolist()
        for name, function in functions.items()
    }
    quantiles = np.concatenate([np.quantile(block, list(QUANTILES.values()), axis=0) for block in blocks], axis=1)
    found |= dict(zip(QUANTILES, quantiles.tolist(), strict=True))
    return found | {"count": [len(values)]}


def to_divide_by(found: Statistics, least: NDArray[Any], most: NDArray[Any]) -> Statistics:
    """`found`, of numbers, without the ranges that nothing should be divided by.

    A dimension that never moves, but for rounding, spans `least` to `most` [D] instead. Where nearly all values are
    one, as of a gripper that hardly ever closes, q01 and q99 are the smallest and largest: the others would be huge.
    """
    numbers = {name: np.array(found[name]) for name in ("min", "max", "mean", "std", *QUANTILES)}
    low, high = numbers["min"], numbers["max"]
    still = high - low <= 1e-6 * np.maximum(np.abs(low), np.abs(high))
    narrow = ~still & (numbers["q99"] - numbers["q01"] < 1e-3 * (high - low))
    numbers["q01"], numbers["q99"] = np.where(narrow, low, numbers["q01"]), np.where(narrow, high, numbers["q99"])
    made_up = {"mean": (least + most) / 2, "std": (most - least) / 2, "min": least, "max": most}
    made_up |= {name: least + (most - least) * q for name, q in QUANTILES.items()} | {"q01": least, "q99": most}
    return {name: np.where(still, made_up[name], x).tolist() for name, x in numbers.items()}


def picture_counts(pictures: NDArray[np.uint8]) -> NDArray[np.int64]:
    """How often each value occurs by channel, int64 [3, 256], in uint8 [n, H, W, 3]."""
    return np.stack([np.bincount(pictures[..., channel].ravel(), minlength=256) for channel in range(3)])


def of_pictures(counts: NDArray[np.int64], num_frames: int) -> Statistics:
    """From the sum of `picture_counts`; shapes [3, 1, 1]."""
    values = np.arange(256) / 255.0
    found: Statistics = {name: [] for name in ("min", "max", "mean", "std", *QUANTILES)}
    for channel in counts:
        total, there = channel.sum(), np.flatnonzero(channel)
        mean = (channel @ values) / total
        deviation = np.sqrt((channel @ (values - mean) ** 2) / total)
        below = np.cumsum(channel)
        quantiles = [_quantile(below, values, q * (total - 1)) for q in QUANTILES.values()]
        numbers = (values[there[0]], values[there[-1]], mean, deviation, *quantiles)
        for name, value in zip(found, numbers, strict=True):
            found[name].append([[float(value)]])
    return found | {"count": [num_frames]}


def _quantile(below: NDArray[np.int64], values: NDArray[np.float64], position: float) -> float:
    """Linear between the two sorted values beside `position`, as np.quantile."""
    low = int(position)
    first, second = (values[np.searchsorted(below, rank, side="right")] for rank in (low, min(low + 1, below[-1] - 1)))
    return float(first + (second - first) * (position - low))
