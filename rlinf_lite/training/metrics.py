"""Weighted sums of training metrics over micro-batches, updates and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlinf_lite.algorithms import explained_variance

_CRITIC = ("value_loss", "value_clip_fraction", "values_mean")


def advantage_metrics(advantages: Tensor, returns: Tensor, mask: Tensor, values: Tensor | None) -> dict[str, float]:
    """Mean and extremes over valid positions, and how much of the returns the values explain."""
    metrics: dict[str, float] = {}
    for name, valid in (("advantages", advantages[mask]), ("returns", returns[mask])):
        metrics[f"rollout/{name}_mean"] = float(valid.mean())
        metrics[f"rollout/{name}_max"] = float(valid.max())
        metrics[f"rollout/{name}_min"] = float(valid.min())
    if values is not None and int(mask.sum()) > 1:
        metrics["train/critic/explained_variance"] = explained_variance(values, returns, mask)
    return metrics


class MetricSums:
    """Means weighted by valid positions; maxima where a name ends in `_max`."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}  # name: weighted sum, weight
        self._maxima: dict[str, float] = {}
        self._scalars: dict[str, tuple[str, list[float]]] = {}  # alike on every rank

    def add(self, metrics: Mapping[str, Tensor], weight: float) -> None:
        """Metrics of one micro-batch with `weight` valid positions; of 0, so that ranks agree on the names."""
        names = list(metrics)
        values = torch.stack([metrics[name].detach().double() for name in names]).tolist()
        for name, value in zip(names, values, strict=True):
            full = name if "/" in name else f"train/{'critic' if name in _CRITIC else 'actor'}/{name}"
            if name.endswith("_max"):
                if not weight:
                    continue
                self._maxima[full] = max(value, self._maxima.get(full, value))
            else:
                total, weights = self._means.get(full, (0.0, 0.0))
                self._means[full] = (total + (value * weight if weight else 0.0), weights + weight)

    def add_scalar(self, name: str, value: float, how: str = "mean") -> None:
        """A number that is the same on every rank; `how`: mean or sum over calls."""
        self._scalars.setdefault(name, (how, []))[1].append(value)

    def merge(self, other: MetricSums) -> None:
        for name, (total, weight) in other._means.items():
            own_total, own_weight = self._means.get(name, (0.0, 0.0))
            self._means[name] = (own_total + total, own_weight + weight)
        for name, value in other._maxima.items():
            self._maxima[name] = max(value, self._maxima.get(name, value))

    def result(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Means over all ranks' positions; maxima of this rank."""
        names = sorted(self._means)
        result: dict[str, float] = dict(self._maxima)
        if names:
            sums = sum_over_ranks(torch.tensor([self._means[name] for name in names], dtype=torch.float64))
            result |= {n: float(s / w) if w > 0 else 0.0 for n, (s, w) in zip(names, sums.tolist(), strict=True)}
        for name, (how, values) in self._scalars.items():
            result[name] = sum(values) / (1 if how == "sum" else len(values))
        return result
