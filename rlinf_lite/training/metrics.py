"""Training metrics over micro-batches, updates and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import islice

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
    """Means weighted by valid positions; for names that end in `_max`, maxima.

    What is added stays on its device until results are read, so that no micro-batch waits for the one before.
    """

    def __init__(self) -> None:
        self._added: list[tuple[list[str], Tensor]] = []  # names, and their values with the weight behind them
        self._scalars: dict[str, tuple[str, list[float]]] = {}  # the same on every rank

    def add(self, metrics: Mapping[str, Tensor], weight: float | Tensor) -> None:
        """Add the metrics of one micro-batch with `weight` valid positions. Call it for 0 too, as all ranks need the
        same names."""
        values = [x.detach().double() for x in metrics.values()]
        if values:
            values.append(weight.to(values[0]) if isinstance(weight, Tensor) else values[0].new_full((), weight))
            self._added.append((list(metrics), torch.stack(values)))

    def add_scalar(self, name: str, value: float, how: str = "mean") -> None:
        """Add a number that is the same on every rank. `how`: mean or sum over calls."""
        self._scalars.setdefault(name, (how, []))[1].append(value)

    def merge(self, other: MetricSums) -> None:
        self._added += other._added

    def _summed(self) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Sums and weights by name, and maxima by name."""
        means: dict[str, tuple[float, float]] = {}
        maxima: dict[str, float] = {}
        columns = [x.to(self._added[-1][1].device) for _, x in self._added]  # read together
        numbers = iter(torch.cat(columns).tolist() if columns else [])
        for names, _ in self._added:
            *values, weight = islice(numbers, len(names) + 1)
            for name, value in zip(names, values, strict=True):
                full = name if "/" in name else f"train/{'critic' if name in _CRITIC else 'actor'}/{name}"
                if name.endswith("_max"):
                    maxima[full] = max(value if weight else -math.inf, maxima.get(full, -math.inf))
                else:
                    total, weights = means.get(full, (0.0, 0.0))
                    means[full] = (total + (value * weight if weight else 0.0), weights + weight)
        return means, maxima

    def result(self, over_ranks: Callable[..., Tensor]) -> dict[str, float]:
        """Means and maxima over all ranks' positions, and the effective sample size; metrics without positions are left
        out. `over_ranks(tensor, op)` reduces a tensor over ranks; without `op` it sums."""
        of_names, of_maxima = self._summed()
        names, maxima = sorted(of_names), sorted(of_maxima)
        result: dict[str, float] = {}
        if maxima:
            found = over_ranks(torch.tensor([of_maxima[name] for name in maxima], dtype=torch.float64), ReduceOp.MAX)
            result |= {name: x for name, x in zip(maxima, found.tolist(), strict=True) if x > -math.inf}
        if names:
            sums = over_ranks(torch.tensor([of_names[name] for name in names], dtype=torch.float64))
            result |= {name: s / w for name, (s, w) in zip(names, sums.tolist(), strict=True) if w > 0}
        if _SQUARE in result:  # (sum w)^2 / (n sum w^2)
            square = result.pop(_SQUARE)
            result["train/actor/effective_sample_size"] = result[_MEAN] ** 2 / square if square > 0 else 0.0
        for name, (how, values) in self._scalars.items():
            result[name] = sum(values) / (1 if how == "sum" else len(values))
        return result
