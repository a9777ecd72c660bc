"""KL to a reference policy as a part of the rewards, and the controllers of its coefficient."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_lite.algorithms.losses import kl_penalty
from rlinf_lite.algorithms.masked import masked_mean
from rlinf_lite.algorithms.records import InputError

MAX_RELATIVE_ERROR = 0.2  # Ziegler et al. clip the proportional error to +- this


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to do. Both controllers have the same methods."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to do: the coefficient comes from the config, also after a resume."""


class AdaptiveKLController:
    """A coefficient that steers the KL towards `target` (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n_steps / horizon. Raises InputError for a target or a horizon that
    is not positive.
    """

    def __init__(self, init_coef: float, target: float, horizon: float) -> None:
        if not (target > 0 and horizon > 0):
            raise InputError(f"adaptive KL with target={target} and horizon={horizon}: both must be above 0.")
        self.coef, self.target, self.horizon = init_coef, target, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the coefficient after a batch of `n_steps` samples with a mean KL of `current_kl`."""
        error = min(max(current_kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.coef *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


@torch.no_grad()
def kl_in_rewards(
    rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float, kind: str
) -> tuple[Tensor, Tensor]:
    """Rewards minus coef * KL at each valid position, [B, T], and the mean KL, for the controller.

    `kind` is that of `kl_penalty`. The mean KL is the mean of the rows' means over their valid positions; rows without
    any do not count. Raises UnknownAlgorithmError.
    """
    valid = mask.bool()
    kl = torch.where(valid, kl_penalty(logprobs.float(), ref_logprobs.float(), kind), 0.0)
    mean_kl = masked_mean(masked_mean(kl, valid, dim=1), valid.any(dim=1))
    return rewards - coef * kl, mean_kl
