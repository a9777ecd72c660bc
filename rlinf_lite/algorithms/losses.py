"""Losses: functions from log-probabilities, advantages and values to one scalar and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from rlinf_lite.algorithms.masked import k3, masked_mean
from rlinf_lite.algorithms.records import LOG_RATIO_LIMIT, InputError, LossInputs, LossOutputs, require
from rlinf_lite.cards import LossNeeds
from rlinf_lite.config.schema import AlgorithmConfig, BaseAlgorithmConfig
from rlinf_lite.registry import LOSSES, UnknownAlgorithmError, did_you_mean

PolicyLossFn = Callable[[LossInputs, BaseAlgorithmConfig], LossOutputs]
AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]

KL_LIMIT = 10.0
SEQUENCE_LOG_RATIO_LIMIT = 10.0  # of gspo, as in verl


def register_policy_loss(
    name: str,
    probabilities: bool = False,
    behaviour: bool = False,
    clips_below: bool = False,
    unread: tuple[str, ...] = (),
    teacher: bool = False,
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator that makes a policy loss available as `algorithm.loss_type: <name>`, and records what it needs.

    `probabilities`: probabilities of tokens, not densities of continuous actions. `behaviour`: the log-probabilities of
    the policy that acted, for its own correction. `clips_below`: an `algorithm.clip_ratio_low` of less than 1.
    `unread`: keys of `algorithm` that have no effect on it. `teacher`: the log-probabilities of a teacher.
    """
    return LOSSES.register(name, LossNeeds(probabilities, behaviour, clips_below, unread, teacher))


def policy_loss(name: str, inputs: LossInputs, cfg: BaseAlgorithmConfig) -> LossOutputs:
    """Run the policy loss registered as `name`: no entropy bonus and no value loss. Raises UnknownAlgorithmError."""
    loss: PolicyLossFn = LOSSES.get(name)
    return loss(inputs, cfg)


def actor_critic_loss(name: str, inputs: LossInputs, cfg: AlgorithmConfig) -> LossOutputs:
    """policy_loss + value_coef * value_loss - entropy_coef * entropy; parts without tensors in `inputs` are left out.

    Metrics are those of the parts, and `entropy`, the mean over valid positions.
    """
    outputs = actor_loss(name, inputs, cfg)
    if inputs.values is None:
        return outputs
    value_outputs = value_loss(inputs, cfg)
    return LossOutputs(outputs.loss + cfg.value_coef * value_outputs.loss, outputs.metrics | value_outputs.metrics)


def actor_loss(name: str, inputs: LossInputs, cfg: BaseAlgorithmConfig) -> LossOutputs:
    """policy_loss - entropy_coef * entropy, the latter where `inputs` has it; for actors whose critic is elsewhere."""
    outputs = policy_loss(name, inputs, cfg)
    loss, metrics = outputs.loss, dict(outputs.metrics)
    if inputs.entropy is not None:
        if cfg.entropy_coef != 0:
            loss = loss - cfg.entropy_coef * _aggregate(inputs.entropy, inputs, cfg)
        metrics["entropy"] = masked_mean(inputs.entropy.detach(), inputs.mask)
    return LossOutputs(loss, metrics)


