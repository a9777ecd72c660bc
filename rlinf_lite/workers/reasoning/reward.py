"""The reward worker: it scores responses by rules, by a reward model, or by both.

A response's score is `reward.weights.rule` times the rule's score plus `reward.weights.model` times the logit of the
reward model. Rows with `reward_model.style: model` have no rule, which counts as 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.data import DataProto
from rlinf_lite.data.tokenizers import load_tokenizer
from rlinf_lite.rewards import RewardScorer
from rlinf_lite.rewards.scorer import Scoring
from rlinf_lite.scheduler import Dispatch, Worker, register
from rlinf_lite.threads import torch_threads, training_threads
from rlinf_lite.training.precision import be_deterministic
from rlinf_lite.workers.reasoning.reward_model import RewardModel


class RewardWorker(Worker):
    """Scores responses as text. Each rank has the whole reward model, and scores its own rows."""

    failover = "worker"

    cfg: ReasoningConfig
    model: RewardModel | None = None

    def __init__(self, cfg: ReasoningConfig) -> None:
        self.cfg = cfg

    def init(self) -> None:
        """Load the tokenizer, and the reward model if the config names one."""
        cfg = self.cfg
        self.tokenizer = load_tokenizer(cfg)
        self.scorer = RewardScorer(cfg.reward.fn, cfg.reward.timeout_s)
        if cfg.reward.model is not None:
            be_deterministic(self.device, cfg.runner.deterministic)
            with torch_threads(training_threads(cfg.actor.num_threads, self.local_world_size)):
                self.model = RewardModel(cfg.reward, cfg.actor.max_tokens_per_micro_batch, self.device)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rewards(self, data: DataProto) -> DataProto:
        """Score responses. Returns float32 [B] `scores`, `rule_scores` (nan for rows without a rule) and, with a reward
        model, `model_scores`; arrays [B] `response` (texts) and `reward_metrics` (dicts of further numbers that a
        reward function returned)."""
        weights, scorings, num_cut = self.cfg.reward.weights, dict[str, Scoring](), 0
        with self.timer("score"):
            max_response = data.batch["response_mask"].shape[1]
            ids = data.batch["input_ids"][:, -max_response:]
            tokens = [row[mask].tolist() for row, mask in zip(ids, data.batch["response_mask"], strict=True)]
            texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True) if tokens else []  # not [""]
            arrays = {"response": np.empty(len(texts), object), "reward_metrics": np.empty(len(texts), object)}
            arrays["response"][:], arrays["reward_metrics"][:] = texts, [{} for _ in texts]
            columns = {"rule_scores": torch.full((len(texts),), torch.nan)}
            scores = torch.zeros(len(texts))
            if weights.rule:
                scorings["reward.fn"] = self._by_rule(data, texts, columns["rule_scores"], arrays["reward_metrics"])
                scores += weights.rule * columns["rule_scores"].nan_to_num()
            if self.model is not None:
                with torch_threads(training_threads(self.cfg.actor.num_threads, self.local_world_size)):
                    by_model = self.model.score_batch(*self._as_written(data, tokens, texts))
                columns["model_scores"] = torch.from_numpy(by_model.scores)
                scores += weights.model * columns["model_scores"]
                scorings["reward.model"], num_cut = by_model.scoring(data.non_tensor_batch["row"]), by_model.num_cut
        metrics: list[dict[str, Any]] = [{"spans": self.pop_spans(), "num_cut": num_cut, "scorings": scorings}]
        return DataProto({"scores": scores, **columns}, arrays, {"metrics": metrics})

    def _as_written(self, data: DataProto, tokens: list[list[int]], texts: list[str]) -> tuple[list[Any], list[str]]:
        """The prompts and responses for the reward model. If the response continues plain text, or an answer that the
        prompt begins, it is decoded together with the prompt, whose text is then removed: decoded alone, some responses
        lose their leading space.
        """
        prompts, found = data.non_tensor_batch["prompt"].tolist(), []
        width = data.batch["input_ids"].shape[1] - data.batch["response_mask"].shape[1]
        ids, mask = (data.batch[name][:, :width] for name in ("input_ids", "attention_mask"))
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            before = ids[row][mask[row].bool()].tolist()
            if isinstance(prompt, str) or prompt[-1]["role"] == "assistant":
                parts = [before, before + tokens[row]]
                alone, whole = self.tokenizer.batch_decode(parts, skip_special_tokens=True)
                text = whole[len(alone) :] if whole.startswith(alone) else text
            found.append(text)
        return prompts, found

    def _by_rule(self, data: DataProto, texts: list[str], scores: torch.Tensor, metrics: np.ndarray) -> Scoring:
        """Fill in the scores and metrics of the rows that have a ground truth."""
        names = ("ground_truth", "data_source", "extra_info")
        rows = [*zip(texts, *(data.non_tensor_batch[name].tolist() for name in names), strict=True)]
        ruled = [row for row, (_, truth, _, _) in enumerate(rows) if truth is not None]
        columns = [[rows[row][column] for row in ruled] for column in range(4)]
        result = self.scorer.score_batch(*columns)
        scores[ruled] = torch.from_numpy(result.scores)
        metrics[ruled] = result.metrics
        return result.scoring(data.non_tensor_batch["row"][ruled])
