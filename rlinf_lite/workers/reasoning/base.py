"""The base class of workers with a language model: its passes over the rows of a batch, in micro-batches.

The micro-batches are made here: rows of similar length together, at most `actor.max_tokens_per_micro_batch` tokens each
with padding (`data.sequences.micro_batches`), and the same number on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import OptimConfig
from rlinf_lite.data import DataProto
from rlinf_lite.data.sequences import Rows, empty_row, micro_batches, take_rows
from rlinf_lite.data.tokenizers import tokenizer_dir
from rlinf_lite.models.text.causal_lm import CausalLM, LanguageModel
from rlinf_lite.models.text.presets import preset
from rlinf_lite.models.text.supported import check_supported
from rlinf_lite.scheduler import Worker
from rlinf_lite.threads import torch_threads, training_threads
from rlinf_lite.training.learner import Learner
from rlinf_lite.training.metrics import MetricSums
from rlinf_lite.training.precision import be_deterministic

MESH = "dp x tp"
"""The mesh of a role's ranks; ranks with the same rows form one model together."""
MicroBatch = tuple[DataProto, Rows, float]
"""(batch, rows of it, weight). The weight is 1, or 0 for rows that only keep this rank in step with the others."""
Measured = tuple[dict[str, Tensor], Tensor]
"""(metrics, with the same names on all ranks; the number of positions that they are means over)."""
LossFn = Callable[[Any, DataProto, Rows], tuple[Tensor, list[Measured]]]
"""Maps (model, batch, rows) to the rows' share of the loss over all ranks, and what was measured."""


class LanguageModelWorker(Worker):
    """A worker with a language model that is spread over the ranks of its group."""

    cfg: ReasoningConfig
    learner: Learner
    of_step: MetricSums
    """Metrics of the present step's updates."""

    def __init__(self, cfg: ReasoningConfig) -> None:
        self.cfg = cfg

    def _take(self, model: LanguageModel, name: str, optim: OptimConfig | None = None, *steps: int) -> None:
        """Spread `model` over the ranks, and with `optim` prepare to train it; `steps`: further arguments of
        `Learner.start_training`. Raises UnsupportedModelError."""
        cfg = self.cfg
        be_deterministic(self.device, cfg.runner.deterministic)  # before the first matrix product
        if optim is not None:
            model.prepare(cfg.model)
        with torch_threads(training_threads(cfg.actor.num_threads, self.local_world_size)):
            check_supported(model.to(self.device), max_length(cfg))  # before the model is sharded
        self.learner = Learner(self, model, cfg, name, cfg.actor.tensor_model_parallel_size)
        self.join_mesh(MESH, self.learner.dp_rank, self.learner.dp_size, collects=self.learner.is_first_of_model)
        if optim is not None:
            self.learner.start_training(optim, *steps)

    def _score(self, model: LanguageModel, rows: Rows, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [b, R'] of the responses under a policy. `temperature`: None for that of
        rollouts."""
        temperature = self.cfg.rollout.temperature if temperature is None else temperature
        output = model(rows.input_ids, rows.attention_mask, rows.response_length, temperature)
        return output.logprobs, output.entropy

    def _column(self, batch: DataProto, forward: Callable[[LanguageModel, Rows], Tensor]) -> Tensor:
        """A column [B, R] of `forward`'s values per response position, on the CPU; 0 after the end of a response."""
        mask = batch.batch["response_mask"]
        column = torch.zeros(mask.shape)

        def compute(model: LanguageModel, micro_batch: MicroBatch) -> tuple[Tensor, MicroBatch]:
            with self.learner.scoring(), self.learner.autocast():
                return forward(model, micro_batch[1]).detach(), micro_batch  # a graph goes before the next is recorded

        for values, (_, rows, weight) in self.learner.passes(compute, self._micro_batches(batch)):
            if weight:
                valid = mask[rows.index, : rows.response_length]
                column[rows.index, : rows.response_length] = torch.where(valid, values.float().cpu(), 0.0)
        return column

    def _update(self, batch: DataProto, loss_fn: LossFn, sums: MetricSums) -> dict[str, Any]:
        """Do one optimizer update on the rows of all ranks, at the learning rate of `meta_info["step"]`, and add its
        metrics to `sums`. Returns the metrics over all ranks, spans and memory."""
        learner, step = self.learner, batch.meta_info["step"]

        def weighted(model: LanguageModel, micro_batch: MicroBatch, found: MetricSums) -> Tensor:
            of_batch, rows, weight = micro_batch
            with learner.autocast():
                loss, measured = loss_fn(model, of_batch, rows)
            for metrics, positions in measured:
                found.add(metrics, positions * weight)
            return loss * weight

        def samples() -> str:
            return f"data rows {np.unique(batch.non_tensor_batch['row']).tolist()}"

        with self.timer("update"):
            learner.set_learning_rate(step)
            learner.update(self._micro_batches(batch), weighted, sums, f"{learner.name}, step {step}", samples)
        return learner.result(sums)

    def _micro_batches(self, batch: DataProto) -> Iterator[MicroBatch]:
        """The micro-batches of this rank. Every rank gets the same number, at least one, since sharded models compute
        in step: it is filled up with repeated rows of weight 0, or with an empty row on a rank without rows."""
        parts = micro_batches(batch, self.cfg.actor.max_tokens_per_micro_batch)
        own = torch.tensor([max(len(parts), 1)])  # exchanged before any rank computes: passes use collectives, too
        num_most = int(self.learner.over_ranks(own, ReduceOp.MAX))
        for rows in parts:
            yield batch, take_rows(batch, rows, self.device), 1.0
        filling = batch if len(batch) else empty_row(batch)
        for _ in range(num_most - len(parts)):
            yield filling, take_rows(filling, np.zeros(1, np.int64), self.device), 0.0


def build_model(cfg: ReasoningConfig, directory: str | None, attn_implementation: str, adapts: bool = True) -> CausalLM:
    """Build the policy: from `directory`, or of `model.size` with random weights; with adapters by `model.lora`, if it
    `adapts`. The same in every process."""
    torch.manual_seed(cfg.runner.seed)
    if directory is not None:
        model = CausalLM.from_pretrained(directory, attn_implementation)
    else:
        model = CausalLM.from_config(preset(cfg.model.size), tokenizer_dir(cfg), attn_implementation)
    if cfg.actor.tokenizer.tokenizer_model:
        model.take_tokenizer(tokenizer_dir(cfg))
    if adapts:
        model.add_adapters(cfg.model.lora.model_dump())
    return model


def max_length(cfg: ReasoningConfig) -> int:
    """The number of tokens of the longest prompt and the longest response together."""
    return cfg.data.max_prompt_length + cfg.rollout.max_response_length
