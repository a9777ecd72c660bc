"""The computations of the language loop's driver, on batches small enough to check by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlinf_lite.algorithms import AdaptiveKLController, FixedKLController
from rlinf_lite.config import load_config
from rlinf_lite.config.reasoning import ReasoningAlgorithmConfig
from rlinf_lite.data import DataProto
from rlinf_lite.runners import ReasoningRunner, experience
from rlinf_lite.runners.reasoning import Generating
from rlinf_lite.runners.scored import ScoringLog


def batch(scores: list[float], groups: list[int], samples: list[int], lengths: list[int] | None = None) -> DataProto:
    lengths = lengths or [2] * len(scores)
    mask = torch.arange(3) < torch.tensor(lengths)[:, None]
    tensors = {
        "scores": torch.tensor(scores),
        "group": torch.tensor(groups),
        "sample": torch.tensor(samples),
        "response_mask": mask,
        "attention_mask": torch.cat([torch.ones(len(scores), 1, dtype=torch.bool), mask], 1),
        "input_ids": torch.zeros(len(scores), 4, dtype=torch.int64),
        "stopped": torch.ones(len(scores), dtype=torch.bool),
        **{name: torch.zeros(mask.shape) for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "values")},
        "acted_versions": torch.zeros(mask.shape, dtype=torch.int32),
    }
    return DataProto.from_dict(tensors, {"row": list(range(len(scores)))})


def algorithm(*overrides: str):
    return load_config("math/math_arithmetic_grpo", [f"algorithm.{override}" for override in overrides]).algorithm


def test_greedy_answers_become_baselines() -> None:
    rows = batch([0.0, 1.0, 0.5, 1.0, 0.0, 0.25], [7, 7, 7, 3, 3, 3], [0, 1, 2] * 2, lengths=[1, 1, 1, 1, 1, 3])
    found = experience.split_baselines(rows, ReasoningAlgorithmConfig(group_size=2))
    assert found.batch["sample"].tolist() == [0, 1, 0, 1]
    assert found.batch["baselines"].tolist() == [0.5, 0.5, 0.25, 0.25]
    found = experience.split_baselines(
        rows, ReasoningAlgorithmConfig(group_size=2, overlong={"buffer_length": 2, "factor": 0.5})
    )
    assert found.batch["baselines"].tolist() == [0.5, 0.5, -0.25, -0.25]  # as long as the sampled ones' scores would be


def test_groups_without_a_signal_go_and_the_first_ones_stay() -> None:
    rows = batch([1.0, 1.0, 0.0, 1.0, 0.0, 0.5], [0, 0, 1, 1, 2, 2], [0, 1] * 3)
    kept = experience.with_signal(rows)
    assert kept.batch["group"].tolist() == [1, 1, 2, 2] and experience.num_groups(kept) == 2
    assert experience.first_groups(kept, 1).batch["group"].tolist() == [1, 1]
    assert len(experience.first_groups(kept, 0)) == 0


def test_of_prompts_in_place_of_filtered_ones_those_with_short_answers_have_no_lead() -> None:
    """Two prompts are missing, and four are answered: in two parts, of which the first has the short answers."""

    class Runner(ReasoningRunner):
        reference = critic = None
        problems = SimpleNamespace(train=None)

        def __init__(self) -> None:
            settings = ["filter_groups=true", "max_refills=1", "group_size=2", "recompute_logprobs=false"]
            overrides = [
                "data.num_prompts=4",
                "actor.global_batch_size=8",
                *(f"algorithm.{setting}" for setting in settings),
            ]
            self.cfg, self.scoring = load_config("math/math_arithmetic_grpo", overrides), ScoringLog()

        def _generate(self, step, refill=0):
            parts = [([0, 1], 1), ([2, 3], 3)] if refill == 0 else [([6, 7], 1), ([4, 5], 3)]
            made = []
            for groups, length in parts:
                scores = [1.0, 0.0, 1.0, float(refill == 0)]  # of the first ones, every other has no signal
                part = batch(scores, sorted(groups * 2), [0, 1] * 2, [length] * 4)
                rows = part.select([name for name in part.batch if name != "scores"], ["row"])
                made.append((rows, DataProto({"scores": part.batch["scores"]}, {"reward_metrics": np.array([{}] * 4)})))
            return Generating(None, made)

        def _wait(self, *handles, what, **limits):
            return handles

    found, _ = Runner().collect(0)
    assert torch.unique(found.batch["group"]).tolist() == [0, 2, 4, 5]


def test_rows_are_sorted_by_prompt_and_sample() -> None:
    rows = experience.in_order(batch([0.0, 1.0, 2.0, 3.0], [1, 0, 1, 0], [1, 1, 0, 0]))
    assert rows.batch["scores"].tolist() == [3.0, 1.0, 2.0, 0.0]


def test_the_score_comes_with_the_last_token_and_kl_with_each() -> None:
    rows = batch([1.0, 0.0], [0, 1], [0, 0], lengths=[2, 3])
    rows.batch["old_logprobs"] = torch.full((2, 3), 0.5)
    cfg = algorithm("adv_type=gae", "gamma=1", "gae_lambda=1", "kl={place: reward, kind: k1, coef: 0.1}")
    controller = experience.kl_controller(cfg.kl)
    found, metrics = experience.add_advantages(rows, cfg, controller, recomputed_by=0)
    expected = torch.tensor([[0.9, 0.95, 0.0], [-0.15, -0.10, -0.05]])
    torch.testing.assert_close(found.batch["returns"], expected)
    assert metrics["rollout/ref_kl"] == pytest.approx(0.5) and metrics["rollout/kl_coef"] == pytest.approx(0.1)
    assert "advantages" not in rows.batch  # the caller's batch is unchanged


def test_a_long_answer_costs_reward_and_keeps_its_score() -> None:
    rows = batch([1.0, 1.0, 0.0], [0, 0, 1], [0, 1, 0], lengths=[1, 2, 3])
    cfg = algorithm("adv_type=reinforce_plus_plus", "overlong={buffer_length: 2, factor: 0.5}")
    found, metrics = experience.add_advantages(rows, cfg, experience.kl_controller(cfg.kl), recomputed_by=0)
    assert found.batch["returns"][:, 0].tolist() == [1.0, 0.75, -0.5]
    assert metrics["rollout/overlong_penalty"] == pytest.approx(-0.25)
    assert metrics["rollout/rewards"] == pytest.approx(2 / 3) and metrics["rollout/response_length"] == 2
    assert len(experience.with_signal(rows)) == 0  # the first two have the same score


def test_the_controller_follows_the_config() -> None:
    adaptive = "kl={place: reward, controller: adaptive, coef: 0.2, target: 0.1, horizon: 100}"
    assert isinstance(experience.kl_controller(algorithm().kl), FixedKLController)
    assert isinstance(experience.kl_controller(algorithm(adaptive).kl), AdaptiveKLController)


def test_minibatches_cover_every_row_in_every_epoch_and_count_the_whole() -> None:
    rows = batch([0.0] * 10, list(range(10)), [0] * 10, lengths=[1, 2, 3, 1, 2, 3, 1, 2, 3, 3])
    parts = list(experience.updates(rows, algorithm("update_epochs=2"), 5, seed=3, step=4))
    assert [len(part) for part in parts] == [5, 5, 5, 5]
    orders = [part.non_tensor_batch["row"].tolist() for part in parts]
    assert sorted(orders[0] + orders[1]) == sorted(orders[2] + orders[3]) == list(range(10))
    assert orders[0] != orders[2]
    for number, part in enumerate(parts):
        num_tokens = float(part.batch["response_mask"].sum())
        assert part.meta_info == {"step": 4, "denominator": num_tokens, "first": number == 0}
    again = experience.updates(rows, algorithm("update_epochs=2"), 5, seed=3, step=4)
    assert [part.non_tensor_batch["row"].tolist() for part in again] == orders


def test_whitening_where_the_method_has_it() -> None:
    rows = batch([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], [0, 1, 0, 1])
    for adv_type, whitened in (("gae", True), ("grpo", False)):
        cfg = algorithm(f"adv_type={adv_type}")
        found, metrics = experience.add_advantages(rows, cfg, experience.kl_controller(cfg.kl), recomputed_by=0)
        advantages = found.batch["advantages"][rows.batch["response_mask"]]
        largest = metrics["rollout/advantages_max"]  # before whitening
        assert (abs(float(advantages.max()) - largest) > 0.1) == whitened
        assert advantages.var().item() == pytest.approx(1, abs=1e-4) or not whitened
