"""Statistics over the valid positions of a batch, on one rank or over all. A mask counts where it is not zero.

Sums run in float64, so that the order of rows and the number of ranks do not show in the results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_lite.algorithms.records import AllReduce, InputError

WHITEN_EPS = 1e-8


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over valid positions, of everything or along `dim`; 0 where none is valid. Differentiable."""
    valid = mask.bool()
    kept = torch.where(valid, values, 0.0)
    if dim is None:
        return kept.sum() / valid.sum().clamp(min=1)
    return kept.sum(dim) / valid.sum(dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True, all_reduce: AllReduce | None = None) -> Tensor:
    """Variance over valid positions: a float64 scalar. Raises InputError where there are too few of them."""
    return masked_moments(values, mask, unbiased, all_reduce)[1]


def masked_moments(
    values: Tensor, mask: Tensor, unbiased: bool = True, all_reduce: AllReduce | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and variance over the valid positions of all ranks, as float64 scalars.

    Two passes, so that a large mean does not swallow a small variance. Raises InputError for fewer than two
    valid positions (one, where not `unbiased`).
    """
    count, mean, squares = _sums(values, mask, all_reduce)
    needed = 2 if unbiased else 1
    if count < needed:
        raise InputError(f"a variance over {int(count)} valid positions; at least {needed} are needed.")
    return mean, squares / (count - 1 if unbiased else count)


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True, all_reduce: AllReduce | None = None) -> Tensor:
    """`values` scaled to variance 1 (unbiased, + 1e-8) over the valid positions of all ranks; mean 0 with `shift_mean`.

    Same shape and dtype as `values`; 0 where the mask is. A single position has no scale, and is its own mean.
    """
    count, mean, squares = _sums(values, mask, all_reduce)
    whitened = (values.double() - mean) * torch.rsqrt(squares / (count - 1).clamp(min=1) + WHITEN_EPS)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask.bool(), whitened, 0.0).to(values.dtype)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, all_reduce: AllReduce | None = None) -> float:
    """1 - Var(returns - values) / Var(returns) over the valid positions of all ranks; nan for constant returns."""
    _, _, total = _sums(returns, mask, all_reduce)
    _, _, residual = _sums(returns - values, mask, all_reduce)
    return float(1 - residual / total) if total > 0 else float("nan")


def _sums(values: Tensor, mask: Tensor, all_reduce: AllReduce | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of the valid positions of all ranks: how many, their mean, the sum of the squared distances from it."""
    valid = mask.bool()
    kept = values.detach().double()
    count, total = _sum_over_ranks(torch.stack([valid.sum().double(), _sum_where(valid, kept)]), all_reduce)
    mean = total / count
    squares = _sum_over_ranks(_sum_where(valid, (kept - mean).square()).reshape(1), all_reduce)[0]
    return count, mean, squares


def _sum_where(valid: Tensor, values: Tensor) -> Tensor:
    return torch.where(valid, values, 0.0).sum()  # not values * mask: 0 * nan is nan


def _sum_over_ranks(values: Tensor, all_reduce: AllReduce | None) -> Tensor:
    return values if all_reduce is None else all_reduce(values)
