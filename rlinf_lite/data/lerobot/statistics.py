"""Exact statistics in LeRobot's form: quantiles are over all values, not combined from those of episodes.

Pictures count as values in [0, 1] by channel. Their statistics are computed from the counts of the 256 values, so
that pictures are read only once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_VALUES_AT_ONCE = 2**20
Statistics = dict[str, Any]
"""min, max, mean, std, q01 ... q99: lists of the feature's shape; count: number of frames."""


def of_numbers(values: NDArray[Any]) -> Statistics:
    """The statistics of values [n, D]. They may be a mapped file: rows are read in parts of bounded size."""
    num_rows, num_dims = values.shape
    at_once = max(1, _VALUES_AT_ONCE // num_dims)
    low, high, total, squares = np.full(num_dims, np.inf), np.full(num_dims, -np.inf), 0.0, 0.0
    for first in range(0, num_rows, at_once):
        block = values[first : first + at_once].astype(np.float64)
        low, high = np.minimum(low, block.min(0)), np.maximum(high, block.max(0))
        total = total + block.sum(0)
    mean = total / num_rows
    for first in range(0, num_rows, at_once):
        squares = squares + ((values[first : first + at_once].astype(np.float64) - mean) ** 2).sum(0)
    if at_once >= num_rows:
        quantiles = np.quantile(values.astype(np.float64), list(QUANTILES.values()), axis=0)
    else:
        quantiles = np.stack([_quantiles(values[:, dim]) for dim in range(num_dims)], axis=1)
    numbers = {"min": low, "max": high, "mean": mean, "std": np.sqrt(squares / num_rows)}
    numbers |= dict(zip(QUANTILES, quantiles, strict=True))
    return {name: x.tolist() for name, x in numbers.items()} | {"count": [num_rows]}


def _quantiles(column: NDArray[Any]) -> NDArray[np.float64]:
    """The quantiles of values [n], by counting instead of sorting: at most `_VALUES_AT_ONCE` values are in memory."""
    positions = np.array(list(QUANTILES.values())) * (len(column) - 1)
    below = np.floor(positions).astype(np.int64)
    first, second = _ranked(column, np.concatenate([below, below + 1])).reshape(2, -1)  # all positions are below n - 1
    share, span = positions - below, second - first
    return np.where(share < 0.5, first + span * share, second - span * (1 - share))  # rounds like np.quantile


def _ranked(column: NDArray[Any], ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """The values with these ranks among [n] (0: the smallest). Their 64 bits are found 16 at a time, by counting how
    often each next 16 bits occur after the bits found so far."""
    top, bits = np.uint64(1 << 63), np.zeros(len(ranks), np.uint64)
    for shift in (48, 32, 16, 0):
        counts = {begin: np.zeros(2**16, np.int64) for begin in bits.tolist()}
        for first in range(0, len(column), _VALUES_AT_ONCE):
            keys = (column[first : first + _VALUES_AT_ONCE].astype(np.float64) + 0.0).view(np.uint64)  # -0 is 0
            keys = np.where(keys & top, ~keys, keys | top)  # in the order of the numbers
            begins, digits = keys >> np.uint64(min(shift + 16, 63)), (keys >> np.uint64(shift)) & np.uint64(0xFFFF)
            for begin, count in counts.items():
                found = digits if shift == 48 else digits[begins == begin]
                count += np.bincount(found.astype(np.int64), minlength=2**16)
        digit = np.zeros(len(ranks), np.uint64)
        ranks = ranks.copy()
        for number, begin in enumerate(bits.tolist()):
            up_to = np.cumsum(counts[begin])
            digit[number] = found_digit = np.searchsorted(up_to, ranks[number], side="right")
            ranks[number] -= up_to[found_digit] - counts[begin][found_digit]
        bits = (bits << np.uint64(16)) | digit
    return np.where(bits & top, bits ^ top, ~bits).view(np.float64)


def to_divide_by(found: Statistics, least: NDArray[Any], most: NDArray[Any]) -> Statistics:
    """The statistics `found`, of numbers, with all ranges wide enough to divide by them.

    A dimension that is constant up to rounding gets the range `least` to `most` [D]. If nearly all values are the same,
    as for a gripper that rarely closes, q01 and q99 become the minimum and maximum; otherwise other values would be
    huge.
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
    """The counts of each value by channel, int64 [3, 256], in pictures uint8 [n, H, W, 3]."""
    return np.stack([np.bincount(pictures[..., channel].ravel(), minlength=256) for channel in range(3)])


def of_pictures(counts: NDArray[np.int64], num_frames: int) -> Statistics:
    """The statistics of pictures, from the sum of their `picture_counts`; shapes [3, 1, 1]."""
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
    """A quantile by linear interpolation between the two sorted values next to `position`, like np.quantile."""
    low = int(position)
    first, second = (values[np.searchsorted(below, rank, side="right")] for rank in (low, min(low + 1, below[-1] - 1)))
    return float(first + (second - first) * (position - low))
