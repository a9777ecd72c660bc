"""Advantage estimators against slow loops, over random masks, dones and groups."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlinf_lite.algorithms import (
    AdvantageInputs,
    InputError,
    UnknownAlgorithmError,
    compute_advantages,
    filter_groups,
    gae,
    grpo,
    needs_values,
    opo,
    overlong_penalty,
    register_advantage,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from rlinf_lite.config import AlgorithmConfig

CFG = AlgorithmConfig(gamma=0.9, gae_lambda=0.8)
B, T = 6, 9


def random_inputs(seed: int, with_dones: bool, with_next_values: bool) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=generator) < 0.7
    mask[0] = True
    poison = torch.where(mask, 0.0, torch.nan)  # masked positions must not matter
    return AdvantageInputs(
        rewards=torch.randn(B, T, generator=generator) + poison,
        mask=mask.float(),
        values=torch.randn(B, T, generator=generator) + poison,
        next_values=torch.randn(B, T, generator=generator) + poison if with_next_values else None,
        dones=(torch.rand(B, T, generator=generator) < 0.3).float() if with_dones else None,
        group_ids=torch.randint(0, 3, (B,), generator=generator),
    )


def slow_gae(inputs: AdvantageInputs, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Each row's valid positions as a trajectory of their own, from its end to its start."""
    advantages, returns = torch.zeros(B, T), torch.zeros(B, T)
    assert inputs.values is not None
    for b in range(B):
        valid = [t for t in range(T) if inputs.mask[b, t]]
        following = 0.0
        for i in reversed(range(len(valid))):
            t = valid[i]
            done = inputs.dones is not None and bool(inputs.dones[b, t])
            if inputs.next_values is not None:
                next_value = float(inputs.next_values[b, t])
            elif done or i + 1 == len(valid):
                next_value = 0.0
            else:
                next_value = float(inputs.values[b, valid[i + 1]])
            delta = float(inputs.rewards[b, t]) + gamma * next_value - float(inputs.values[b, t])
            following = delta + (0.0 if done else gamma * lam * following)
            advantages[b, t] = following
            returns[b, t] = following + inputs.values[b, t]
    return advantages, returns


