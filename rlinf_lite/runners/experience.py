"""The computations of the language loop's driver: filtering, advantages, minibatches. Pure functions on DataProtos.

Columns are those of `data.sequences`, and `scores` [B], `group` [B] (the number of the row's prompt in the step) and
`sample` [B] (the number of the response to that prompt).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from rlinf_lite import algorithms
from rlinf_lite.algorithms.kl import AdaptiveKLController, FixedKLController
from rlinf_lite.config.reasoning import KLConfig, ReasoningAlgorithmConfig
from rlinf_lite.data import DataProto
from rlinf_lite.data.sequences import balanced_order, sequence_lengths
from rlinf_lite.envs import EpisodeRecord
from rlinf_lite.training.metrics import advantage_metrics
from rlinf_lite.training.minibatches import minibatches

KLController = FixedKLController | AdaptiveKLController


def kl_controller(kl: KLConfig) -> KLController:
    """The controller that sets the weight of the KL in the reward."""
    adaptive = kl.place == "reward" and kl.controller == "adaptive"
    return AdaptiveKLController(kl.coef, kl.target, kl.horizon) if adaptive else FixedKLController(kl.coef)


def split_baselines(batch: DataProto, algorithm: ReasoningAlgorithmConfig) -> DataProto:
    """The batch without the greedy responses (sample number `group_size`). Their scores, minus the length penalty,
    become the column `baselines` [B]."""
    samples, groups = batch.batch["sample"], batch.batch["group"]
    greedy = samples == algorithm.group_size
    if not greedy.any():
        return batch
    scores = batch.batch["scores"] + _length_penalty(batch, algorithm)
    of_group = dict(zip(groups[greedy].tolist(), scores[greedy].tolist(), strict=True))
    kept = batch[~greedy]
    kept.batch["baselines"] = torch.tensor([of_group[group] for group in kept.batch["group"].tolist()])
    return kept


def with_signal(batch: DataProto) -> DataProto:
    """The rows of groups whose scores are not all equal."""
    scores = batch.batch["scores"][:, None]
    inputs = algorithms.AdvantageInputs(scores, torch.ones_like(scores), group_ids=batch.batch["group"])
    return batch[algorithms.filter_groups(inputs)]


def first_groups(batch: DataProto, num_groups: int) -> DataProto:
    """The rows of the first `num_groups` groups."""
    groups = batch.batch["group"]
    kept = torch.unique(groups)[:num_groups]
    return batch[torch.isin(groups, kept)]


def reward_metrics(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Means of the numbers that a reward function returned besides scores, each over the rows that have it; independent
    of the order of rows."""
    given: dict[str, list[float]] = {}
    for row in rows:
        for name, number in row.items():
            given.setdefault(f"reward/{name}", []).append(number)
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in sorted(given.items())}


def score_metrics(scored: DataProto) -> dict[str, float]:
    """`rollout/*` and `reward/*` metrics of the scores of all responses, including filtered groups."""
    columns = scored.batch
    metrics = {
        "rollout/all_rewards": float(columns["scores"].mean()),
        **reward_metrics(scored.non_tensor_batch["reward_metrics"]),
    }
    if "model_scores" in columns:
        metrics["rollout/model_rewards"] = float(columns["model_scores"].mean())
        if not columns["rule_scores"].isnan().all():
            metrics["rollout/rule_rewards"] = float(columns["rule_scores"].nanmean())
    return metrics


def num_groups(batch: DataProto) -> int:
    return len(torch.unique(batch.batch["group"]))


def in_order(batch: DataProto) -> DataProto:
    """The batch sorted by prompt and sample, regardless of which responses finished first."""
    order = np.lexsort((batch.batch["sample"].numpy(), batch.batch["group"].numpy()))
    return batch.reorder(order)


