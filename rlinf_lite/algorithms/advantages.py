"""Advantage estimators: functions from rewards (and values) to advantages and returns, batch first [B, T].

Estimators do not normalise unless that is part of the method; the caller whitens if `whitens(cfg)`. An estimator that
needs a critic is registered with `needs_values=True`, which `needs_values(name)` returns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlinf_lite.algorithms.masked import whiten
from rlinf_lite.algorithms.records import AdvantageInputs, AdvantageOutputs, require
from rlinf_lite.cards import EstimatorNeeds
from rlinf_lite.config.schema import BaseAlgorithmConfig
from rlinf_lite.registry import ESTIMATORS, estimator_needs

AdvantageFn = Callable[[AdvantageInputs, BaseAlgorithmConfig], AdvantageOutputs]

GROUP_STD_EPS = 1e-6


def register_advantage(
    name: str,
    needs_values: bool = False,
    needs_groups: bool = False,
    whole_episodes: bool = False,
    needs_greedy: bool = False,
) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator that makes an estimator available as `algorithm.adv_type: <name>`, and records what it needs.

    `needs_values`: values of a critic, which is then trained. `needs_groups`: groups of episodes from the same initial
    state, to compare with each other. `whole_episodes`: episodes that are not cut. `needs_greedy`: the score of a
    greedy answer to the same prompt.
    """
    return ESTIMATORS.register(name, EstimatorNeeds(needs_values, needs_groups, whole_episodes, needs_greedy))


def needs_values(name: str) -> bool:
    """Whether the estimator `name` reads values. Raises UnknownAlgorithmError."""
    return estimator_needs(name).values


def whitens(cfg: BaseAlgorithmConfig) -> bool:
    """Whether advantages are whitened after the estimator: as configured, or by default if it uses a critic."""
    return needs_values(cfg.adv_type) if cfg.normalize_advantages is None else cfg.normalize_advantages


@torch.no_grad()
def compute_advantages(name: str, inputs: AdvantageInputs, cfg: BaseAlgorithmConfig) -> AdvantageOutputs:
    """Run the estimator registered as `name`. Raises UnknownAlgorithmError or InputError."""
    estimator: AdvantageFn = ESTIMATORS.get(name)
    return estimator(inputs, cfg)


def opd(inputs: AdvantageInputs, cfg: BaseAlgorithmConfig) -> AdvantageOutputs:
    """Zeros: distillation from a teacher (the loss `opd`) reads no rewards."""
    return AdvantageOutputs(torch.zeros_like(inputs.rewards), torch.zeros_like(inputs.rewards))


def gae(inputs: AdvantageInputs, cfg: BaseAlgorithmConfig) -> AdvantageOutputs:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438). Needs `values`.

    d_t = r_t + gamma * next_value_t - V_t;  A_t = d_t + gamma * lambda * (1 - done_t) * A_{t+1};  returns = A + V.

    `next_values` are used as they are: 0 after a termination, V(final observation) after a truncation. Without
    them the next value is that of the row's next valid position, and 0 after the last one and after a done.
    A and V pass through masked positions unchanged, so the chain runs from valid position to valid position.
    """
    rewards, valid = inputs.rewards.float(), inputs.mask.bool()
    values = require(inputs.values, "values", "gae").float()
    going_on = _going_on(inputs)
    advantages = torch.zeros_like(rewards)
    advantage = next_value = rewards.new_zeros(rewards.shape[0])  # [B], of the position after t
    for t in reversed(range(rewards.shape[1])):
        bootstrap = next_value * going_on[:, t] if inputs.next_values is None else inputs.next_values[:, t].float()
        delta = rewards[:, t] + cfg.gamma * bootstrap - values[:, t]
        chained = delta + cfg.gamma * cfg.gae_lambda * going_on[:, t] * advantage
        advantage = torch.where(valid[:, t], chained, advantage)
        next_value = torch.where(valid[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    return AdvantageOutputs(torch.where(valid, advantages, 0.0), torch.where(valid, advantages + values, 0.0))


def grpo(inputs: AdvantageInputs, cfg: BaseAlgorithmConfig) -> AdvantageOutputs:
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300). Needs `group_ids`.

    A row's score s is the sum of its valid rewards; every valid position gets (s - mean) / (std + 1e-6) over the
    row's group, with unbiased std. A group of one has mean 0 and std 1. `group_std_normalize: false` leaves the std
    out (Liu et al. 2025, arXiv:2503.20783). Returns are the scores.
    """
    scores = _scores(inputs)
    deviations, std = _group_deviations(scores, require(inputs.group_ids, "group_ids", "grpo"))
    if cfg.group_std_normalize:
        deviations = deviations / (std + GROUP_STD_EPS)
    return AdvantageOutputs(_to_positions(deviations, inputs), _to_positions(scores, inputs))


