"""Training metrics over micro-batches, updates and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from rlinf_lite.algorithms import explained_variance

_MEAN = "train/actor/importance_weight_mean"
_SQUARE = f"{_MEAN}_square"  # for the effective sample size; not logged
_CRITIC = ("value_loss", "value_clip_fraction", "values_mean")


def advantage_metrics(advantages: Tensor, returns: Tensor, mask: Tensor, values: Tensor | None) -> dict[str, float]:
    """Mean, maximum and minimum of advantages and returns over valid positions, and the values' explained variance."""
    metrics: dict[str, float] = {}
    for name, valid in (("advantages", advantages[mask]), ("returns", returns[mask])):
        metrics[f"rollout/{name}_mean"] = float(valid.mean())
        metrics[f"rollout/{name}_max"] = float(valid.max())
        metrics[f"rollout/{name}_min"] = float(valid.min())
    if values is not None and int(mask.sum()) > 1:
        metrics["train/critic/explained_variance"] = explained_variance(values, returns, mask)
    return metrics


class MetricSums:
    """Means weighted by valid positions; for names that end in `_max`, maxima."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}  # name: weighted sum, weight
        self._maxima: dict[str, float] = {}
        self._scalars: dict[str, tuple[str, list[float]]] = {}  # the same on every rank

    def add(self, metrics: Mapping[str, Tensor], weight: float) -> None:
        """Add the metrics of one micro-batch with `weight` valid positions. Call it for 0 too, as all ranks need the
        same names."""
        names = list(metrics)
        values = torch.stack([metrics[name].detach().double() for name in names]).tolist()
        for name, value in zip(names, values, strict=True):
            full = name if "/" in name else f"train/{'critic' if name in _CRITIC else 'actor'}/{name}"
            if name.endswith("_max"):
                self._maxima[full] = max(value if weight else -math.inf, self._maxima.get(full, -math.inf))
            else:
                total, weights = self._means.get(full, (0.0, 0.0))
                self._means[full] = (total + (value * weight if weight else 0.0), weights + weight)

    def add_scalar(self, name: str, value: float, how: str = "mean") -> None:
        """Add a number that is the same on every rank. `how`: mean or sum over calls."""
        self._scalars.setdefault(name, (how, []))[1].append(value)

    def merge(self, other: MetricSums) -> None:
        for name, (total, weight) in other._means.items():
            own_total, own_weight = self._means.get(name, (0.0, 0.0))
            self._means[name] = (own_total + total, own_weight + weight)
        for name, value in other._maxima.items():
            self._maxima[name] = max(value, self._maxima.get(name, -math.inf))

    def result(self, over_ranks: Callable[..., Tensor]) -> dict[str, float]:
        """Means and maxima over all ranks' positions, and the effective sample size; metrics without positions are left
        out. `over_ranks(tensor, op)` reduces a tensor over ranks; without `op` it sums."""
        names, maxima = sorted(self._means), sorted(self._maxima)
        result: dict[str, float] = {}
        if maxima:
            found = over_ranks(torch.tensor([self._maxima[name] for name in maxima], dtype=torch.float64), ReduceOp.MAX)
            result |= {name: x for name, x in zip(maxima, found.tolist(), strict=True) if x > -math.inf}
        if names:
            sums = over_ranks(torch.tensor([self._means[name] for name in names], dtype=torch.float64))
            result |= {name: s / w for name, (s, w) in zip(names, sums.tolist(), strict=True) if w > 0}
        if _SQUARE in result:  # (sum w)^2 / (n sum w^2)
            square = result.pop(_SQUARE)
            result["train/actor/effective_sample_size"] = result[_MEAN] ** 2 / square if square > 0 else 0.0
        for name, (how, values) in self._scalars.items():
            result[name] = sum(values) / (1 if how == "sum" else len(values))
        return result
