"""Conversion between actions in the environment's units and the language model's 256 action tokens per dimension."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_lite.models.vla.config import VLAConfig

RANGES = ("min", "max", "q01", "q99")
"""Statistics that a policy may read; `norm_type` says which two."""


class StatisticsError(ValueError):
    """The policy's statistics cannot be used: wrong `unnorm_key`, missing entry or wrong length."""


class Normalizer:
    """Maps the statistics' range of `action` or `proprio` onto [-1, 1], in the dimensions that their mask marks."""

    def __init__(self, cfg: VLAConfig, name: str, num_dims: int) -> None:
        """Raises StatisticsError if the statistics do not fit."""
        low_name, high_name = ("q01", "q99") if cfg.norm_type == "bounds_q99" else ("min", "max")
        entry = dataset_statistics(cfg).get(name, {})
        missing = [key for key in (low_name, high_name) if key not in entry]
        if missing:
            raise StatisticsError(
                f"model.options.norm_type: {cfg.norm_type} needs {' and '.join(missing)} of {name}, and the statistics "
                f"have {', '.join(entry) or 'none'}"
            )
        low, high = np.array(entry[low_name], dtype=np.float64), np.array(entry[high_name], dtype=np.float64)
        if len(low) != num_dims:
            raise StatisticsError(f"the statistics describe {len(low)} {name} dimensions, the policy has {num_dims}")
        mask = np.array(entry.get("mask", [True] * num_dims))
        self._usual = np.where(mask, low, -np.inf), np.where(mask, high, np.inf)
        self.offset = _float32(np.where(mask, (high + low) / 2, 0.0))  # [num_dims]
        self.scale = _float32(np.where(mask, np.maximum((high - low) / 2, 1e-8), 1.0))  # [num_dims]

    def normalize(self, x: Tensor) -> Tensor:
        """`x` [..., num_dims] normalised and clipped to [-1, 1]."""
        return ((x - self.offset.to(x.device)) / self.scale.to(x.device)).clamp(-1.0, 1.0)

    def unnormalize(self, x: Tensor) -> Tensor:
        """The inverse of `normalize`, for `x` [..., num_dims]."""
        return self.offset.to(x.device) + self.scale.to(x.device) * x

    def usual_range(self) -> tuple[list[float], list[float]]:
        """Low and high by dimension; infinite where nothing is normalised."""
        low, high = self._usual
        return low.tolist(), high.tolist()


class ActionCodec:
    """Converts actions to bins, 256 over [-1, 1] per dimension, and back.

    Bin r is the token `first_action_id + r`. Values of bins descend: the last is nearest to -1. The 256 edges have only
    255 centres between them, so bins 0 and 1 both have the largest value.
    """

    def __init__(self, cfg: VLAConfig) -> None:
        """Raises StatisticsError if the statistics do not fit."""
        self.num_bins = cfg.n_action_bins
        self.normalizer = Normalizer(cfg, "action", cfg.action_dim)
        edges = np.linspace(-1, 1, self.num_bins)
        centres = (edges[:-1] + edges[1:]) / 2
        self._edges = torch.from_numpy(edges)
        self.values = _float32(np.concatenate([centres[-1:], centres[::-1]]))  # [num_bins], by bin

    def decode(self, bins: Tensor) -> Tensor:
        """Actions float32 [..., D] of bins [..., D], on the CPU, in the environment's units."""
        return self.normalizer.unnormalize(self.values[bins.cpu()])

    def encode(self, actions: Tensor) -> Tensor:
        """The bins of actions [..., D] in the environment's units."""
        normalized = self.normalizer.normalize(actions).double()
        return self.num_bins - torch.bucketize(normalized, self._edges.to(actions.device), right=True)

    def soft_labels(self, actions: Tensor, sigma: float) -> Tensor:
        """Distributions over bins [..., D, num_bins]: Gaussians around actions [..., D]; `sigma`, their standard
        deviation, is in normalised units."""
        distance = (self.normalizer.normalize(actions)[..., None] - self.values.to(actions.device)) / sigma
        return torch.softmax(-0.5 * distance.square(), dim=-1)


def _float32(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.astype(np.float32))


def dataset_statistics(cfg: VLAConfig) -> dict[str, Any]:
    """The entry of `norm_stats` that `unnorm_key` names. Raises StatisticsError, which lists the known keys."""
    known = ", ".join(cfg.norm_stats)
    if cfg.unnorm_key is None:
        if len(cfg.norm_stats) == 1:
            return next(iter(cfg.norm_stats.values()))
        raise StatisticsError(
            f"model.options.unnorm_key: is null, and the checkpoint has statistics of {known or 'nothing'}"
        )
    if cfg.unnorm_key not in cfg.norm_stats:
        raise StatisticsError(
            f"model.options.unnorm_key: the checkpoint has no {cfg.unnorm_key!r}. It has {known or 'none'}"
        )
    return cfg.norm_stats[cfg.unnorm_key]
