"""A language model on one rank of a group: passes over the rows of a batch in micro-batches, updates, files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import OptimConfig
from rlinf_lite.data import DataProto
from rlinf_lite.data.sequences import Rows, empty_row, micro_batches, take_rows
from rlinf_lite.models.text.causal_lm import LanguageModel
from rlinf_lite.models.text.supported import check_supported
from rlinf_lite.scheduler import Worker
from rlinf_lite.training import sharding
from rlinf_lite.training.metrics import MetricSums
from rlinf_lite.training.precision import autocast
from rlinf_lite.training.strategies import build_strategy
from rlinf_lite.workers.actor import NonFiniteUpdateError

log = logging.getLogger(__name__)

LossFn = Callable[[DataProto, Rows], tuple[Tensor, dict[str, Tensor], float]]
"""The loss of some rows of a batch, as their part of all ranks' batches; metrics; and their weight in those, valid
positions."""


class Learner:
    """`model` spread over the ranks of `worker`'s group by `actor.strategy`. All ranks call every method together."""

    def __init__(self, worker: Worker, model: LanguageModel, cfg: ReasoningConfig, name: str) -> None:
        """`name`: in metrics, actor or critic."""
        self.worker, self.cfg, self.name = worker, cfg, name
        self.model = model.to(worker.device)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.num_threads = cfg.actor.num_threads or max((os.cpu_count() or 1) // worker.local_world_size, 1)
        with self._threads():
            check_supported(self.model, max_length(cfg))  # while it is whole
        self.optimizer: torch.optim.Optimizer | None = None
        self._bad_updates_in_a_row = 0
        self.strategy = build_strategy(cfg.actor.strategy)
        if worker.world_size > 1:
            if not dist.is_initialized():  # fused roles share one
                sharding.init_process_group(
                    worker.rank,
                    worker.world_size,
                    worker.master_addr,
                    worker.master_port,
                    worker.device,
                    cfg.runner.phase_timeout_s,
                )
            self.strategy.prepare(self.model, worker.world_size, worker.device, cfg.actor.precision)

    def start_training(self, optim: OptimConfig) -> None:
        """Make a new optimizer."""
        self.optimizer = sharding.build_optimizer(self.model, optim)

    def infer(self, batch: DataProto, forward: Callable[[Rows], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Columns [B, R] on the CPU of what `forward` gives per response position of some rows; 0 behind responses."""
        mask = batch.batch["response_mask"]
        columns: dict[str, Tensor] = {}
        with self._threads(), torch.no_grad():
            for _, rows, weight in self._micro_batches(batch):
                with autocast(self.worker.device, self.cfg.actor.precision):
                    self.worker.report_progress()
                    found = forward(rows)
                for name, values in found.items():
                    column = columns.setdefault(name, torch.zeros(mask.shape))
                    if weight:
                        valid = mask[rows.index, : rows.response_length]
                        column[rows.index, : rows.response_length] = torch.where(valid, values.float().cpu(), 0.0)
        return columns

    def update(self, batch: DataProto, loss_fn: LossFn, sums: MetricSums, optim: OptimConfig, lr: float) -> None:
        """One optimizer step on the rows of all ranks, `lr` times the learning rates; skipped where not finite."""
        assert self.optimizer is not None, "start_training comes first"
        found = MetricSums()
        with self._threads():
            for of_batch, rows, weight in self._micro_batches(batch):
                with autocast(self.worker.device, self.cfg.actor.precision):
                    loss, metrics, positions = loss_fn(of_batch, rows)
                (loss * weight).backward()
                found.add(metrics, positions * weight)
                self.worker.report_progress()
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            if self.worker.world_size > 1:
                self.strategy.reduce_gradients(parameters)
            norm = float(sharding.clip_grad_norm(parameters, optim.clip_grad))
            for group in self.optimizer.param_groups:
                group["lr"] = group["base_lr"] * lr
            finite = bool(np.isfinite(norm))
            if finite:
                self.optimizer.step()
                sums.merge(found)
                sums.add_scalar(f"train/{self.name}/grad_norm", norm)
            self.optimizer.zero_grad(set_to_none=True)
        sums.add_scalar(f"train/{self.name}/lr", self.optimizer.param_groups[0]["lr"])
        sums.add_scalar(f"train/{self.name}/skipped_updates", float(not finite), how="sum")
        self._count_bad_updates(finite, batch)

    def result(self, sums: MetricSums) -> dict[str, Any]:
        """Metrics over all ranks, this rank's spans and memory."""
        return {
            "metrics": sums.result(self._sum_over_ranks),
            "spans": self.worker.pop_spans(),
            "peak_memory_bytes": peak_memory_bytes(self.worker.device),
        }

    def save_model(self, directory: Path) -> None:
        """Write the model as a directory that `from_pretrained` reads; rank 0 writes."""
        state = sharding.full_policy_state(self.model)
        if self.worker.rank == 0:
            self.model.save_pretrained(directory, state)

    def save(self, model_dir: Path, training_dir: Path) -> None:
        """Write the model, and the optimizer's and this rank's random state."""
        assert self.optimizer is not None
        # what all ranks do together comes first: writing may fail on one of them
        state = sharding.full_policy_state(self.model)
        moments = sharding.full_optimizer_state(self.model, self.optimizer)
        training_dir.mkdir(parents=True, exist_ok=True)
        if self.worker.rank == 0:
            self.model.save_pretrained(model_dir, state)
            save_file(moments, training_dir / "optimizer.safetensors")
        save_file({"torch": torch.get_rng_state()}, training_dir / f"{self.name}_rng_{self.worker.rank}.safetensors")

    def load(self, model_dir: Path, training_dir: Path) -> None:
        """Continue from what `save` wrote."""
        assert self.optimizer is not None
        sharding.load_policy_state(self.model, self.model.read_state(model_dir))
        sharding.load_optimizer(self.model, self.optimizer, training_dir / "optimizer.safetensors")
        rng_file = training_dir / f"{self.name}_rng_{self.worker.rank}.safetensors"
        if rng_file.exists():  # a resumed run may have more ranks
            torch.set_rng_state(load_file(rng_file)["torch"])

    def _micro_batches(self, batch: DataProto) -> Iterator[tuple[DataProto, Rows, float]]:
        """A batch, rows of it, and 1. Every rank gets as many, at least one, as sharded models compute in step: some
        again, with 0; a rank without rows computes an empty one."""
        parts = micro_batches(batch, self.cfg.actor.max_tokens_per_micro_batch)
        num_filling = self._largest(max(len(parts), 1)) - len(parts)  # before any rank computes: its passes meet, too
        for part in parts:
            yield batch, take_rows(batch, part, self.worker.device), 1.0
        filling = batch if len(batch) else empty_row(batch)
        for _ in range(num_filling):
            yield filling, take_rows(filling, np.zeros(1, np.int64), self.worker.device), 0.0

    def _largest(self, number: int) -> int:
        if self.worker.world_size == 1:
            return number
        largest = torch.tensor([number], device=self.worker.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.worker.world_size > 1:
            values = values.to(self.worker.device)
            dist.all_reduce(values)
        return values.cpu()

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """All of this node's cores, while nothing else computes here."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _count_bad_updates(self, finite: bool, batch: DataProto) -> None:
        self._bad_updates_in_a_row = 0 if finite else self._bad_updates_in_a_row + 1
        if finite:
            return
        limit = self.cfg.control.max_bad_updates
        rows = np.unique(batch.non_tensor_batch["row"]).tolist()
        message = f"{self.name}: loss or gradient is not finite (data rows {rows}); the update is skipped"
        log.warning("%s, %d in a row", message, self._bad_updates_in_a_row)
        if self._bad_updates_in_a_row >= limit:
            raise NonFiniteUpdateError(
                f"{message}. control.max_bad_updates: {limit} in a row were reached. Lower its learning rate, or "
                "check the rewards."
            )


def max_length(cfg: ReasoningConfig) -> int:
    """Tokens of the longest prompt with the longest response."""
    return cfg.data.max_prompt_length + cfg.rollout.max_response_length


def peak_memory_bytes(device: str) -> int:
    """Of this process; on a GPU, of its tensors."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
