"""Action heads: distributions over action chunks."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_lite.models.sampling import normal_noise, uniform_noise


class Gaussian(nn.Module):
    """Diagonal Gaussian over normalised actions; its log standard deviations are parameters, the same in every state.

    Temperature scales the standard deviation, both for sampling and for scoring.
    """

    def __init__(self, num_action_chunks: int, action_dim: int, log_std_init: float, temperature: float = 1.0) -> None:
        super().__init__()
        self.shape = (num_action_chunks, action_dim)
        self.log_temperature = math.log(temperature)
        self.log_std = nn.Parameter(torch.full(self.shape, log_std_init))

    def _scaled_log_std(self) -> Tensor:
        return self.log_std.float() + self.log_temperature

    def sample(self, mean: Tensor, noise_keys: np.ndarray) -> Tensor:
        """Actions [B, C, D] around `mean` [B, C, D] with each row's own noise."""
        noise = normal_noise(noise_keys, self.shape[0] * self.shape[1]).reshape(-1, *self.shape)
        return mean + self._scaled_log_std().exp() * torch.from_numpy(noise).to(mean.device)

    def logprobs(self, mean: Tensor, actions: Tensor) -> Tensor:
        """Per-element log density, [B, C, D]."""
        log_std = self._scaled_log_std()
        return -0.5 * ((actions - mean) * torch.exp(-log_std)).square() - log_std - 0.5 * math.log(2 * math.pi)

    def entropy(self, mean: Tensor) -> Tensor:
        """Per-element differential entropy, [B, C, D]."""
        return self._scaled_log_std() + 0.5 * math.log(2 * math.pi * math.e) + torch.zeros_like(mean)


class CategoricalTokens:
    """One categorical distribution per action token, over the logits [..., K] of the bins.

    Temperature divides the logits, both for sampling and for scoring.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature

    def noise(self, noise_keys: np.ndarray, num_tokens: int, device: torch.device) -> Tensor:
        """The `uniform` of `sample`, from each row's own key: float32 [B, num_tokens]."""
        return torch.from_numpy(uniform_noise(noise_keys, num_tokens)).float().to(device)

    def sample(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Bins int64 [...] where the cumulative distribution reaches `uniform` [...], numbers in (0, 1)."""
        cumulative = torch.softmax(self._tempered(logits), dim=-1).cumsum(-1)
        bins = (cumulative < uniform[..., None] * cumulative[..., -1:]).sum(-1)  # the sum may not be exactly 1
        return bins.clamp(max=logits.shape[-1] - 1)

    def logprobs(self, logits: Tensor, bins: Tensor) -> Tensor:
        """Log-probability of `bins` [...]."""
        logits = self._tempered(logits)
        return logits.gather(-1, bins[..., None]).squeeze(-1) - logits.logsumexp(-1)

    def entropy(self, logits: Tensor) -> Tensor:
        """Entropies [...] of the distributions."""
        log_distribution = torch.log_softmax(self._tempered(logits), dim=-1)
        return -(log_distribution.exp() * log_distribution).sum(-1)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropies [...] against `labels` [..., K], distributions over the bins."""
        return -(labels * torch.log_softmax(self._tempered(logits), dim=-1)).sum(-1)

    def _tempered(self, logits: Tensor) -> Tensor:
        return logits.float() / self.temperature
