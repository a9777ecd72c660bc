"""Corrections for actions of another policy than the one that trains. Pure functions, batch first [B, T].

Three policies: the behaviour b, which acted (an earlier version, or an engine with other numerics); the proximal p,
which the loss clips against (the policy before the step's updates); and the one in training. A correction turns the
weight w = exp(log p - log b) of each position into `LossInputs.weights`. Denominators of losses go on counting the
positions that it rejects, so that rejecting some does not make the step of the others longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_lite.algorithms.masked import k3, masked_mean
from rlinf_lite.algorithms.records import LOG_RATIO_LIMIT, InputError
from rlinf_lite.config.rules.correction import correction_problems
from rlinf_lite.config.schema import CorrectionConfig


@dataclass(frozen=True, eq=False)
class Correction:
    """`weights` are detached, 0 where masked or rejected; None: all are 1. `metrics` are detached scalars, as those of
    `LossOutputs`: means over the valid positions of this micro-batch, maxima where the name ends in `_max`."""

    weights: Tensor | None  # [B, T]
    metrics: dict[str, Tensor]


@torch.no_grad()
def correction(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, cfg: CorrectionConfig, measured: Tensor | None = None
) -> Correction:
    """Weights of the policy loss, from the log-probabilities of p and of b, all [B, T].

    - `none`: no weights; the metrics alone.
    - `decoupled`: w (Hilton et al. 2022, arXiv:2110.00641; AReaL, arXiv:2505.24298). Above `high`, if set, 0.
    - `tis`: min(w, high), truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework
      secretly brings you off-policy RL training"). At level `sequence` the w of a row, which is the product of those of
      its positions.
    - `icepop`: w within [low, high], else 0 (Ling Team 2025, arXiv:2510.18855).
    - `reject`: w where the metric of the position, or at level `sequence` that of the row, is within [low, high], else
      0: `ratio` w, `k1` log w, `k2` (log w)^2 / 2, `k3` w - log w - 1, and of a row their mean, exp(mean log w) for
      `ratio`.

    log w is clamped to +-20.

    Metrics, of whatever kind: `importance_weight_mean`, `_max` and `_mean_square` of w before bounds, `behaviour_k3`
    (mean of w - 1 - log w, an estimate of KL(b || p)), `rejected_fraction` (of the valid positions). The effective
    sample size (sum w)^2 / (n sum w^2) is no mean over micro-batches: `training.metrics` forms it from the first moment
    and the second, once these are those of all positions.

    `measured` [B, T]: what metrics are of, where not of the whole mask. Of positions where p is b by construction they
    would say that both agree.

    Raises InputError where bounds do not fit the kind.
    """
    for problem in correction_problems(cfg):
        raise InputError(str(problem))
    kind, bounds, valid = cfg.kind, cfg.with_bounds(), mask.bool()
    of_row = cfg.level == "sequence"
    log_weights = torch.where(valid, proximal.float() - behaviour.float(), 0.0)
    log_weights = log_weights.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    of_position = k3(log_weights)
    if kind == "tis" and of_row:
        total = log_weights.sum(dim=1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        log_weights = torch.where(valid, total, 0.0)
    weights = log_weights.exp()

    judged = {"ratio": log_weights, "k1": log_weights, "k2": 0.5 * log_weights.square(), "k3": of_position}[cfg.metric]
    if kind == "reject" and of_row:
        judged = masked_mean(judged, valid, dim=1).unsqueeze(1)  # [B, 1]
    if cfg.metric == "ratio":
        judged = judged.exp()
    kept = valid.clone()
    if kind != "tis":
        low, high = bounds.low, bounds.high
        kept &= judged >= low if low is not None else valid
        kept &= judged <= high if high is not None else valid
    of = valid if measured is None else valid & measured.bool()
    metrics = {
        "importance_weight_mean": masked_mean(weights, of),
        "importance_weight_mean_square": masked_mean(weights.square(), of),
        "importance_weight_max": torch.where(of, weights, 0.0).max(),
        "behaviour_k3": masked_mean(of_position, of),
        "rejected_fraction": masked_mean((~kept).float(), of),
    }
    if kind == "none":
        return Correction(None, metrics)
    if kind == "tis":
        weights = weights.clamp(max=bounds.high)
    return Correction(torch.where(kept, weights, 0.0), metrics)


@torch.no_grad()
def interpolated_proximal(logprobs: Tensor, behaviour: Tensor, acted_versions: Tensor, version: int) -> Tensor:
    """Log-probabilities of p without a forward pass of their own: between b and the policy in training, log-linear in
    their versions, b + alpha (theta - b) with alpha = (v - 1 - v_b) / (v - v_b) in [0, 1] (AReaL's approximation).

    `logprobs` [B, T] are those of the policy in training, of `version`; `acted_versions` are integers, [B, T] or
    [B, 1]. Where the policy that acted is at most one version old, p = b, which makes the loss plain PPO. Detached.
    Raises InputError where a version acted before it was there.
    """
    staleness = version - acted_versions
    if bool((staleness < 0).any()):
        newest = int(acted_versions.max())
        raise InputError(f"version {newest} acted, and the policy in training is of version {version}, an earlier one.")
    alpha = ((staleness - 1) / staleness.clamp(min=1)).clamp(0, 1)
    return behaviour.float() + alpha * (logprobs.float() - behaviour.float())