def rloo(inputs: AdvantageInputs, cfg: BaseAlgorithmConfig) -> AdvantageOutputs:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740). Needs `group_ids`.

    A row's score minus the mean score of the n - 1 others of its group, which is n / (n - 1) * (s - mean). The
    advantage in a group of one is 0. Returns are the scores.
    """
    scores = _scores(inputs)
    index, counts = _group_index(require(inputs.group_ids, "group_ids", "rloo"))
    others = (counts - 1)[index]
    mean_of_others = (_sum_by_group(scores, index, len(counts))[index] - scores) / others.clamp(min=1)
    advantages = torch.where(others > 0, scores - mean_of_others, 0.0)
    return AdvantageOutputs(_to_positions(advantages, inputs), _to_positions(scores, inputs))


def opo(inputs: AdvantageInputs, cfg: BaseAlgorithmConfig) -> AdvantageOutputs:
    """On-policy optimal baseline (Hao et al. 2025, arXiv:2505.23585). Needs `group_ids`.

    A row's score minus the mean of its group weighted by length, sum(l s) / sum(l), where l is the number of valid
    positions of a row. The advantage in a group of one is the score itself. Returns are the scores.
    """
    scores, lengths = _scores(inputs), inputs.mask.bool().sum(dim=1).double()
    index, counts = _group_index(require(inputs.group_ids, "group_ids", "opo"))
    total_length = _sum_by_group(lengths, index, len(counts)).clamp(min=1)
    baseline = torch.where(counts == 1, 0.0, _sum_by_group(lengths * scores, index, len(counts)) / total_length)
    return AdvantageOutputs(_to_positions(scores - baseline[index], inputs), _to_positions(scores, inputs))


def reinforce_plus_plus(inputs: AdvantageInputs, cfg: BaseAlgorithmConfig) -> AdvantageOutputs:
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): discounted reward-to-go, whitened over the batch's valid positions.

    Returns are not whitened.
    """
    returns = _rewards_to_go(inputs, cfg.gamma)
    return AdvantageOutputs(whiten(returns, inputs.mask), returns)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, cfg: BaseAlgorithmConfig) -> AdvantageOutputs:
    """REINFORCE++-baseline (Hu 2025, arXiv:2501.03262). Needs `group_ids`.

    A row's score minus its group's mean at every valid position, whitened over the batch's. The mean of a group
    of one is taken as 0. Returns are the scores.
    """
    scores = _scores(inputs)
    deviations, _ = _group_deviations(scores, require(inputs.group_ids, "group_ids", "reinforce_plus_plus_baseline"))
    whitened = whiten(_to_positions(deviations, inputs), inputs.mask)
    return AdvantageOutputs(whitened, _to_positions(scores, inputs))


def remax(inputs: AdvantageInputs, cfg: BaseAlgorithmConfig) -> AdvantageOutputs:
    """ReMax (Li et al. 2023, arXiv:2310.10505): reward-to-go, not discounted, minus `baselines`, which it needs.

    A row's baseline is the score of the greedy answer to its prompt. Returns are the reward-to-go.
    """
    baselines = require(inputs.baselines, "baselines", "remax").double()
    returns = _rewards_to_go(inputs, gamma=1.0)
    advantages = torch.where(inputs.mask.bool(), returns - baselines.unsqueeze(1), 0.0).float()
    return AdvantageOutputs(advantages, returns)


