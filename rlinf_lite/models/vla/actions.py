"""Between actions in the environment's units and the 256 tokens per dimension that the language model speaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_lite.models.vla.config import VLAConfig

RANGES = ("min", "max", "q01", "q99")
"""Statistics that are read, two of them by `norm_type`."""


class StatisticsError(ValueError):
    """The policy's normalisation statistics do not serve: a wrong `unnorm_key`, a missing entry, a wrong length."""


class Normalizer:
    """Maps the range that the statistics of `action` or `proprio` name onto [-1, 1], where their mask says so."""

    def __init__(self, cfg: VLAConfig, name: str, num_dims: int) -> None:
        """Raises StatisticsError where the statistics do not fit."""
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
        """`x` [..., num_dims], clipped to [-1, 1]."""
        return ((x - self.offset.to(x.device)) / self.scale.to(x.device)).clamp(-1.0, 1.0)

    def unnormalize(self, x: Tensor) -> Tensor:
        """The inverse of `normalize`, of [..., num_dims]."""
        return self.offset.to(x.device) + self.scale.to(x.device) * x

    def usual_range(self) -> tuple[list[float], list[float]]:
        """Low and high by dimension; infinite where nothing is normalised."""
        low, high = self._usual
        return low.tolist(), high.tolist()


class ActionCodec:
    """256 bins over [-1, 1] per dimension, and the statistics' map to the environment's units.

    Bin r is the token `first_action_id + r`, and bins descend in value: the last is nearest to -1. The 256 edges have
    only 255 centres between them, so bins 0 and 1 share the largest.
    """

    def __init__(self, cfg: VLAConfig) -> None:
        """Raises StatisticsError where the statistics do not fit."""
        self.num_bins = cfg.n_action_bins
        self.normalizer = Normalizer(cfg, "action", cfg.action_dim)
        edges = np.linspace(-1, 1, self.num_bins)
        centres = (edges[:-1] + edges[1:]) / 2
        self._edges = torch.from_numpy(edges)
        self.values = _float32(np.concatenate([centres[-1:], centres[::-1]]))  # [num_bins], by bin

    def decode(self, bins: Tensor) -> Tensor:
        """Actions float32 [..., D], on the CPU and in the environment's units, of bins [..., D]."""
        return self.normalizer.unnormalize(self.values[bins.cpu()])

    def encode(self, actions: Tensor) -> Tensor:
        """The bins that hold actions [..., D], given in the environment's units."""
        normalized = self.normalizer.normalize(actions).double()
        return self.num_bins - torch.bucketize(normalized, self._edges.to(actions.device), right=True)

    def soft_labels(self, actions: Tensor, sigma: float) -> Tensor:
        """Gaussians around actions [..., D], `sigma` wide in normalised units, as distributions [..., D, num_bins]."""
        distance = (self.normalizer.normalize(actions)[..., None] - self.values.to(actions.device)) / sigma
        return torch.softmax(-0.5 * distance.square(), dim=-1)


def _float32(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.astype(np.float32))


def dataset_statistics(cfg: VLAConfig) -> dict[str, Any]:
    """The entry of `norm_stats` that `unnorm_key` names. Raises StatisticsError, listing the keys there are."""
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
