"""KL to a reference policy as a part of the rewards, and what chooses its coefficient."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_lite.algorithms.losses import kl_penalty
from rlinf_lite.algorithms.masked import masked_mean
from rlinf_lite.algorithms.records import InputError

MAX_RELATIVE_ERROR = 0.2  # Ziegler et al. clip the proportional error to +- this


class FixedKLController:
    """A coefficient that stays as it is."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to do; here so that both controllers are used alike."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A fixed coefficient is the config's, also after a resume."""


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
        """After a batch of `n_steps` samples, whose mean KL was `current_kl`."""
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
    """`rewards` - coef * KL per position, [B, T], unchanged where masked; and the mean KL, for the controller.

    `kind` is that of `kl_penalty`. The mean is over rows with a valid position, of each row's mean over those. Raises
    UnknownAlgorithmError.
    """
    valid = mask.bool()
    kl = torch.where(valid, kl_penalty(logprobs.float(), ref_logprobs.float(), kind), 0.0)
    mean_kl = masked_mean(masked_mean(kl, valid, dim=1), valid.any(dim=1))
    return rewards - coef * kl, mean_kl