def ppo(inputs: LossInputs, cfg: BaseAlgorithmConfig) -> LossOutputs:
    """Clipped policy loss (Schulman et al. 2017, arXiv:1707.06347), clip range [1 - low, 1 + high].

    Per position max(-A r, -A clip(r)); with `clip_ratio_c` at most -A c where A < 0 (dual clip, Ye et al. 2020,
    arXiv:1912.09729). The log-ratio is clamped to +-20. Masked positions enter neither the loss nor its gradient.

    Metrics: `policy_loss`, `approx_kl` (mean of old - new log-probability: may be negative), `approx_kl_k3` (mean of
    r - 1 - log r: never negative), `clip_fraction`, `clip_fraction_lower` (dual clip), `ratio_mean`, `ratio_max`.
    """
    if cfg.clip_ratio_c is not None and cfg.clip_ratio_c <= 1:
        raise ValueError(f"algorithm.clip_ratio_c: the dual clip must be above 1 ({cfg.clip_ratio_c}). 3.0 is usual.")
    log_ratio, advantages = _log_ratio(inputs), _valid(inputs.advantages, inputs.mask)
    ratio = log_ratio.exp()
    losses, clipped = _clipped(ratio, advantages, cfg)
    beyond_bound = torch.zeros_like(clipped)
    if cfg.clip_ratio_c is not None:
        bound = -advantages * cfg.clip_ratio_c
        beyond_bound = (advantages < 0) & (losses > bound)
        losses = torch.where(advantages < 0, torch.minimum(losses, bound), losses)
    outputs = _policy_outputs(losses, log_ratio, ratio, clipped, inputs, cfg)
    outputs.metrics["clip_fraction_lower"] = masked_mean(beyond_bound.float(), inputs.mask)
    return outputs


