"""Corrections against a slow loop, their metrics over micro-batches, and interpolated log-probabilities."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlinf_lite.algorithms import InputError, LossInputs, correction, interpolated_proximal, policy_loss
from rlinf_lite.config import AlgorithmConfig
from rlinf_lite.config.schema import CorrectionConfig
from rlinf_lite.training.metrics import MetricSums

B, T = 8, 5
KINDS = [
    CorrectionConfig(kind="decoupled"),
    CorrectionConfig(kind="decoupled", high=1.5),
    CorrectionConfig(kind="tis"),
    CorrectionConfig(kind="tis", high=1.2),
    CorrectionConfig(kind="tis", level="sequence"),
    CorrectionConfig(kind="icepop"),
    CorrectionConfig(kind="icepop", low=0.8, high=1.3),
    CorrectionConfig(kind="reject", high=1.3),
    *(
        CorrectionConfig(kind="reject", level=level, metric=metric, low=low, high=high)
        for level in ("token", "sequence")
        for metric, low, high in (("ratio", 0.8, 1.3), ("k1", -0.2, 0.3), ("k2", None, 0.1), ("k3", None, 0.1))
    ),
]


def name_of(cfg: CorrectionConfig) -> str:
    return " ".join(str(value) for value in cfg.model_dump(exclude_defaults=True).values())


def random_logprobs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """proximal, behaviour and mask; nan where masked, and a row that is masked throughout."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=generator) < 0.6
    mask[1] = False
    poison = torch.where(mask, 0.0, torch.nan)
    proximal, noise = (torch.randn(B, T, generator=generator) for _ in range(2))
    return (proximal + poison).requires_grad_(), proximal + 0.5 * noise, mask.float()


def slow_weight(cfg: CorrectionConfig, logs: list[float], t: int) -> float:
    """The weight of position t of a row whose valid positions have these log w."""
    w = math.exp(logs[t])
    low = {"icepop": 0.5}.get(cfg.kind) if cfg.low is None else cfg.low
    usual = {"tis": 2.0, "icepop": 5.0, "reject": 5.0 if cfg.metric == "ratio" else None}.get(cfg.kind)
    high = usual if cfg.high is None else cfg.high
    if cfg.kind == "tis":
        assert high is not None
        return min(math.prod(map(math.exp, logs)) if cfg.level == "sequence" else w, high)
    measure = {
        "ratio": lambda x: x,
        "k1": lambda x: x,
        "k2": lambda x: x**2 / 2,
        "k3": lambda x: math.exp(x) - 1 - x,
    }[cfg.metric]
    of_row = cfg.level == "sequence"
    judged = sum(map(measure, logs)) / len(logs) if of_row else measure(logs[t])
    if cfg.metric == "ratio":
        judged = math.exp(judged)
    return w if (low is None or judged >= low) and (high is None or judged <= high) else 0.0


@pytest.mark.parametrize("cfg", KINDS, ids=name_of)
@pytest.mark.parametrize("seed", range(3))
def test_weights_equal_a_slow_loop(seed: int, cfg: CorrectionConfig) -> None:
    proximal, behaviour, mask = random_logprobs(seed)
    expected, num_rejected = torch.zeros(B, T), 0
    for b in range(B):
        valid = [t for t in range(T) if mask[b, t]]
        logs = [float(proximal.detach()[b, t] - behaviour[b, t]) for t in valid]
        for i, t in enumerate(valid):
            expected[b, t] = slow_weight(cfg, logs, i)
            num_rejected += expected[b, t] == 0
    found = correction(proximal, behaviour, mask, cfg)
    assert found.weights is not None and not found.weights.requires_grad
    torch.testing.assert_close(found.weights, expected, atol=1e-5, rtol=1e-5)
    assert float(found.metrics["rejected_fraction"]) == pytest.approx(float(num_rejected / mask.sum()))
    assert num_rejected > 0 or cfg.kind == "tis" or cfg.high is None


@pytest.mark.parametrize("kind", ["none", "decoupled", "tis", "icepop", "reject"])
def test_where_policies_agree_nothing_changes(kind: str) -> None:
    proximal, _, mask = random_logprobs(0)
    found = correction(proximal, proximal, mask, CorrectionConfig(kind=kind))
    assert found.weights is None or torch.equal(found.weights, mask)
    measured = {name: float(value) for name, value in found.metrics.items()}
    assert measured == {
        "importance_weight_mean": 1.0,
        "importance_weight_mean_square": 1.0,
        "importance_weight_max": 1.0,
        "behaviour_k3": 0.0,
        "rejected_fraction": 0.0,
    }


def test_a_rejected_position_does_not_make_the_step_of_the_others_longer() -> None:
    logprobs = torch.zeros(1, 4, requires_grad=True)
    inputs = LossInputs(logprobs, torch.zeros(1, 4), torch.ones(1, 4), torch.ones(1, 4))
    behaviour = torch.tensor([[0.0, 0.0, 0.0, -3.0]])  # a w of 20
    found = correction(inputs.old_logprobs, behaviour, inputs.mask, CorrectionConfig(kind="icepop"))
    policy_loss("ppo", replace(inputs, weights=found.weights), AlgorithmConfig()).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-0.25, -0.25, -0.25, 0.0]]  # of four, not of three


