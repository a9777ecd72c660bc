"""The critic, which estimates a value for every token of a response.

A run has a critic if its estimator reads values (`algorithms.needs_values`; see `config.names.roles_of`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_lite.algorithms import LossInputs, value_loss
from rlinf_lite.data import DataProto
from rlinf_lite.data.sequences import Rows
from rlinf_lite.models.text.causal_lm import CausalValueModel, LanguageModel
from rlinf_lite.scheduler import nd_compute, nd_compute_metric, register
from rlinf_lite.training.metrics import MetricSums
from rlinf_lite.workers.reasoning.base import MESH, LanguageModelWorker, Measured


class LanguageCritic(LanguageModelWorker):
    """A language model that predicts the reward to come. Batches are those of `data.sequences`."""

    def init(self, directory: str, total_steps: int) -> None:
        """Load a critic from `directory`, or a policy, whose output layer is replaced by a random one."""
        cfg = self.cfg
        torch.manual_seed(cfg.runner.seed)
        model = CausalValueModel.from_pretrained(directory, cfg.model.attn_implementation)
        model.merge_adapters()  # adapters of the policy that it starts from
        self._take(model, "critic", cfg.critic.optim, total_steps)

    @register(dispatch_mode=nd_compute(MESH))
    def compute_values(self, data: DataProto) -> DataProto:
        """`values` [B, R] of the states before each token of the responses."""
        with self.timer("values"):
            return DataProto({"values": self._column(data, self._values)})

    @register(dispatch_mode=nd_compute_metric(MESH))
    def update_critic(self, data: DataProto) -> dict[str, Any]:
        """Do one optimizer update on the rows of all ranks. Columns [B, R]: `returns`, and `values`, the old ones.
        meta_info as in `LanguageActor.update_actor`."""
        if data.meta_info["first"]:
            self.of_step = MetricSums()
        return self._update(data, self._loss, self.of_step)

    def save_checkpoint(self, directory: str) -> None:
        """Write `critic/` below `directory`."""
        critic = Path(directory) / "critic"
        self.learner.save(critic / "model", critic)

    def load_checkpoint(self, directory: str) -> None:
        """Load the files that `save_checkpoint` wrote."""
        critic = Path(directory) / "critic"
        self.learner.load(critic / "model", critic)

    def _values(self, model: LanguageModel, rows: Rows) -> Tensor:
        values: Tensor = model(rows.input_ids, rows.attention_mask, rows.response_length)
        return values

    def _loss(self, model: LanguageModel, data: DataProto, rows: Rows) -> tuple[Tensor, list[Measured]]:
        old_values, returns, mask = (rows.response(data.batch[x]) for x in ("values", "returns", "response_mask"))
        unused = torch.zeros_like(returns)
        inputs = LossInputs(
            logprobs=unused,
            old_logprobs=unused,
            advantages=unused,
            mask=mask,
            values=self._values(model, rows),
            old_values=old_values,
            returns=returns,
            denominator=data.meta_info["denominator"],
            dp_size=self.learner.dp_size,
        )
        outputs = value_loss(inputs, self.cfg.algorithm)
        return outputs.loss, [(outputs.metrics, mask.sum())]
