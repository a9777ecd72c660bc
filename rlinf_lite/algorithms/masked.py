"""Statistics over the valid positions of a batch, and of log-ratios. A mask counts where it is not zero.

Sums run in float64, so that the order of rows does not show in the results.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over valid positions, of everything or along `dim`; 0 where none is valid. Differentiable."""
    valid = mask.bool()
    kept = torch.where(valid, values, 0.0)
    if dim is None:
        return kept.sum() / valid.sum().clamp(min=1)
    return kept.sum(dim) / valid.sum(dim).clamp(min=1)


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x of each position, never negative: in float64, as float32 would give +-6e-8 for a small x."""
    x = log_ratio.double()
    return (torch.expm1(x) - x).to(log_ratio.dtype)


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """`values` scaled to variance 1 (unbiased, + 1e-8) over its valid positions; mean 0 with `shift_mean`.

    Same shape and dtype as `values`; 0 where the mask is. A single position has no scale, and is its own mean.
    """
    count, mean, squares = _sums(values, mask)
    whitened = (values.double() - mean) * torch.rsqrt(squares / (count - 1).clamp(min=1) + WHITEN_EPS)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask.bool(), whitened, 0.0).to(values.dtype)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the valid positions; nan for returns that are constant, or differ
    by what float32 rounds."""
    _, _, total = _sums(returns, mask)
    rounding = torch.where(mask.bool(), returns.double().square() + values.double().square(), 0.0).sum() * 1e-12
    _, _, residual = _sums(returns - values, mask)
    return float(1 - residual / total) if total > rounding else float("nan")


def _sums(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the valid positions: how many, their mean, the sum of the squared distances from it.

    Two passes, so that a large mean does not swallow a small variance.
    """
    valid = mask.bool()
    kept = values.detach().double()
    count = valid.sum().double()
    mean = torch.where(valid, kept, 0.0).sum() / count  # not values * mask: 0 * nan is nan
    return count, mean, torch.where(valid, (kept - mean).square(), 0.0).sum()
