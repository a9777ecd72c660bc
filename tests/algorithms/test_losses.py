"""Losses against slow loops; aggregation and whitening that do not depend on how a batch is split."""

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_lite.algorithms import (
    InputError,
    LossInputs,
    UnknownAlgorithmError,
    actor_critic_loss,
    aggregate_loss,
    cispo,
    correction,
    dppo_tv,
    entropy_at_level,
    expand_to_level,
    explained_variance,
    gspo,
    kl_penalty,
    loss_denominator,
    policy_loss,
    ppo,
    sum_to_level,
    value_loss,
    whiten,
)
from rlinf_lite.algorithms.losses import AggregationMode
from rlinf_lite.config import AlgorithmConfig
from rlinf_lite.config.schema import CorrectionConfig

B, T = 8, 5
MODES = get_args(AggregationMode)
CFG = AlgorithmConfig(
    clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=2.0, value_clip=0.3, entropy_coef=0.1, value_coef=0.7
)


def random_inputs(seed: int) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=generator) < 0.6
    mask[1] = False
    poison = torch.where(mask, 0.0, torch.nan)

    def noise() -> Tensor:
        return torch.randn(B, T, generator=generator) + poison

    return LossInputs(
        logprobs=noise().requires_grad_(),
        old_logprobs=noise(),
        advantages=noise(),
        mask=mask.float(),
        entropy=noise().requires_grad_(),
        values=noise().requires_grad_(),
        old_values=noise(),
        returns=noise(),
    )


def rows(inputs: LossInputs, start: int, stop: int) -> LossInputs:
    names = ("logprobs", "old_logprobs", "advantages", "mask", "entropy", "values", "old_values", "returns")
    return replace(inputs, **{name: getattr(inputs, name)[start:stop] for name in names})


