"""Metrics of several micro-batches or ranks as those of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import SupportsFloat


def combine_metrics(parts: Iterable[tuple[Mapping[str, SupportsFloat], float]]) -> dict[str, float]:
    """Combine (metrics, weight) pairs: names ending in `_max` by the largest, all others by the weighted mean.

    A name is averaged over the parts that have it. Parts of weight 0 (nothing valid in them) are left out.
    """
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for metrics, weight in parts:
        for name, value in metrics.items() if weight > 0 else ():
            if name.endswith("_max"):
                sums[name] = max(sums.get(name, float("-inf")), float(value))
                weights[name] = 1.0
            else:
                sums[name] = sums.get(name, 0.0) + weight * float(value)
                weights[name] = weights.get(name, 0.0) + weight
    return {name: total / weights[name] for name, total in sums.items()}