def gspo(inputs: LossInputs, cfg: BaseAlgorithmConfig) -> LossOutputs:
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071), its token form (GSPO-token).

    One ratio per row, s = exp(mean over valid positions of the log-ratio), and per position max(-A s', -A clip(s'))
    with s' = stop_gradient(s) * p / stop_gradient(p), so that each position has its own advantage and gradient. The
    paper aggregates by `seq-mean-token-mean` and clips much closer than PPO: low 3e-4, high 4e-4. log s is at most 10.

    Metrics as in `ppo`, without the dual clip's; ratios are those of rows, `approx_kl` those of positions.
    """
    log_ratio, advantages = _log_ratio(inputs), _valid(inputs.advantages, inputs.mask)
    row_log_ratio = masked_mean(log_ratio.detach(), inputs.mask, dim=1).unsqueeze(1)  # [B, 1]
    logprobs = _valid(inputs.logprobs, inputs.mask)
    ratio = (row_log_ratio + (logprobs - logprobs.detach())).clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()
    losses, clipped = _clipped(ratio, advantages, cfg)
    return _policy_outputs(losses, log_ratio, ratio, clipped, inputs, cfg)


def cispo(inputs: LossInputs, cfg: BaseAlgorithmConfig) -> LossOutputs:
    """Clipped importance-sampling weights (MiniMax 2025, arXiv:2506.13585): -stop_gradient(clip(r)) * A * log p.

    The weight of a position is clipped to [1 - low, 1 + high], its gradient never: no position drops out. The paper
    clips above only, which is `clip_ratio_low: 1`. Metrics as in `ppo`, without the dual clip's.
    """
    log_ratio, advantages = _log_ratio(inputs), _valid(inputs.advantages, inputs.mask)
    ratio = log_ratio.detach().exp()
    kept = ratio.clamp(1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high)
    losses = -kept * advantages * _valid(inputs.logprobs, inputs.mask)
    return _policy_outputs(losses, log_ratio, ratio, kept != ratio, inputs, cfg)


def dppo_tv(inputs: LossInputs, cfg: BaseAlgorithmConfig) -> LossOutputs:
    """DPPO with a binary total variation (arXiv:2602.04879), regularised by a squared log-ratio (arXiv:2602.02276), as
    prime-rl has it. For policies over tokens, whose likelihoods are probabilities.

    With b the policy that acted (`behaviour_logprobs`; None: `old_logprobs` are its own) and r = p / b, per position
    -A r + behaviour_kl_coef * (log r)^2, the first term 0 where the probability has moved far enough the way that the
    advantage pushes it: p - b > `clip_ratio_high` with A > 0, or p - b < -`clip_ratio_low` with A < 0. A rare token may
    so change by any factor, and a frequent one not by much. Nothing is clipped by ratio.

    Metrics as in `ppo`, without the dual clip's, of p against b: `clip_fraction` is that of the positions left out.
    """
    if inputs.behaviour_logprobs is not None:
        inputs = replace(inputs, old_logprobs=inputs.behaviour_logprobs)
    log_ratio, advantages = _log_ratio(inputs), _valid(inputs.advantages, inputs.mask)
    ratio = log_ratio.exp()
    moved = (_valid(inputs.logprobs, inputs.mask).exp() - _valid(inputs.old_logprobs, inputs.mask).exp()).detach()
    up, down = (advantages > 0) & (moved > cfg.clip_ratio_high), (advantages < 0) & (moved < -cfg.clip_ratio_low)
    losses = torch.where(up | down, 0.0, -advantages * ratio) + cfg.behaviour_kl_coef * log_ratio.square()
    return _policy_outputs(losses, log_ratio, ratio, up | down, inputs, cfg)


def opd(inputs: LossInputs, cfg: BaseAlgorithmConfig) -> LossOutputs:
    """On-policy distillation: `ppo` with the advantages log t - log b, of the teacher and of the policy before the
    updates, not normalised. Over actions that the policy has sampled, and at its first update, the gradient is that of
    KL(policy || teacher); without the clip, later updates would push actions that the teacher dislikes without end.
    Rewards and advantages are not read.

    Metrics as in `ppo`, and `teacher_kl`, the mean of log b - log t.
    """
    teacher = require(inputs.teacher_logprobs, "teacher_logprobs", "opd").detach()
    advantages = _valid(teacher.float() - inputs.old_logprobs.float(), inputs.mask)
    outputs = ppo(replace(inputs, advantages=advantages), cfg)
    outputs.metrics["teacher_kl"] = masked_mean(-advantages, inputs.mask)
    return outputs


def value_loss(inputs: LossInputs, cfg: BaseAlgorithmConfig) -> LossOutputs:
    """0.5 * squared error of `values` against `returns`, aggregated as the policy loss is (before `value_coef`).

    With `value_clip` the larger of that and of the error of the values clipped to `old_values` +- value_clip
    (as in OpenAI Baselines' PPO2). Metrics: `value_loss`, `value_clip_fraction`, `values_mean`.
    """
    valid = inputs.mask.bool()
    values = torch.where(valid, require(inputs.values, "values", "value_loss").float(), 0.0)
    returns = torch.where(valid, require(inputs.returns, "returns", "value_loss").float(), 0.0)
    errors = unclipped = (values - returns).square()
    if cfg.value_clip is not None:
        old_values = require(inputs.old_values, "old_values", "value_loss with algorithm.value_clip").float()
        old_values = torch.where(valid, old_values, 0.0)
        clipped = values.clamp(old_values - cfg.value_clip, old_values + cfg.value_clip)  # inside, bit for bit the same
        errors = torch.maximum(unclipped, (clipped - returns).square())
    losses = 0.5 * errors
    with torch.no_grad():
        metrics = {
            "value_loss": masked_mean(losses, valid),
            "value_clip_fraction": masked_mean((errors > unclipped).float(), valid),
            "values_mean": masked_mean(values, valid),
        }
    return LossOutputs(_aggregate(losses, inputs, cfg), metrics)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-position estimate of KL(policy || reference) (Schulman, http://joschu.net/blog/kl-approx.html).

    `k1` or `kl`: log p - log q. `abs`: its absolute value. `k2` or `mse`: half its square. `k3` or `low_var_kl`:
    exp(r) - r - 1 with r = log q - log p clamped to +-20, the result clamped to +-10.
    """
    difference = logprobs - ref_logprobs
    if kind in ("k1", "kl"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("k2", "mse"):
        return 0.5 * difference.square()
    if kind in ("k3", "low_var_kl"):
        log_ratio = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return k3(log_ratio).clamp(-KL_LIMIT, KL_LIMIT)
    raise _unknown("KL estimate", kind, ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"))


def aggregate_loss(
    loss: Tensor,
    mask: Tensor,
    mode: str = "token-mean",
    denominator: Tensor | float | None = None,
    dp_size: int = 1,
) -> Tensor:
    """One scalar from per-position losses [B, T].

    `token-mean`: mean over valid positions. `token-sum`: their sum. `seq-mean-token-sum`, `seq-mean-token-mean`: sum or
    mean of each row, then the mean over rows that have a valid position. `seq-mean-token-sum-norm`: sum of each row
    divided by T, however many of its positions are valid, then the mean over rows (Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783). 0 if no position is valid.

    A loss that is computed in micro-batches or on several ranks needs the count of the whole batch as `denominator`
    (the sum of `loss_denominator` over micro-batches and ranks; `token-sum` needs none) and, if gradients are averaged
    over ranks, their number as `dp_size`. The gradients then add up to those of the whole batch, however it is split,
    also if parts omit columns that are only padding in them.
    """
    valid = mask.bool()
    kept = torch.where(valid, loss, 0.0)
    if mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        total = kept.sum()
    elif mode == "seq-mean-token-mean":
        total = (kept.sum(dim=1) / valid.sum(dim=1).clamp(min=1)).sum()
    else:
        raise _unknown("loss_agg_mode", mode, get_args(AggregationMode))
    if mode == "token-sum":
        return total * dp_size
    if denominator is None:
        if dp_size != 1:
            raise InputError(f"{mode} over dp_size={dp_size} ranks needs denominator=, the count of the whole batch.")
        denominator = loss_denominator(mask, mode).clamp(min=1)
    return total / denominator * dp_size


def loss_denominator(mask: Tensor, mode: str) -> Tensor:
    """The denominator of `mode`, counted in this mask [B, T]: valid positions, or rows with a valid position, or these
    times T. Add it up over micro-batches of the same T."""
    if mode not in get_args(AggregationMode):
        raise _unknown("loss_agg_mode", mode, get_args(AggregationMode))
    valid = mask.bool()
    if not mode.startswith("seq-mean"):
        return valid.sum()
    return valid.any(dim=1).sum() * (mask.shape[1] if mode.endswith("sum-norm") else 1)


def _valid(values: Tensor, mask: Tensor) -> Tensor:
    """`values` as float32, 0 where masked; masked values get no gradient."""
    return torch.where(mask.bool(), values.float(), 0.0)


def _log_ratio(inputs: LossInputs) -> Tensor:
    log_ratio = inputs.logprobs.float() - inputs.old_logprobs.float()
    return _valid(log_ratio, inputs.mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _clipped(ratio: Tensor, advantages: Tensor, cfg: BaseAlgorithmConfig) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r)), and whether the clipped term is the larger one, both [B, T]."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def _policy_outputs(
    losses: Tensor, log_ratio: Tensor, ratio: Tensor, clipped: Tensor, inputs: LossInputs, cfg: BaseAlgorithmConfig
) -> LossOutputs:
    """Outputs of a policy loss: per-position losses, weighted and aggregated, and the metrics that all of them have."""
    valid = inputs.mask.bool()
    if inputs.weights is not None:
        losses = losses * _valid(inputs.weights.detach(), inputs.mask)
    with torch.no_grad():
        metrics = {
            "policy_loss": masked_mean(losses, valid),
            "approx_kl": masked_mean(-log_ratio, valid),
            "approx_kl_k3": masked_mean(k3(log_ratio), valid),
            "clip_fraction": masked_mean(clipped.float(), valid),
            "ratio_mean": masked_mean(ratio, valid),
            "ratio_max": torch.where(valid, ratio, 0.0).max(),
        }
    return LossOutputs(_aggregate(losses, inputs, cfg), metrics)


def _aggregate(losses: Tensor, inputs: LossInputs, cfg: BaseAlgorithmConfig) -> Tensor:
    return aggregate_loss(losses, inputs.mask, cfg.loss_agg_mode, inputs.denominator, inputs.dp_size)


def _unknown(what: str, name: str, known: Iterable[str]) -> UnknownAlgorithmError:
    return UnknownAlgorithmError(f"unknown {what} {name!r}. {did_you_mean(name, known)}")
