"""Numerics against reference values (golden.json): outputs of an established implementation on small inputs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_lite.algorithms import (
    AdvantageInputs,
    LossInputs,
    aggregate_loss,
    compute_advantages,
    kl_in_rewards,
    kl_penalty,
    masked_mean,
    policy_loss,
    value_loss,
    whiten,
)
from rlinf_lite.config import AlgorithmConfig

CASES = json.loads((Path(__file__).parent / "golden.json").read_text())["cases"]


def tensor(data: Any) -> Tensor:
    return torch.from_numpy(np.array(data, dtype=np.float32))


def inputs_of(name: str) -> dict[str, Any]:
    return {key: tensor(value) if isinstance(value, list) else value for key, value in CASES[name]["inputs"].items()}


def assert_equal(name: str, actual: Tensor | float, key: str, mask: Tensor | None = None) -> None:
    expected = CASES[name]["expected"]
    for part in key.split("."):
        expected = expected[part]
    actual, wanted = torch.as_tensor(actual).detach().float(), tensor(expected)
    if mask is not None:
        actual, wanted = actual[mask.bool()], wanted[mask.bool()]
    torch.testing.assert_close(actual, wanted, atol=CASES[name]["tol"], rtol=0)


def test_grpo() -> None:
    case = inputs_of("grpo_vectorized_pairs")
    mask = case["response_mask"]
    inputs = AdvantageInputs(case["token_level_rewards"], mask, group_ids=case["index"].long())
    outputs = compute_advantages("grpo", inputs, AlgorithmConfig())
    assert_equal("grpo_vectorized_pairs", outputs.advantages, "advantages", mask)


@pytest.mark.parametrize("estimator", ["rloo", "opo"])
def test_group_baselines(estimator: str) -> None:
    name = f"{estimator}_pairs"
    case = inputs_of(name)
    mask = case["response_mask"]
    inputs = AdvantageInputs(case["token_level_rewards"], mask, group_ids=case["index"].long())
    assert_equal(name, compute_advantages(estimator, inputs, AlgorithmConfig()).advantages, "advantages", mask)


def test_reinforce_plus_plus() -> None:
    case = inputs_of("rpp_g1")
    mask = case["response_mask"]
    cfg = AlgorithmConfig(gamma=case["gamma"])
    outputs = compute_advantages("reinforce_plus_plus", AdvantageInputs(case["token_level_rewards"], mask), cfg)
    assert_equal("rpp_g1", outputs.advantages, "advantages", mask)
    assert_equal("rpp_g1", outputs.returns, "returns", mask)


@pytest.mark.parametrize("name", ["kl_kl", "kl_mse", "kl_low_var_kl"])
def test_kl(name: str) -> None:
    case = inputs_of(name)
    assert_equal(name, kl_penalty(case["logprob"], case["ref_logprob"], case["kl_penalty"]), "kl")


def test_kl_in_rewards() -> None:
    name = "apply_kl_penalty_fixed"
    case = inputs_of(name)
    rewards, mean_kl = kl_in_rewards(
        case["token_level_scores"],
        case["old_log_probs"],
        case["ref_log_prob"],
        case["response_mask"],
        case["kl_coef"],
        case["kl_penalty"],
    )
    assert_equal(name, rewards, "token_level_rewards")
    assert_equal(name, mean_kl, "metrics.actor/reward_kl_penalty")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("agg_")])
def test_aggregate_loss(name: str) -> None:
    case = inputs_of(name)
    mode, loss = case["loss_agg_mode"], case["loss_mat"].requires_grad_()
    denominator = case.get("batch_num_tokens" if mode == "token-mean" else "global_batch_size")
    total = aggregate_loss(loss, case["loss_mask"], mode, denominator, case.get("dp_size", 1))
    assert_equal(name, total, "loss")
    if "grad" in CASES[name]["expected"]:
        total.backward()
        assert loss.grad is not None
        assert_equal(name, loss.grad, "grad")


def test_masked_mean_ignores_nan_where_masked() -> None:
    case = inputs_of("masked_mean_nan")
    assert_equal("masked_mean_nan", masked_mean(case["values"], case["mask"]), "out")
    assert_equal("masked_mean_nan", masked_mean(case["values"], case["mask"], dim=1), "axis1")


@pytest.mark.parametrize(("key", "shift_mean"), [("shift", True), ("noshift", False)])
def test_whiten(key: str, shift_mean: bool) -> None:
    case = inputs_of("masked_whiten")
    assert_equal("masked_whiten", whiten(case["values"], case["mask"], shift_mean), key, case["mask"])


@pytest.mark.parametrize("name", ["ppo_vanilla_token-sum", "ppo_log_ratio_clamped"])
def test_ppo(name: str) -> None:
    case = inputs_of(name)
    clip = case.get("clip_ratio", 0.2)
    cfg = AlgorithmConfig(
        clip_ratio_low=clip,
        clip_ratio_high=clip,
        clip_ratio_c=case["clip_ratio_c"],
        loss_agg_mode=case.get("loss_agg_mode", "token-mean"),
    )
    logprobs = case["log_prob"].requires_grad_()
    inputs = LossInputs(logprobs, case["old_log_prob"], case["advantages"], case["response_mask"])
    outputs = policy_loss("ppo", inputs, cfg)
    outputs.loss.backward()
    assert logprobs.grad is not None
    assert_equal(name, outputs.loss, "loss")
    assert_equal(name, logprobs.grad, "grad_log_prob")
    assert_equal(name, outputs.metrics["clip_fraction"], "metrics.actor/pg_clipfrac")
    assert_equal(name, outputs.metrics["clip_fraction_lower"], "metrics.actor/pg_clipfrac_lower")
    assert_equal(name, outputs.metrics["approx_kl"], "metrics.actor/ppo_kl")


@pytest.mark.parametrize(("loss_type", "low", "high"), [("gspo", 3e-4, 4e-4), ("cispo", 0.2, 0.2)])
def test_other_policy_losses(loss_type: str, low: float, high: float) -> None:
    name = f"policy_{loss_type}"
    case = inputs_of(name)
    logprobs = case["log_prob"].requires_grad_()
    inputs = LossInputs(logprobs, case["old_log_prob"], case["advantages"], case["response_mask"])
    cfg = AlgorithmConfig(clip_ratio_low=low, clip_ratio_high=high, loss_agg_mode=case["loss_agg_mode"])
    outputs = policy_loss(loss_type, inputs, cfg)
    outputs.loss.backward()
    assert logprobs.grad is not None
    assert_equal(name, outputs.loss, "loss")
    assert_equal(name, logprobs.grad, "grad_log_prob")
    assert_equal(name, outputs.metrics["clip_fraction"], "metrics.actor/pg_clipfrac")
    assert_equal(name, outputs.metrics["approx_kl"], "metrics.actor/ppo_kl")


@pytest.mark.parametrize("name", ["value_token-sum", "value_seq-mean-token-mean"])
def test_value_loss(name: str) -> None:
    case = inputs_of(name)
    cfg = AlgorithmConfig(value_clip=case["cliprange_value"], loss_agg_mode=case["loss_agg_mode"])
    values = case["vpreds"].requires_grad_()
    unused = torch.zeros_like(case["returns"])
    inputs = LossInputs(
        unused,
        unused,
        unused,
        case["response_mask"],
        values=values,
        old_values=case["values"],
        returns=case["returns"],
    )
    outputs = value_loss(inputs, cfg)
    outputs.loss.backward()
    assert values.grad is not None
    assert_equal(name, outputs.loss, "vf_loss")
    assert_equal(name, values.grad, "grad_vpreds")
    assert_equal(name, outputs.metrics["value_clip_fraction"], "vf_clipfrac")