def slow_aggregate(losses: dict[tuple[int, int], float], mode: str) -> float:
    by_row = [[loss for (b, _), loss in losses.items() if b == row] for row in range(B)]
    by_row = [row for row in by_row if row]
    total = sum(losses.values())
    return {
        "token-mean": total / len(losses),
        "token-sum": total,
        "seq-mean-token-sum": total / len(by_row),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in by_row) / len(by_row),
        "seq-mean-token-sum-norm": sum(sum(row) / T for row in by_row) / len(by_row),
    }[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_ppo_equals_a_slow_loop(seed: int, mode: AggregationMode) -> None:
    inputs = random_inputs(seed)
    losses = {}
    num_clipped = 0
    for b, t in inputs.mask.nonzero().tolist():
        ratio = math.exp(float(inputs.logprobs.detach()[b, t]) - float(inputs.old_logprobs[b, t]))
        advantage = float(inputs.advantages[b, t])
        clipped = -advantage * min(max(ratio, 0.8), 1.3)
        num_clipped += clipped > -advantage * ratio
        loss = max(-advantage * ratio, clipped)
        losses[b, t] = min(loss, -advantage * 2.0) if advantage < 0 else loss
    outputs = ppo(inputs, CFG.model_copy(update={"loss_agg_mode": mode}))
    assert float(outputs.loss.detach()) == pytest.approx(slow_aggregate(losses, mode), abs=1e-4)
    assert float(outputs.metrics["clip_fraction"]) == pytest.approx(num_clipped / len(losses))
    assert float(outputs.metrics["approx_kl_k3"]) >= 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_gspo_equals_a_slow_loop(seed: int, mode: AggregationMode) -> None:
    inputs = random_inputs(seed)
    log_ratio = inputs.logprobs.detach() - inputs.old_logprobs
    losses, slopes = {}, {}
    for b in range(B):
        valid = [t for t in range(T) if inputs.mask[b, t]]
        for t in valid:
            ratio = math.exp(sum(float(log_ratio[b, i]) for i in valid) / len(valid))
            advantage = float(inputs.advantages[b, t])
            clipped = -advantage * min(max(ratio, 0.8), 1.3)
            losses[b, t] = max(-advantage * ratio, clipped)
            slopes[b, t] = 0.0 if clipped > -advantage * ratio else -advantage * ratio
    outputs = gspo(inputs, CFG.model_copy(update={"loss_agg_mode": mode}))
    assert float(outputs.loss.detach()) == pytest.approx(slow_aggregate(losses, mode), abs=1e-4)
    outputs.loss.backward()
    assert_gradient(inputs, slopes, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_cispo_equals_a_slow_loop(seed: int, mode: AggregationMode) -> None:
    inputs = random_inputs(seed)
    losses, slopes = {}, {}
    for b, t in inputs.mask.nonzero().tolist():
        logprob = float(inputs.logprobs.detach()[b, t])
        ratio = math.exp(logprob - float(inputs.old_logprobs[b, t]))
        slopes[b, t] = -min(max(ratio, 0.8), 1.3) * float(inputs.advantages[b, t])
        losses[b, t] = slopes[b, t] * logprob
    outputs = cispo(inputs, CFG.model_copy(update={"loss_agg_mode": mode}))
    assert float(outputs.loss.detach()) == pytest.approx(slow_aggregate(losses, mode), abs=1e-4)
    outputs.loss.backward()
    assert_gradient(inputs, slopes, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_dppo_tv_equals_a_slow_loop(seed: int, mode: AggregationMode) -> None:
    """Log-probabilities are those of probabilities here; a third set is that of the policy that acted."""
    drawn = random_inputs(seed)
    generator = torch.Generator().manual_seed(seed + 100)
    logprobs, behaviour = (torch.rand(B, T, generator=generator).log() for _ in range(2))
    inputs = replace(drawn, logprobs=logprobs.requires_grad_(), behaviour_logprobs=behaviour)
    losses, slopes, num_left_out = {}, {}, 0
    for b, t in inputs.mask.nonzero().tolist():
        new, acted = math.exp(float(logprobs.detach()[b, t])), math.exp(float(behaviour[b, t]))
        advantage, log_ratio = float(inputs.advantages[b, t]), math.log(new / acted)
        left_out = new - acted > 0.3 if advantage > 0 else new - acted < -0.2
        num_left_out += left_out
        slopes[b, t] = (0.0 if left_out else -advantage * new / acted) + 2 * 0.01 * log_ratio
        losses[b, t] = (0.0 if left_out else -advantage * new / acted) + 0.01 * log_ratio**2
    outputs = dppo_tv(inputs, CFG.model_copy(update={"loss_agg_mode": mode, "behaviour_kl_coef": 0.01}))
    assert 0 < num_left_out < len(losses)
    assert float(outputs.loss.detach()) == pytest.approx(slow_aggregate(losses, mode), abs=1e-4)
    assert float(outputs.metrics["clip_fraction"]) == pytest.approx(num_left_out / len(losses))
    outputs.loss.backward()
    assert_gradient(inputs, slopes, mode)


def test_dppo_tv_against_who_acted_where_nobody_else_is_named() -> None:
    inputs = random_inputs(0)
    cfg = CFG.model_copy(update={"clip_ratio_high": 0.2})
    named = dppo_tv(replace(inputs, behaviour_logprobs=inputs.old_logprobs), cfg)
    torch.testing.assert_close(dppo_tv(inputs, cfg).loss, named.loss)


def test_a_rare_token_may_change_by_any_factor_and_a_frequent_one_not_by_much() -> None:
    logprobs = torch.tensor([[0.010, 0.900]]).log().requires_grad_()
    inputs = LossInputs(logprobs, torch.tensor([[0.001, 0.600]]).log(), torch.ones(1, 2), torch.ones(1, 2))
    dppo_tv(inputs, AlgorithmConfig(behaviour_kl_coef=0)).loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-10.0 / 2, 0.0]]))  # ratios of 10 and of 1.5


def test_the_log_ratio_of_a_sequence_is_bounded() -> None:
    inputs = LossInputs(torch.full((1, 2), 15.0), torch.zeros(1, 2), -torch.ones(1, 2), torch.ones(1, 2))
    assert float(gspo(inputs, CFG).loss) == pytest.approx(math.exp(10))


