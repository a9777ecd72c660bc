"""Corrections for actions that another policy took than the one that trains. Pure functions, batch first [B, T].

Three policies: the behaviour policy b, which acted (an earlier version, or an engine with other numerics); the proximal
policy p, against which the loss clips (the policy before the step's updates); and the policy in training. A correction
turns the weight w = exp(log p - log b) of each position into `LossInputs.weights`. Denominators of losses still count
the positions that it rejects, so that rejecting some does not enlarge the step of the others.
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
    """Weights of the policy loss, and metrics.

    `weights` are detached, and 0 where masked or rejected; None: all are 1. `metrics` are detached scalars, as in
    `LossOutputs`: means over the valid positions of this micro-batch, or maxima if the name ends in `_max`.
    """

    weights: Tensor | None  # [B, T]
    metrics: dict[str, Tensor]


@torch.no_grad()
def correction(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, cfg: CorrectionConfig, measured: Tensor | None = None
) -> Correction:
    """Weights of the policy loss, from the log-probabilities of p (`proximal`) and b (`behaviour`), all [B, T].

    - `none`: no weights, only the metrics.
    - `decoupled`: w (Hilton et al. 2022, arXiv:2110.00641; AReaL, arXiv:2505.24298); 0 above `high`, if that is set.
    - `tis`: min(w, high), truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework
      secretly brings you off-policy RL training"). At level `sequence`, w is the product over the row's positions.
    - `icepop`: w if it is within [low, high], else 0 (Ling Team 2025, arXiv:2510.18855).
    - `reject`: w if a metric is within [low, high], else 0. The metric of a position is w (`ratio`), log w (`k1`),
      (log w)^2 / 2 (`k2`) or w - log w - 1 (`k3`). At level `sequence` it is the mean over the row's positions, for
      `ratio` exp(mean log w).

    log w is clamped to +-20.

    Metrics of every kind: `importance_weight_mean`, `_max` and `_mean_square` of w before bounds, `behaviour_k3` (mean
    of w - 1 - log w, an estimate of KL(b || p)), `rejected_fraction` (of the valid positions). The effective sample
    size (sum w)^2 / (n sum w^2) is not a mean over micro-batches; `training.metrics` computes it from the first and the
    second moment over all positions.

    `measured` [B, T]: positions that the metrics cover, if not all valid ones. It leaves out positions where p equals b
    by construction, which would make both seem to agree.

    Raises InputError where bounds do not fit the kind.
    """
    for problem in correction_problems(cfg):
        raise InputError(str(problem))
    kind, bounds, valid = cfg.kind, cfg.with_bounds(), mask.bool()
    per_row = cfg.level == "sequence"
    log_weights = torch.where(valid, proximal.float() - behaviour.float(), 0.0)
    log_weights = log_weights.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3_of_positions = k3(log_weights)
    if kind == "tis" and per_row:
        total = log_weights.sum(dim=1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        log_weights = torch.where(valid, total, 0.0)
    weights = log_weights.exp()

    metric = {
        "ratio": log_weights,
        "k1": log_weights,
        "k2": 0.5 * log_weights.square(),
        "k3": k3_of_positions,
    }[cfg.metric]
    if kind == "reject" and per_row:
        metric = masked_mean(metric, valid, dim=1).unsqueeze(1)  # [B, 1]
    if cfg.metric == "ratio":
        metric = metric.exp()
    kept = valid.clone()
    if kind != "tis":
        low, high = bounds.low, bounds.high
        kept &= metric >= low if low is not None else valid
        kept &= metric <= high if high is not None else valid
    covered = valid if measured is None else valid & measured.bool()
    metrics = {
        "importance_weight_mean": masked_mean(weights, covered),
        "importance_weight_mean_square": masked_mean(weights.square(), covered),
        "importance_weight_max": torch.where(covered, weights, 0.0).max(),
        "behaviour_k3": masked_mean(k3_of_positions, covered),
        "rejected_fraction": masked_mean((~kept).float(), covered),
    }
    if kind == "none":
        return Correction(None, metrics)
    if kind == "tis":
        weights = weights.clamp(max=bounds.high)
    return Correction(torch.where(kept, weights, 0.0), metrics)


@torch.no_grad()
def interpolated_proximal(logprobs: Tensor, behaviour: Tensor, acted_versions: Tensor, version: int) -> Tensor:
    """Log-probabilities of p, interpolated instead of computed by a forward pass (AReaL's approximation).

    log p = log b + alpha (log theta - log b) with alpha = (v - 1 - v_b) / (v - v_b) in [0, 1], where theta is the
    policy in training, v its version and v_b the version that acted.

    `logprobs` [B, T] are those of the policy in training, whose version is `version`; `acted_versions` are integers,
    [B, T] or [B, 1]. If the policy that acted is at most one version old, p = b, which makes the loss plain PPO. The
    result is detached. Raises InputError if a version that acted is newer than `version`.
    """
    staleness = version - acted_versions
    if bool((staleness < 0).any()):
        newest = int(acted_versions.max())
        raise InputError(f"version {newest} acted, but the policy in training has the older version {version}.")
    alpha = ((staleness - 1) / staleness.clamp(min=1)).clamp(0, 1)
    return behaviour.float() + alpha * (logprobs.float() - behaviour.float())
