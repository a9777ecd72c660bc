"""The actor worker: advantages over the global batch, then minibatch updates, sharded by FSDP2 over several ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf_lite.algorithms import (
    AdvantageInputs,
    LossInputs,
    actor_critic_loss,
    compute_advantages,
    entropy_at_level,
    expand_to_level,
    explained_variance,
    filter_groups,
    loss_denominator,
    needs_values,
    sum_to_level,
    whiten,
    whitens,
)
from rlinf_lite.config import Config
from rlinf_lite.data.demonstrations import Demonstrations, batch_indices
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import Policy, build_policy
from rlinf_lite.scheduler import Worker
from rlinf_lite.training import sharding
from rlinf_lite.training.metrics import MetricSums
from rlinf_lite.training.minibatches import micro_batches, minibatches
from rlinf_lite.training.positions import advantage_inputs
from rlinf_lite.training.precision import autocast
from rlinf_lite.training.schedule import lr_factor
from rlinf_lite.weights import WeightSender
from rlinf_lite.workers.layout import Layout
from rlinf_lite.workers.trajectory import Trajectories

log = logging.getLogger(__name__)


class NonFiniteUpdateError(RuntimeError):
    """`control.max_bad_updates` updates in a row had a loss or gradient that is not finite."""


@dataclass
class _Batch:
    """This rank's samples, [n = rows * T, ...] each, and what is known of all ranks' samples."""

    forward_inputs: dict[str, Tensor]
    logprobs: Tensor  # [n, C, D]
    values: Tensor  # [n, 1 or C]
    advantages: Tensor  # [n, 1 or C]
    returns: Tensor  # [n, 1 or C]
    mask: Tensor  # bool [n, C]
    global_mask: Tensor  # bool [N, C]
    valid: np.ndarray  # bool [N]: samples that train


class EmbodiedFSDPActor(Worker):
    """Trains the policy on the trajectories of its own environments.

    Advantages, shuffles and loss denominators are those of the global batch, so that updates do not depend on the
    number of actors.
    """

    cfg: Config
    layout: Layout
    policy: Policy
    optimizer: torch.optim.Optimizer
    total_steps: int
    version: int

    trajectories: Trajectories | None
    batch: _Batch | None
    on_policy: bool  # the weights are still those that acted
    bad_updates_in_a_row: int
    demonstrations: Demonstrations  # of an sft run

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg

    def init(self, layout: Layout, spec: EnvSpec, total_steps: int) -> int:
        """Build, shard and get ready to train; returns the number of parameters."""
        cfg = self.cfg
        self.layout, self.total_steps, self.version = layout, total_steps, 0
        self.trajectories, self.batch, self.bad_updates_in_a_row = None, None, 0
        torch.manual_seed(cfg.runner.seed)
        self.policy = build_policy(cfg, spec).to(self.device).train()
        num_parameters = sum(parameter.numel() for parameter in self.policy.parameters())

        # sharded over all ranks, with the same random weights on each before
        if self.world_size > 1:
            sharding.init_process_group(
                self.rank, self.world_size, self.master_addr, self.master_port, self.device, cfg.runner.phase_timeout_s
            )
            sharding.shard(self.policy, self.world_size, self.device, cfg.actor.precision)
        self.optimizer = sharding.build_optimizer(self.policy, cfg.actor.optim)
        self.num_threads = cfg.actor.num_threads or max((os.cpu_count() or 1) // self.local_world_size, 1)
        self.sender = WeightSender(
            self,
            "rollout",
            layout.weight_routes,
            cfg.weight_sync.bucket_bytes,
            cfg.runner.phase_timeout_s,
            self.num_threads,
        )
        return num_parameters

    def sync_model_to_rollout(self) -> None:
        """Send the weights of the present version to the rollout workers."""
        with self.timer("sync weights"):
            self.sender.send(self.version, self.policy)

    def recv_rollout_batch(self) -> None:
        """Collect the trajectories of this actor's environments from whichever rollout workers have them."""
        parts: list[Trajectories] = []
        while sum(len(part.env_ids) for part in parts) < self.layout.rows_per_actor:
            _, part = self.recv_any("rollout", self.cfg.runner.phase_timeout_s)
            with self.timer("receive trajectories"):
                parts.append(part)
        self.trajectories = Trajectories.concat(parts)

    def compute_advantages_and_returns(self) -> dict[str, float]:
        """Estimate advantages over the global batch. Returns `rollout/*` metrics, the same on every rank."""
        algorithm = self.cfg.algorithm
        own = self._received()
        with self.timer("advantages"):
            inputs = self._gather_inputs(advantage_inputs(own, algorithm))
            outputs = compute_advantages(algorithm.adv_type, inputs, algorithm)
            advantages = outputs.advantages
            metrics = _advantage_metrics(inputs, advantages, outputs.returns)
            if whitens(algorithm):
                advantages = whiten(advantages, inputs.mask)
            global_mask = self._all_gather(own.mask).flatten(0, 1)  # [N, C]
            valid = global_mask.any(-1).numpy()
            if algorithm.filter_groups:
                valid = self._with_signal(inputs, valid, metrics)
            self.batch = self._flatten(own, advantages, outputs.returns, global_mask, valid)
        return metrics

    def run_training(self, step: int) -> dict[str, Any]:
        """Update `update_epochs` times over the batch. Returns `train/*` metrics, the same on every rank, and spans."""
        assert self.batch is not None, "run_training before compute_advantages_and_returns"
        self.on_policy = True
        sums = MetricSums()
        with self._step(step), self.timer("train"):
            self._update_epochs(step, sums)
        self.trajectories, self.batch = None, None
        return self._result(sums)

    def open_demonstrations(self, directory: str) -> None:
        """Get ready to train on the demonstrations in `directory`."""
        self.demonstrations = Demonstrations(Path(directory))

    def run_sft(self, step: int) -> dict[str, Any]:
        """Update once, on the batch of `step`, which every rank reads its own part of. Returns as `run_training`."""
        cfg, found = self.cfg, self.demonstrations
        batch = batch_indices(len(found), cfg.actor.global_batch_size, cfg.runner.seed, step)
        num_actions = int(found.mask(batch).sum())
        own = np.array_split(batch, self.world_size)[self.rank]
        sums, update = MetricSums(), MetricSums()
        with self._step(step), self.timer("train"):
            for part in np.array_split(own, -(-len(own) // cfg.actor.micro_batch_size)):
                self._backward_sft(part, num_actions, update)
            if not self._apply_gradients(update, sums):
                self._count_bad_update(f"step {step}", f"episodes {np.unique(found.episodes(batch)).tolist()}")
        return self._result(sums)

    def save_checkpoint(self, directory: str) -> None:
        """Write `policy/` and this group's part of `training_state/` below `directory`; all ranks call."""
        # what all ranks do together comes first: writing may fail on one of them
        state = sharding.full_policy_state(self.policy)
        moments = sharding.full_optimizer_state(self.policy, self.optimizer)
        training = Path(directory) / "training_state"
        training.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            self.policy.save_pretrained(Path(directory) / "policy", state)
            save_file(moments, training / "optimizer.safetensors")
        save_file({"torch": torch.get_rng_state()}, training / f"actor_rng_{self.rank}.safetensors")

    def load_checkpoint(self, directory: str, version: int) -> None:
        """Continue from what `save_checkpoint` wrote; `version` is the number of completed steps."""
        training = Path(directory) / "training_state"
        sharding.load_policy_state(self.policy, self.policy.read_state(Path(directory) / "policy"))
        sharding.load_optimizer(self.policy, self.optimizer, training / "optimizer.safetensors")
        rng_file = training / f"actor_rng_{self.rank}.safetensors"
        if rng_file.exists():  # a resumed run may have more ranks
            torch.set_rng_state(load_file(rng_file)["torch"])
        self.version = version

    @contextmanager
    def _step(self, step: int) -> Iterator[None]:
        """Around the updates of one step: its learning rate, the threads for training, the next version."""
        torch.set_num_threads(self.num_threads)
        factor = lr_factor(self.cfg.actor.optim, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        yield
        self.version += 1
        torch.set_num_threads(1)

    def _result(self, sums: MetricSums) -> dict[str, Any]:
        metrics = sums.result(self._sum_over_ranks)
        metrics["train/actor/lr"] = self.optimizer.param_groups[0]["lr"]
        return {"metrics": metrics, "spans": self.pop_spans(), "peak_memory_bytes": self._peak_memory_bytes()}

    def _received(self) -> Trajectories:
        assert self.trajectories is not None, "compute_advantages_and_returns before recv_rollout_batch"
        return self.trajectories

    def _update_epochs(self, step: int, sums: MetricSums) -> None:
        cfg = self.cfg
        assert self.batch is not None
        value_only = step < cfg.algorithm.critic_warmup_steps
        for epoch in range(cfg.algorithm.update_epochs):
            parts = minibatches(self.batch.valid, cfg.actor.global_batch_size, cfg.runner.seed, step, epoch)
            for index, minibatch in enumerate(parts):
                where = f"step {step}, epoch {epoch}, minibatch {index}"
                approx_kl = self._update(minibatch, sums, where, value_only)
                if cfg.algorithm.target_kl is not None and approx_kl > cfg.algorithm.target_kl:
                    sums.add_scalar("train/actor/stopped_early", 1.0)
                    return

    def _update(self, minibatch: np.ndarray, sums: MetricSums, where: str, value_only: bool) -> float:
        """One optimizer update on the samples of `minibatch` (global indices). Returns its KL, over all ranks."""
        assert self.batch is not None
        cfg = self.cfg
        mask = self._position_mask(self.batch.global_mask[torch.from_numpy(minibatch)])
        denominator = loss_denominator(mask, cfg.algorithm.loss_agg_mode).clamp(min=1)
        parts = micro_batches(minibatch, self.rank, self.world_size, len(self.batch.valid), cfg.actor.micro_batch_size)
        update = MetricSums()
        for part in parts:
            self._backward(torch.from_numpy(part), denominator, update)

        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if value_only:
            of_value = {id(parameter) for parameter in self.policy.value_parameters()}
            for parameter in parameters:
                if id(parameter) not in of_value:
                    parameter.grad = None
        if not self._apply_gradients(update, sums):
            num_decisions = len(self.batch.valid) // self.layout.num_envs
            self._count_bad_update(where, f"environments {np.unique(minibatch // num_decisions).tolist()}")
        if cfg.algorithm.target_kl is None:
            return 0.0
        return update.result(self._sum_over_ranks).get("train/actor/approx_kl_k3", 0.0)

    def _apply_gradients(self, update: MetricSums, sums: MetricSums) -> bool:
        """Step, and add the update's metrics to `sums`; no step and False where loss or gradient is not finite."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = float(sharding.clip_grad_norm(parameters, self.cfg.actor.optim.clip_grad))
        finite = bool(np.isfinite(norm))
        if finite:
            self.optimizer.step()
            self.on_policy = False
            self.bad_updates_in_a_row = 0
            sums.merge(update)
            sums.add_scalar("train/actor/grad_norm", norm)
        sums.add_scalar("train/actor/skipped_updates", float(not finite), how="sum")
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    def _backward_sft(self, part: np.ndarray, num_actions: int, sums: MetricSums) -> None:
        """Forward and backward of one micro-batch, as its part of the mean over all ranks' `num_actions` actions."""
        self.report_progress()
        obs, actions = self.demonstrations.read(part)
        mask = torch.from_numpy(self.demonstrations.mask(part))
        batch = {**self.policy.sft_inputs(obs), "actions": actions, "mask": mask}
        with autocast(self.device, self.cfg.actor.precision):
            loss = self.policy.sft_loss({name: x.to(self.device) for name, x in batch.items()})
        weight = float(mask.sum())
        (loss * (weight * self.world_size / num_actions)).backward()  # FSDP averages over ranks
        sums.add({"sft_loss": loss}, weight)

    def _backward(self, index: Tensor, denominator: Tensor, sums: MetricSums) -> None:
        """Forward and backward of one micro-batch; an empty one takes part in the collectives with weight 0."""
        assert self.batch is not None
        self.report_progress()
        algorithm = self.cfg.algorithm
        empty = len(index) == 0
        index = torch.zeros(1, dtype=torch.int64) if empty else index
        batch = self.batch
        mask = batch.mask[index].to(self.device) & (not empty)
        with autocast(self.device, self.cfg.actor.precision):
            output = self.policy({name: x[index].to(self.device) for name, x in batch.forward_inputs.items()})
        old_logprobs = batch.logprobs[index].to(self.device)
        level, shape = algorithm.logprob_type, old_logprobs.shape[1:]

        def at_level(x: Tensor) -> Tensor:  # [b, 1 or C] -> positions
            return expand_to_level(x.to(self.device), level, *shape)

        executed = mask[..., None]
        if self.on_policy:  # the ratios should all be 1
            drift = torch.where(executed, output.logprobs.detach() - old_logprobs, 0.0).abs()
            num_elements = mask.sum() * shape[1]
            sums.add({"rollout/logprob_drift": drift.sum() / num_elements.clamp(min=1)}, weight=float(num_elements))
        with_values = needs_values(algorithm.adv_type)
        inputs = LossInputs(
            logprobs=sum_to_level(torch.where(executed, output.logprobs, 0.0), level),
            old_logprobs=sum_to_level(torch.where(executed, old_logprobs, 0.0), level),
            advantages=at_level(batch.advantages[index]),
            mask=self._position_mask(mask),
            entropy=entropy_at_level(output.entropy, mask, algorithm.entropy_type, level),
            values=at_level(output.values) if with_values else None,
            old_values=at_level(batch.values[index]) if with_values else None,
            returns=at_level(batch.returns[index]) if with_values else None,
            denominator=denominator.to(self.device),
            dp_size=self.world_size,
        )
        outputs = actor_critic_loss(algorithm.loss_type, inputs, algorithm)
        outputs.loss.backward()
        sums.add(outputs.metrics, weight=float(inputs.mask.sum()))

    def _position_mask(self, mask: Tensor) -> Tensor:
        """Executed actions [b, C] as the positions of `logprob_type`."""
        level = self.cfg.algorithm.logprob_type
        if level == "chunk_level":
            return mask[:, :1]
        return mask if level == "action_level" else mask.repeat_interleave(self.policy.action_dim, dim=1)

    def _count_bad_update(self, where: str, samples: str) -> None:
        self.bad_updates_in_a_row += 1
        limit = self.cfg.control.max_bad_updates
        message = f"{where}: loss or gradient is not finite ({samples}); the update is skipped"
        log.warning("%s, %d in a row", message, self.bad_updates_in_a_row)
        if self.bad_updates_in_a_row >= limit:
            raise NonFiniteUpdateError(
                f"{message}. control.max_bad_updates: {limit} in a row were reached. "
                "Lower actor.optim.lr, or check the environment's rewards and observations."
            )

    def _gather_inputs(self, inputs: AdvantageInputs) -> AdvantageInputs:
        """All ranks' rows: a few numbers per decision, so that estimators see whole groups and the global batch."""
        names = ("rewards", "mask", "values", "next_values", "dones", "group_ids")
        gathered: dict[str, Any] = {name: self._all_gather(getattr(inputs, name)) for name in names}
        return replace(inputs, **gathered)

    def _all_gather(self, rows: Tensor) -> Tensor:
        """Rows of every rank, in rank order; every rank has the same number."""
        if self.world_size == 1:
            return rows
        own = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
        out = torch.empty((len(own) * self.world_size, *own.shape[1:]), dtype=own.dtype, device=self.device)
        dist.all_gather_single(out, own.contiguous().to(self.device))
        return out.cpu().to(rows.dtype)

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.world_size > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values.cpu()

    def _with_signal(self, inputs: AdvantageInputs, valid: np.ndarray, metrics: dict[str, float]) -> np.ndarray:
        """`valid` without the samples of groups whose members all score the same."""
        keep = torch.zeros(len(inputs.rewards), dtype=torch.bool)
        keep[filter_groups(inputs)] = True
        metrics["rollout/filtered_groups_frac"] = 1.0 - float(keep.float().mean())
        num_decisions = len(valid) // len(keep)
        return valid & keep.repeat_interleave(num_decisions).numpy()

    def _flatten(
        self, own: Trajectories, advantages: Tensor, returns: Tensor, global_mask: Tensor, valid: np.ndarray
    ) -> _Batch:
        rows = slice(self.rank * self.layout.rows_per_actor, (self.rank + 1) * self.layout.rows_per_actor)
        num_samples = own.mask.shape[0] * own.mask.shape[1]
        return _Batch(
            forward_inputs={name: x.flatten(0, 1) for name, x in own.forward_inputs.items()},
            logprobs=own.logprobs.flatten(0, 1),
            values=own.values.flatten(0, 1),
            advantages=advantages[rows].reshape(num_samples, -1),
            returns=returns[rows].reshape(num_samples, -1),
            mask=own.mask.flatten(0, 1),
            global_mask=global_mask,
            valid=valid,
        )

    def _peak_memory_bytes(self) -> int:
        if self.device.startswith("cuda"):
            return torch.cuda.max_memory_allocated()
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _advantage_metrics(inputs: AdvantageInputs, advantages: Tensor, returns: Tensor) -> dict[str, float]:
    valid = inputs.mask.bool()
    metrics = {"rollout/rewards": float(inputs.rewards[valid].mean())}
    for name, values in (("advantages", advantages[valid]), ("returns", returns[valid])):
        metrics[f"rollout/{name}_mean"] = float(values.mean())
        metrics[f"rollout/{name}_max"] = float(values.max())
        metrics[f"rollout/{name}_min"] = float(values.min())
    if inputs.values is not None:
        metrics["train/critic/explained_variance"] = explained_variance(inputs.values, returns, inputs.mask)
    return metrics