def assert_gradient(inputs: LossInputs, slopes: dict[tuple[int, int], float], mode: str) -> None:
    """The gradient of the log-probabilities is that of the aggregated `slopes`, 0 where masked."""
    grad = inputs.logprobs.grad
    assert grad is not None
    expected = torch.zeros(B, T)
    for position, slope in slopes.items():
        only_this = {other: slope if other == position else 0.0 for other in slopes}
        expected[position] = slow_aggregate(only_this, mode)
    torch.testing.assert_close(grad, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("loss_type", ["ppo", "gspo", "cispo", "dppo_tv"])
def test_weights_multiply_every_policy_loss(loss_type: str) -> None:
    inputs = random_inputs(0)
    weights = torch.where(inputs.mask.bool(), 3.0, torch.nan)
    plain, weighted = (policy_loss(loss_type, x, CFG) for x in (inputs, replace(inputs, weights=weights)))
    torch.testing.assert_close(weighted.loss, 3 * plain.loss)
    only_first = torch.zeros(B, T)
    only_first[0] = 1.0
    policy_loss(loss_type, replace(inputs, weights=only_first), CFG).loss.backward()
    assert inputs.logprobs.grad is not None
    assert (inputs.logprobs.grad[0] != 0).any() and (inputs.logprobs.grad[1:] == 0).all()


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(InputError, match="weights has shape"):
        replace(random_inputs(0), weights=torch.ones(B))


@pytest.mark.parametrize("value_clip", [None, 0.3])
@pytest.mark.parametrize("mode", MODES)
def test_value_loss_equals_a_slow_loop(mode: AggregationMode, value_clip: float | None) -> None:
    inputs = random_inputs(0)
    assert inputs.values is not None and inputs.old_values is not None and inputs.returns is not None
    losses = {}
    for b, t in inputs.mask.nonzero().tolist():
        value, old, wanted = (float(x.detach()[b, t]) for x in (inputs.values, inputs.old_values, inputs.returns))
        losses[b, t] = 0.5 * (value - wanted) ** 2
        if value_clip is not None:
            clipped = min(max(value, old - value_clip), old + value_clip)
            losses[b, t] = max(losses[b, t], 0.5 * (clipped - wanted) ** 2)
    outputs = value_loss(inputs, AlgorithmConfig(loss_agg_mode=mode, value_clip=value_clip))
    assert float(outputs.loss.detach()) == pytest.approx(slow_aggregate(losses, mode), abs=1e-4)


@pytest.mark.parametrize("value_clip", [0.05, 0.2, 0.5, 5.0, 1e3])
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_the_value_clip_fraction_counts_no_rounding(value_clip: float, scale: float) -> None:
    """Old values of another size than the new ones: a sum of one and the difference between both is not the other."""
    rng = np.random.default_rng(0)
    values, old, returns = (rng.normal(size=(64, 16)).astype(np.float32) * np.float32(s) for s in (0.3, scale, 1.0))
    mask = rng.random((64, 16)) < 0.7
    num_clipped = 0
    low, high = old - np.float32(value_clip), old + np.float32(value_clip)
    for b, t in zip(*np.nonzero(mask), strict=True):
        if not low[b, t] <= values[b, t] <= high[b, t]:
            kept = low[b, t] if values[b, t] < low[b, t] else high[b, t]
            num_clipped += abs(kept - returns[b, t]) > abs(values[b, t] - returns[b, t])
    zeros = torch.zeros(64, 16)
    columns = dict(zip(("values", "old_values", "returns"), map(torch.from_numpy, (values, old, returns)), strict=True))
    inputs = LossInputs(zeros, zeros, zeros, torch.from_numpy(mask), **columns)
    found = value_loss(inputs, AlgorithmConfig(value_clip=value_clip)).metrics["value_clip_fraction"]
    assert float(found) == pytest.approx(num_clipped / mask.sum(), abs=1e-7)
    assert (num_clipped == 0) == (value_clip == 1e3 or (value_clip == 5.0 and scale <= 1))


@pytest.mark.parametrize("size", [1e-7, 1e-5, 1e-4, 1e-3, 0.1])
def test_k3_is_half_the_square_of_a_small_log_ratio_and_never_negative(size: float) -> None:
    log_ratio = size * torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    zeros, mask = torch.zeros(64, 16), torch.ones(64, 16)
    wanted = float((torch.expm1(log_ratio.double()) - log_ratio.double()).mean())
    assert (kl_penalty(zeros, log_ratio, "k3") >= 0).all()
    metrics = policy_loss("ppo", LossInputs(log_ratio, zeros, zeros, mask), CFG).metrics
    corrected = correction(log_ratio, zeros, mask, CorrectionConfig(kind="reject", metric="k3", low=0.0))
    assert float(metrics["approx_kl_k3"]) == pytest.approx(wanted, rel=1e-4)
    assert float(corrected.metrics["behaviour_k3"]) == pytest.approx(wanted, rel=1e-4)
    assert float(corrected.metrics["rejected_fraction"]) == 0


def test_the_ratio_of_a_sequence_is_the_same_at_each_of_its_positions() -> None:
    old, zeros = -50 * torch.rand(1, 64, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 64)
    metrics = gspo(LossInputs(old + 0.01, old, zeros, torch.ones(1, 64)), CFG).metrics
    assert float(metrics["ratio_max"]) == pytest.approx(float(metrics["ratio_mean"]), abs=2e-7)


def test_masked_positions_get_no_gradient_even_where_they_are_nan() -> None:
    inputs = random_inputs(0)
    actor_critic_loss("ppo", inputs, CFG).loss.backward()
    for tensor in (inputs.logprobs, inputs.entropy, inputs.values):
        assert tensor is not None and tensor.grad is not None
        assert torch.isfinite(tensor.grad).all()
        assert (tensor.grad[~inputs.mask.bool()] == 0).all()


def test_actor_critic_loss_adds_up_its_parts() -> None:
    inputs = random_inputs(0)
    assert inputs.entropy is not None
    outputs = actor_critic_loss("ppo", inputs, CFG)
    entropy = inputs.entropy[inputs.mask.bool()].mean()
    wanted = ppo(inputs, CFG).loss + 0.7 * value_loss(inputs, CFG).loss - 0.1 * entropy
    torch.testing.assert_close(outputs.loss, wanted)
    assert {"policy_loss", "approx_kl", "clip_fraction", "value_loss", "entropy"} <= outputs.metrics.keys()
    assert not any(metric.requires_grad for metric in outputs.metrics.values())
    policy_only = replace(inputs, values=None, entropy=None)
    torch.testing.assert_close(actor_critic_loss("ppo", policy_only, CFG).loss, ppo(inputs, CFG).loss)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_do_not_depend_on_ranks_or_micro_batches(mode: AggregationMode) -> None:
    cfg = CFG.model_copy(update={"loss_agg_mode": mode})
    whole = random_inputs(0)
    actor_critic_loss("ppo", whole, cfg).loss.backward()
    split = random_inputs(0)
    denominator = loss_denominator(split.mask, mode)
    for ranks in ([(0, 3), (3, 4)], [(4, 7), (7, 8)]):  # two ranks of two uneven micro-batches each
        for start, stop in ranks:
            part = replace(rows(split, start, stop), denominator=denominator, dp_size=2)
            loss = actor_critic_loss("ppo", part, cfg).loss / 2  # gradients are averaged over ranks
            loss.backward()
    for name in ("logprobs", "entropy", "values"):
        torch.testing.assert_close(getattr(split, name).grad, getattr(whole, name).grad)
    parts = [loss_denominator(split.mask[i : i + 2], mode) for i in range(0, B, 2)]
    assert sum(int(part) for part in parts) == int(denominator)


@pytest.mark.parametrize("mode", MODES)
def test_columns_of_padding_do_not_change_a_loss(mode: AggregationMode) -> None:
    """A micro-batch of short rows is trimmed; its denominator is that of the whole batch."""
    inputs = random_inputs(0)
    inputs.mask[:, T - 2 :] = 0
    denominator = loss_denominator(inputs.mask, mode)
    whole, trimmed = (inputs.advantages, inputs.mask), (inputs.advantages[:, : T - 2], inputs.mask[:, : T - 2])
    torch.testing.assert_close(*(aggregate_loss(*part, mode, denominator) for part in (whole, trimmed)))


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_valid_positions_has_loss_zero(mode: str) -> None:
    loss = torch.full((2, 3), torch.nan, requires_grad=True)
    total = aggregate_loss(loss, torch.zeros(2, 3), mode)
    total.backward()
    assert float(total.detach()) == 0
    assert loss.grad is not None and (loss.grad == 0).all()


def test_a_single_position_is_its_own_mean() -> None:
    assert whiten(torch.tensor([[3.0, 7.0]]), torch.tensor([[1, 0]])).tolist() == [[0.0, 0.0]]
    assert whiten(torch.tensor([[3.0]]), torch.tensor([[1]]), shift_mean=False).tolist() == [[3.0]]


def test_errors_say_what_to_do() -> None:
    inputs = random_inputs(0)
    with pytest.raises(UnknownAlgorithmError, match="Did you mean ppo"):
        policy_loss("pppo", inputs, CFG)
    with pytest.raises(UnknownAlgorithmError, match="Did you mean token-mean"):
        aggregate_loss(inputs.advantages, inputs.mask, "token_mean")
    with pytest.raises(UnknownAlgorithmError, match="unknown KL estimate 'foo'"):
        kl_penalty(inputs.logprobs, inputs.old_logprobs, "foo")
    with pytest.raises(ValueError, match="clip_ratio_c: the dual clip must be above 1"):
        ppo(inputs, AlgorithmConfig(clip_ratio_c=1.0))
    with pytest.raises(InputError, match="needs denominator="):
        aggregate_loss(inputs.advantages, inputs.mask, "token-mean", dp_size=2)
    with pytest.raises(InputError, match="value_loss needs returns"):
        value_loss(replace(inputs, returns=None), CFG)
    with pytest.raises(InputError, match=r"LossInputs.entropy has shape"):
        replace(inputs, entropy=torch.zeros(B, T + 1))


def test_kl_estimates_agree_near_zero() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]])
    ref = logprobs + 0.01
    torch.testing.assert_close(kl_penalty(logprobs, ref, "abs"), kl_penalty(ref, logprobs, "k1"))
    torch.testing.assert_close(kl_penalty(logprobs, ref, "k2"), kl_penalty(logprobs, ref, "k3"), atol=1e-6, rtol=0)