def test_far_apart_policies_give_finite_weights() -> None:
    found = correction(torch.zeros(1, 2), torch.tensor([[-1e4, 1e4]]), torch.ones(1, 2), CorrectionConfig(kind="tis"))
    assert found.weights is not None
    torch.testing.assert_close(found.weights, torch.tensor([[2.0, math.exp(-20)]]))
    assert all(math.isfinite(float(value)) for value in found.metrics.values())


def test_metrics_are_those_of_all_positions_however_a_batch_is_split() -> None:
    proximal, behaviour, mask = random_logprobs(0)
    cfg = CorrectionConfig(kind="icepop", low=0.8, high=1.3)
    valid = mask.bool()
    log_w = (proximal.detach() - behaviour)[valid].double()
    w = log_w.exp()
    ranks = [MetricSums(), MetricSums()]
    for rank, (start, stop) in ((0, (0, 3)), (0, (3, 4)), (1, (4, 7)), (1, (7, 8)), (1, (1, 2))):
        part = slice(start, stop)
        found = correction(proximal[part], behaviour[part], mask[part], cfg)
        ranks[rank].add(found.metrics, weight=float(mask[part].sum()))

    def over_ranks(values: Tensor, how: object = None) -> Tensor:
        """As all-reduce does on rank 0, where rank 1 has come to the same call."""
        kept.append(values)
        return values

    kept: list[Tensor] = []
    ranks[1].result(over_ranks)
    of_other = iter(list(kept))
    result = ranks[0].result(
        lambda own, how=None: own + next(of_other) if how is None else torch.maximum(own, next(of_other))
    )
    assert result == {
        "train/actor/importance_weight_mean": pytest.approx(float(w.mean()), rel=1e-5),
        "train/actor/importance_weight_max": pytest.approx(float(w.max()), rel=1e-5),
        "train/actor/effective_sample_size": pytest.approx(float(w.sum() ** 2 / (len(w) * w.square().sum())), rel=1e-5),
        "train/actor/behaviour_k3": pytest.approx(float((w - 1 - log_w).mean()), rel=1e-4),
        "train/actor/rejected_fraction": pytest.approx(float(((w < 0.8) | (w > 1.3)).double().mean()), rel=1e-5),
    }
    assert 0 < result["train/actor/effective_sample_size"] < 1


def test_metrics_are_of_what_is_measured_alone() -> None:
    """Where p was made of b, the two say nothing of each other."""
    proximal, behaviour, mask = random_logprobs(0)
    some = torch.arange(mask.shape[1]) % 2 == 0
    made = torch.where(some, proximal, behaviour)
    found = correction(made, behaviour, mask, CorrectionConfig(kind="tis"), measured=some.expand_as(mask))
    alone = correction(proximal, behaviour, mask * some, CorrectionConfig(kind="tis"))
    assert found.metrics == alone.metrics and alone.metrics["importance_weight_mean"] != 1
    whole = correction(made, behaviour, mask, CorrectionConfig(kind="tis")).weights
    assert found.weights is not None and whole is not None and torch.equal(found.weights, whole)


def test_a_rank_without_positions_agrees_on_the_names() -> None:
    with_some, without = MetricSums(), MetricSums()
    proximal, behaviour, mask = random_logprobs(0)
    found = correction(proximal, behaviour, mask, CorrectionConfig())
    with_some.add(found.metrics, 3.0)
    without.add(found.metrics, 0.0)
    shapes: list[list[int]] = [[], []]
    for seen, sums in zip(shapes, (with_some, without), strict=True):
        sums.result(lambda values, how=None, seen=seen: (seen.append(len(values)), values)[1])
    assert shapes[0] == shapes[1]


def test_a_proximal_policy_between_the_two_by_their_versions() -> None:
    logprobs, behaviour = torch.full((2, 3), -1.0, requires_grad=True), torch.full((2, 3), -3.0)
    versions = torch.tensor([[10, 9, 8], [6, 5, 0]], dtype=torch.int32)
    found = interpolated_proximal(logprobs, behaviour, versions, version=10)
    shares = [[0.0, 0.0, 1 / 2], [3 / 4, 4 / 5, 9 / 10]]  # (staleness - 1) / staleness
    torch.testing.assert_close(found, -3.0 + 2.0 * torch.tensor(shares))
    assert not found.requires_grad
    by_row = interpolated_proximal(logprobs, behaviour, torch.tensor([[8], [10]]), version=10)
    torch.testing.assert_close(by_row, torch.tensor([[-2.0] * 3, [-3.0] * 3]))
    with pytest.raises(InputError, match="version 11 acted, but the policy in training has the older version 10"):
        interpolated_proximal(logprobs, behaviour, torch.tensor([[11], [0]]), version=10)


def test_bounds_that_do_not_fit_are_refused() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(InputError, match=r"algorithm.correction.high: is 0.5, which shuts out what has not changed"):
        correction(one, one, one, CorrectionConfig(kind="tis", high=0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_metrics_of_several_types_keep_their_values(dtype: torch.dtype) -> None:
    sums = MetricSums()
    sums.add({"half": torch.tensor(0.5, dtype=dtype), "tokens": torch.tensor(20_000_001)}, weight=3.0)
    sums.add({"half": torch.tensor(0.25, dtype=dtype), "tokens": torch.tensor(70_001)}, weight=1.0)
    result = sums.result(lambda values, how=None: values)
    assert result == {"train/actor/half": 0.4375, "train/actor/tokens": (3 * 20_000_001 + 70_001) / 4}
