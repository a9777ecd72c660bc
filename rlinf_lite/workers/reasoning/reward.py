"""The reward worker: scores responses by rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.data import DataProto
from rlinf_lite.data.tokenizers import load_tokenizer
from rlinf_lite.rewards import RewardScorer
from rlinf_lite.scheduler import Dispatch, Worker, register


class RewardWorker(Worker):
    """Reads responses as text and compares them with the known answers."""

    failover = "worker"

    cfg: ReasoningConfig

    def __init__(self, cfg: ReasoningConfig) -> None:
        self.cfg = cfg

    def init(self) -> None:
        """Load the tokenizer."""
        self.tokenizer = load_tokenizer(self.cfg)
        self.scorer = RewardScorer(self.cfg.reward.fn, self.cfg.reward.timeout_s)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rewards(self, data: DataProto) -> DataProto:
        """`scores` float32 [B], and `response` [B], the texts."""
        with self.timer("score"):
            max_response = data.batch["response_mask"].shape[1]
            ids = data.batch["input_ids"][:, -max_response:]
            tokens = [row[mask].tolist() for row, mask in zip(ids, data.batch["response_mask"], strict=True)]
            texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True) if tokens else []  # not [""]
            truths, sources, infos = (
                data.non_tensor_batch[x].tolist() for x in ("ground_truth", "data_source", "extra_info")
            )
            result = self.scorer.score_batch(texts, truths, sources, infos)
        metrics: list[dict[str, Any]] = [
            {"spans": self.pop_spans(), "num_failed": result.num_failed, "traceback": result.first_traceback}
        ]
        responses = np.empty(len(texts), object)
        responses[:] = texts
        return DataProto({"scores": torch.from_numpy(result.scores)}, {"response": responses}, {"metrics": metrics})