def add_advantages(
    batch: DataProto, algorithm: ReasoningAlgorithmConfig, controller: KLController, recomputed_by: int | None
) -> tuple[DataProto, dict[str, float]]:
    """Add the columns `advantages` and `returns` [B, R]. Returns the batch and `rollout/*` metrics. `recomputed_by`:
    the version of the weights with which `old_logprobs` were computed again; None if they are those of generation."""
    columns, mask = batch.batch, batch.batch["response_mask"]
    lengths, penalty = mask.sum(1), _length_penalty(batch, algorithm)
    last = (columns["scores"] + penalty)[:, None]
    rewards = torch.zeros(mask.shape).scatter_(1, (lengths - 1)[:, None], last)
    metrics = {"rollout/overlong_penalty": float(penalty.mean())} if algorithm.overlong.buffer_length else {}
    if algorithm.kl.place == "reward":
        used = controller.coef
        rewards, mean_kl = algorithms.kl_in_rewards(
            rewards, columns["old_logprobs"], columns["ref_logprobs"], mask, used, algorithm.kl.kind
        )
        controller.update(float(mean_kl), len(batch))
        metrics |= {"rollout/ref_kl": float(mean_kl), "rollout/kl_coef": used}
    inputs = algorithms.AdvantageInputs(
        rewards, mask, columns.get("values"), group_ids=columns["group"], baselines=columns.get("baselines")
    )
    outputs = algorithms.compute_advantages(algorithm.adv_type, inputs, algorithm)
    metrics |= {
        "rollout/rewards": float(columns["scores"].mean()),
        "rollout/response_length": float(lengths.float().mean()),
        "rollout/stopped_frac": float(columns["stopped"].float().mean()),
        "rollout/num_groups": float(num_groups(batch)),
        **advantage_metrics(outputs.advantages, outputs.returns, mask, columns.get("values")),
    }
    if recomputed_by is not None:
        same = mask & (columns["acted_versions"] == recomputed_by)  # other weights differ by more than rounding
        if same.any():
            drift = (columns["old_logprobs"] - columns["rollout_logprobs"]).abs()
            metrics["rollout/logprob_drift"] = float(algorithms.masked_mean(drift, same))
    advantages = algorithms.whiten(outputs.advantages, mask) if algorithms.whitens(algorithm) else outputs.advantages
    tensors = {**columns, "advantages": advantages, "returns": outputs.returns}
    return DataProto(tensors, batch.non_tensor_batch, batch.meta_info), metrics


def _length_penalty(batch: DataProto, algorithm: ReasoningAlgorithmConfig) -> Tensor:
    """The length penalty of each response (a number <= 0), [B]."""
    overlong = algorithm.overlong
    return algorithms.overlong_penalty(batch.batch["response_mask"], overlong.buffer_length, overlong.factor)


def updates(
    batch: DataProto, algorithm: ReasoningAlgorithmConfig, global_batch_size: int, seed: int, step: int
) -> Iterator[DataProto]:
    """The minibatches of all epochs, shuffled differently in each epoch. Their meta_info: `step`, `denominator`, and
    `first`, whether it is the first minibatch of the step."""
    everything, first = np.ones(len(batch), dtype=bool), True
    for epoch in range(algorithm.update_epochs):
        for rows in minibatches(everything, global_batch_size, seed, step, epoch):
            minibatch = batch[np.sort(rows)]
            denominator = algorithms.loss_denominator(minibatch.batch["response_mask"], algorithm.loss_agg_mode)
            minibatch.meta_info = {"step": step, "denominator": float(denominator.clamp(min=1)), "first": first}
            first = False
            yield minibatch


def for_ranks(batch: DataProto, columns: list[str], num_ranks: int) -> DataProto:
    """The given columns of the batch, in an order that gives each of `num_ranks` about the same number of tokens."""
    chosen = batch.select(["input_ids", "attention_mask", "response_mask", *columns], ["row"])
    return chosen.reorder(balanced_order(sequence_lengths(chosen), num_ranks))


def as_episodes(rows: list[int], answers: DataProto, rewards: DataProto) -> list[EpisodeRecord]:
    """Answers to the problems `rows` as episodes with one decision per token. Success is None if no rule judges it."""
    scores, by_rule = rewards.batch["scores"].tolist(), rewards.batch["rule_scores"].tolist()
    successes = [None if math.isnan(score) else score >= 1 for score in by_rule]
    lengths = answers.batch["response_mask"].sum(1).tolist()
    columns = (rows, answers.non_tensor_batch["data_source"].tolist(), lengths, scores, successes)
    return [
        EpisodeRecord(row, source or "problems", row, length, score, success, success)
        for row, source, length, score, success in zip(*columns, strict=True)
    ]


def answer_lines(texts: list[str], prompts: DataProto, rewards: DataProto) -> str:
    """Prompts (`texts`), answers and scores as lines of JSON."""
    given, lines = rewards.non_tensor_batch, []
    columns = (texts, given["response"], prompts.non_tensor_batch["ground_truth"], rewards.batch["scores"].tolist())
    for *row, metrics in zip(*columns, given["reward_metrics"], strict=True):
        answer = dict(zip(("prompt", "response", "ground_truth", "score"), row, strict=True))
        if metrics:
            answer["metrics"] = metrics
        lines.append(json.dumps(answer) + "\n")
    return "".join(lines)