def test_explained_variance() -> None:
    returns, mask = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.ones(4, 3)
    assert explained_variance(returns, returns, mask) == pytest.approx(1)
    assert explained_variance(torch.zeros(4, 3), returns, mask) == pytest.approx(0)
    assert math.isnan(explained_variance(returns, torch.ones(4, 3), mask))
    rounded = torch.tensor([1e-8, 0.0, -1e-8]).expand(4, 3)  # A + V, where A is -V but for rounding
    assert math.isnan(explained_variance(returns, rounded, mask))


def test_levels() -> None:
    logprobs = torch.arange(12.0).reshape(1, 2, 6)  # one decision of 2 actions with 6 dimensions
    assert sum_to_level(logprobs, "chunk_level").tolist() == [[66.0]]
    assert sum_to_level(logprobs, "action_level").tolist() == [[15.0, 51.0]]
    assert sum_to_level(logprobs, "token_level").shape == (1, 12)
    executed = torch.ones(1, 2, dtype=torch.bool)
    assert entropy_at_level(logprobs, executed, "action_level", "action_level").tolist() == [[15.0, 51.0]]
    assert entropy_at_level(logprobs, executed, "token_level", "action_level").tolist() == [[5.5, 5.5]]
    per_action = torch.tensor([[1.0, 2.0]])
    assert expand_to_level(per_action, "token_level", 2, 2).tolist() == [[1.0, 1.0, 2.0, 2.0]]
    assert expand_to_level(per_action[:, :1], "action_level", 2, 2).tolist() == [[1.0, 1.0]]
    with pytest.raises(InputError, match="reward_type: action_level needs a logprob_type finer"):
        expand_to_level(per_action, "chunk_level", 2, 2)