def filter_groups(inputs: AdvantageInputs) -> Tensor:
    """Rows [K] (ascending indices) of the groups with a signal: the score of some member differs from the group's mean.

    For `algorithm.filter_groups`, before the forward pass (Yu et al. 2025, arXiv:2503.14476). A group of one is
    compared with 0, as in `grpo`. The result may be empty.
    """
    group_ids = require(inputs.group_ids, "group_ids", "filter_groups")
    deviations, _ = _group_deviations(_scores(inputs), group_ids)
    index, counts = _group_index(group_ids)
    num_differing = _sum_by_group((deviations.abs() > GROUP_STD_EPS).double(), index, len(counts))
    return (num_differing[index] > 0).nonzero().flatten()


def overlong_penalty(mask: Tensor, buffer_length: int, factor: float) -> Tensor:
    """Penalty of DAPO for long responses, [B] in [-factor, 0], to add to their rewards (Yu et al. 2025,
    arXiv:2503.14476, section 3.4).

    0 up to T - buffer_length valid positions of `mask` [B, T], then falling linearly to -factor at T, where generation
    is cut off. All 0 with a `buffer_length` of 0.
    """
    lengths = mask.bool().sum(dim=1)
    exceeding = (lengths - (mask.shape[1] - buffer_length)).clamp(min=0)
    return -factor * exceeding / max(buffer_length, 1)


def _rewards_to_go(inputs: AdvantageInputs, gamma: float) -> Tensor:
    """r_t + gamma * (reward-to-go of the row's next valid position), [B, T]; without the second term after a done."""
    rewards, valid = inputs.rewards.float(), inputs.mask.bool()
    going_on = _going_on(inputs)
    returns = torch.zeros_like(rewards)
    to_go = rewards.new_zeros(rewards.shape[0])  # [B]
    for t in reversed(range(rewards.shape[1])):
        to_go = torch.where(valid[:, t], rewards[:, t] + gamma * going_on[:, t] * to_go, to_go)
        returns[:, t] = to_go
    return torch.where(valid, returns, 0.0)


def _going_on(inputs: AdvantageInputs) -> Tensor:
    """1 - done, [B, T]."""
    return torch.ones_like(inputs.rewards.float()) if inputs.dones is None else 1.0 - inputs.dones.float()


def _scores(inputs: AdvantageInputs) -> Tensor:
    """Sum of each row's valid rewards, [B]. float64: equal scores must give a deviation of 0, not of 1e-8 / 1e-6."""
    return torch.where(inputs.mask.bool(), inputs.rewards.double(), 0.0).sum(dim=1)


def _group_deviations(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's score minus its group's mean, and its group's unbiased std, both [B]."""
    index, counts = _group_index(group_ids)
    alone = counts == 1
    mean = torch.where(alone, 0.0, _sum_by_group(scores, index, len(counts)) / counts)
    deviations = scores - mean[index]
    variance = _sum_by_group(deviations.square(), index, len(counts)) / (counts - 1).clamp(min=1)
    return deviations, torch.where(alone, 1.0, variance.sqrt())[index]


def _group_index(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The number of each row's group, from 0, [B], and the size of each group."""
    index: Tensor
    counts: Tensor
    _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return index, counts


def _sum_by_group(rows: Tensor, index: Tensor, num_groups: int) -> Tensor:
    return rows.new_zeros(num_groups).index_add_(0, index, rows)


def _to_positions(rows: Tensor, inputs: AdvantageInputs) -> Tensor:
    """One number per row [B], repeated as float32 [B, T]; 0 where masked."""
    return torch.where(inputs.mask.bool(), rows.float().unsqueeze(1), 0.0)