@pytest.mark.parametrize("with_next_values", [False, True])
@pytest.mark.parametrize("with_dones", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_a_slow_loop(seed: int, with_dones: bool, with_next_values: bool) -> None:
    inputs = random_inputs(seed, with_dones, with_next_values)
    advantages, returns = slow_gae(inputs, CFG.gamma, CFG.gae_lambda)
    outputs = gae(inputs, CFG)
    torch.testing.assert_close(outputs.advantages, advantages, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.returns, returns, atol=1e-5, rtol=0)


def test_gae_bootstraps_a_truncation_and_not_a_termination() -> None:
    rewards, values = torch.ones(2, 2), torch.zeros(2, 2)
    dones = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    next_values = torch.tensor([[0.0, 0.0], [0.0, 10.0]])  # row 0 terminates, row 1 is truncated at a value of 10
    outputs = gae(AdvantageInputs(rewards, torch.ones(2, 2), values, next_values, dones), CFG)
    torch.testing.assert_close(outputs.returns[:, 1], torch.tensor([1.0, 10.0]))


@pytest.mark.parametrize("with_dones", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_reinforce_plus_plus_equals_a_slow_loop(seed: int, with_dones: bool) -> None:
    inputs = random_inputs(seed, with_dones, with_next_values=False)
    returns = torch.zeros(B, T)
    for b in range(B):
        to_go = 0.0
        for t in reversed(range(T)):
            if inputs.mask[b, t]:
                done = inputs.dones is not None and bool(inputs.dones[b, t])
                to_go = float(inputs.rewards[b, t]) + (0.0 if done else CFG.gamma * to_go)
                returns[b, t] = to_go
    kept = returns[inputs.mask.bool()]
    outputs = reinforce_plus_plus(inputs, CFG)
    torch.testing.assert_close(outputs.returns, returns, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        outputs.advantages[inputs.mask.bool()], (kept - kept.mean()) / kept.std(), atol=1e-5, rtol=0
    )
    assert (outputs.advantages[~inputs.mask.bool()] == 0).all()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_grpo_equals_a_slow_loop(seed: int, normalize: bool) -> None:
    inputs = random_inputs(seed, with_dones=False, with_next_values=False)
    assert inputs.group_ids is not None
    scores = [float(inputs.rewards[b][inputs.mask[b].bool()].sum()) for b in range(B)]
    expected = torch.zeros(B, T)
    for b in range(B):
        group = torch.tensor([scores[i] for i in range(B) if inputs.group_ids[i] == inputs.group_ids[b]])
        mean, std = (float(group.mean()), float(group.std())) if len(group) > 1 else (0.0, 1.0)
        advantage = (scores[b] - mean) / (std + 1e-6 if normalize else 1.0)
        expected[b] = torch.where(inputs.mask[b].bool(), advantage, 0.0)
    outputs = grpo(inputs, AlgorithmConfig(group_std_normalize=normalize))
    torch.testing.assert_close(outputs.advantages, expected, atol=1e-4, rtol=0)


def scores_by_row(inputs: AdvantageInputs) -> list[float]:
    return [float(inputs.rewards[b][inputs.mask[b].bool()].sum()) for b in range(B)]


def members(inputs: AdvantageInputs, row: int) -> list[int]:
    assert inputs.group_ids is not None
    return [b for b in range(B) if inputs.group_ids[b] == inputs.group_ids[row]]


def at_valid_positions(rows: list[float], inputs: AdvantageInputs) -> Tensor:
    return torch.where(inputs.mask.bool(), torch.tensor(rows).unsqueeze(1), 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_rloo_equals_a_slow_loop(seed: int) -> None:
    inputs = random_inputs(seed, with_dones=False, with_next_values=False)
    scores, advantages = scores_by_row(inputs), []
    for b in range(B):
        others = [scores[i] for i in members(inputs, b) if i != b]
        advantages.append(scores[b] - sum(others) / len(others) if others else 0.0)
    outputs = rloo(inputs, CFG)
    torch.testing.assert_close(outputs.advantages, at_valid_positions(advantages, inputs), atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.returns, at_valid_positions(scores, inputs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_opo_equals_a_slow_loop(seed: int) -> None:
    inputs = random_inputs(seed, with_dones=False, with_next_values=False)
    scores, advantages = scores_by_row(inputs), []
    for b in range(B):
        group = members(inputs, b)
        lengths = {i: int(inputs.mask[i].sum()) for i in group}
        weighted = sum(lengths[i] * scores[i] for i in group) / sum(lengths.values())
        advantages.append(scores[b] - (weighted if len(group) > 1 else 0.0))
    outputs = opo(inputs, CFG)
    torch.testing.assert_close(outputs.advantages, at_valid_positions(advantages, inputs), atol=1e-5, rtol=0)


def test_the_baseline_of_opo_is_the_optimal_one_where_gradients_grow_with_length() -> None:
    """Of all baselines, tried one by one, the one with the least E[|g|^2 (s - b)^2], with |g|^2 a row's length."""
    inputs = replace(random_inputs(0, False, False), group_ids=torch.zeros(B, dtype=torch.int64))
    scores, lengths = scores_by_row(inputs), inputs.mask.sum(1).tolist()

    def variance(baseline: float) -> float:
        return sum(length * (score - baseline) ** 2 for length, score in zip(lengths, scores, strict=True))

    best = min((number / 1000 for number in range(-5000, 5000)), key=variance)
    advantages = opo(inputs, CFG).advantages
    first = [int(row.int().argmax()) for row in inputs.mask.bool()]
    found = [scores[b] - float(advantages[b, t]) for b, t in enumerate(first)]
    assert found == pytest.approx([best] * B, abs=1e-3)
    assert abs(best - sum(scores) / B) > 0.05  # and not the mean


def test_the_overlong_penalty_equals_a_slow_loop() -> None:
    lengths = torch.arange(13)
    mask = torch.arange(12) < lengths[:, None]
    expected = []
    for length in lengths.tolist():
        exceeding = length - (12 - 4)
        expected.append(0.0 if exceeding <= 0 else -0.5 * exceeding / 4)
    assert overlong_penalty(mask, 4, 0.5).tolist() == pytest.approx(expected)
    assert min(expected) == -0.5
    assert overlong_penalty(mask, 0, 0.5).abs().max() == 0


@pytest.mark.parametrize("seed", range(3))
def test_reinforce_plus_plus_baseline_equals_a_slow_loop(seed: int) -> None:
    inputs = random_inputs(seed, with_dones=False, with_next_values=False)
    scores, deviations = scores_by_row(inputs), []
    for b in range(B):
        group = [scores[i] for i in members(inputs, b)]
        deviations.append(scores[b] - (sum(group) / len(group) if len(group) > 1 else 0.0))
    kept = at_valid_positions(deviations, inputs)[inputs.mask.bool()]
    outputs = reinforce_plus_plus_baseline(inputs, CFG)
    torch.testing.assert_close(
        outputs.advantages[inputs.mask.bool()], (kept - kept.mean()) / kept.std(), atol=1e-5, rtol=0
    )
    assert (outputs.advantages[~inputs.mask.bool()] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_remax_equals_a_slow_loop(seed: int) -> None:
    inputs = replace(random_inputs(seed, with_dones=False, with_next_values=False), baselines=torch.arange(float(B)))
    advantages = torch.zeros(B, T)
    for b, t in inputs.mask.nonzero().tolist():
        to_go = sum(float(inputs.rewards[b, i]) for i in range(t, T) if inputs.mask[b, i])
        advantages[b, t] = to_go - b
    outputs = remax(inputs, CFG)
    torch.testing.assert_close(outputs.advantages, advantages, atol=1e-5, rtol=0)


def test_remax_without_greedy_scores_says_what_is_missing() -> None:
    with pytest.raises(InputError, match="remax needs baselines"):
        compute_advantages("remax", random_inputs(0, with_dones=False, with_next_values=False), CFG)


def test_grpo_gives_nothing_to_a_group_whose_members_score_the_same() -> None:
    rewards = torch.full((3, 1), 0.1)  # a mean in float32 would be off by 1e-9 and be divided by 1e-6
    inputs = AdvantageInputs(rewards, torch.ones(3, 1), group_ids=torch.zeros(3, dtype=torch.long))
    assert grpo(inputs, CFG).advantages.abs().max() < 1e-8


def test_filter_groups_keeps_the_rows_with_a_signal() -> None:
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 3.0])
    group_ids = torch.tensor([5, 5, 2, 2, 9, 9, 7])
    inputs = AdvantageInputs(scores.unsqueeze(1), torch.ones(7, 1), group_ids=group_ids)
    assert filter_groups(inputs).tolist() == [0, 1, 6]
    nothing = AdvantageInputs(torch.ones(2, 1), torch.ones(2, 1), group_ids=torch.zeros(2, dtype=torch.long))
    assert filter_groups(nothing).tolist() == []


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    inputs = random_inputs(0, False, False)
    with pytest.raises(UnknownAlgorithmError, match="Did you mean grpo"):
        compute_advantages("gpro", inputs, CFG)
    with pytest.raises(ValueError, match="Known: gae, grpo, opd, opo, reinforce_plus_plus"):
        compute_advantages("nope", inputs, CFG)


def test_a_taken_name_cannot_be_registered_again() -> None:
    with pytest.raises(ValueError, match="registered already"):
        register_advantage("gae")(gae)
    assert needs_values("gae")  # a refusal changes nothing


def test_missing_and_misshapen_inputs_are_named() -> None:
    rewards, mask = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(InputError, match="gae needs values"):
        compute_advantages("gae", AdvantageInputs(rewards, mask), CFG)
    with pytest.raises(InputError, match="grpo needs group_ids"):
        compute_advantages("grpo", AdvantageInputs(rewards, mask), CFG)
    with pytest.raises(InputError, match=r"AdvantageInputs.values has shape \[2, 4\]"):
        AdvantageInputs(rewards, mask, values=torch.zeros(2, 4))
    with pytest.raises(InputError, match=r"AdvantageInputs.mask has shape \[2\]"):
        AdvantageInputs(rewards, mask[:, 0])
