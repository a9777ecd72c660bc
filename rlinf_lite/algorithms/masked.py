"""Statistics over the valid positions of a batch, which are those where its mask is not zero, and `k3` of log-ratios.

Whitening and explained variance sum in float64, so that results do not depend on the order of rows.
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
    """exp(x) - 1 - x of each position. Computed in float64, so that it is never negative: float32 would give +-6e-8 for
    a small x."""
    x = log_ratio.double()
    return (torch.expm1(x) - x).to(log_ratio.dtype)


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """`values` scaled to variance 1 (unbiased, + 1e-8) over the valid positions; with mean 0 if `shift_mean`.

    Same shape and dtype as `values`; 0 where the mask is 0. A single valid position becomes 0, or stays as it is
    without `shift_mean`.
    """
    count, mean, squares = _sums(values, mask)
    whitened = (values.double() - mean) * torch.rsqrt(squares / (count - 1).clamp(min=1) + WHITEN_EPS)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask.bool(), whitened, 0.0).to(values.dtype)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the valid positions; nan for returns that are constant up to the
    rounding of float32."""
    _, _, total = _sums(returns, mask)
    rounding = torch.where(mask.bool(), returns.double().square() + values.double().square(), 0.0).sum() * 1e-12
    _, _, residual = _sums(returns - values, mask)
    return float(1 - residual / total) if total > rounding else float("nan")


def _sums(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count and mean of the valid positions, and the sum of their squared distances from the mean.

    Two passes, so that a large mean does not hide a small variance.
    """
    valid = mask.bool()
    kept = values.detach().double()
    count = valid.sum().double()
    mean = torch.where(valid, kept, 0.0).sum() / count  # not values * mask: 0 * nan is nan
    return count, mean, torch.where(valid, (kept - mean).square(), 0.0).sum()
