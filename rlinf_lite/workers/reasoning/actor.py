"""The actor, which scores responses under the policy and updates it, and the reference, which scores them under the
policy that the run began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_lite import algorithms
from rlinf_lite.config.names import max_staleness, recomputed_logprobs
from rlinf_lite.data import DataProto
from rlinf_lite.data.sequences import Rows, micro_batches
from rlinf_lite.models.text.causal_lm import LanguageModel
from rlinf_lite.scheduler import nd_compute, nd_compute_metric, register
from rlinf_lite.training.earlier import EarlierWeights
from rlinf_lite.training.metrics import MetricSums
from rlinf_lite.weights import WeightRoutes, WeightSender
from rlinf_lite.weights.sync import copy_weights
from rlinf_lite.workers.reasoning.base import MESH, LanguageModelWorker, Measured, build_model


class LanguageActor(LanguageModelWorker):
    """The policy that trains. Batches are those of `data.sequences`."""

    total_steps: int
    version: int
    earlier: EarlierWeights

    def init(self, directory: str | None, routes: WeightRoutes, total_steps: int) -> int:
        """Build the policy, from `directory` or with random weights; returns the number of parameters."""
        cfg = self.cfg
        self.total_steps, self.version = total_steps, 0
        model = build_model(cfg, directory, cfg.model.attn_implementation)
        self._take(model, "actor", cfg.actor.optim, total_steps, cfg.algorithm.critic_warmup_steps)
        self.earlier = EarlierWeights(self.learner, max_staleness(cfg))
        if "rollout" not in self.fused:
            limits = cfg.weight_sync.bucket_bytes, cfg.runner.phase_timeout_s, self.learner.num_threads
            self.sender = WeightSender(self, "rollout", routes, *limits, cfg.weight_sync.cuda_ipc)
        return self.learner.num_parameters

    def sync_model_to_rollout(self, number: int = 0) -> None:
        """Send the present weights to the rollout workers, as transfer `number`. A rollout worker in this process gets
        them only if it has a model of its own."""
        rollout: Any = self.fused.get("rollout")
        shares = rollout is not None and rollout.model is self.learner.model
        with self.timer("sync weights"), self.learner.sending(keeps_parameters=shares):
            if rollout is None:
                self.sender.send(self.version, self.learner.model, number)
            elif not shares:
                copy_weights(self.learner.model, rollout.model)
        self.earlier.published(self.version)

    @register(dispatch_mode=nd_compute(MESH))
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_logprobs` [B, R] of the responses under the present weights."""
        with self.timer("log-probs"):
            return DataProto({"old_logprobs": self._column(data, lambda model, rows: self._score(model, rows)[0])})

    @register(dispatch_mode=nd_compute_metric(MESH))
    def update_actor(self, data: DataProto) -> dict[str, Any]:
        """Do one optimizer update on the rows of all ranks. Columns [B, R]: `old_logprobs`, `rollout_logprobs`,
        `acted_versions`, `advantages`, and `ref_logprobs` if the algorithm needs them. meta_info: `step`;
        `denominator`, the divisor of the whole batch's loss; `first`, whether this is the first update of the step. The
        returned metrics cover all updates of the step so far."""
        if data.meta_info["first"]:
            self.of_step = MetricSums()
            self._measure_earlier(data, self.of_step)
        return self._update(data, self._loss, self.of_step)

    def start_supervised(self) -> None:
        """Create the optimizer for `update_supervised`."""
        self.learner.start_training(self.cfg.sft.optim, self.cfg.sft.num_steps)

    @register(dispatch_mode=nd_compute_metric(MESH))
    def update_supervised(self, data: DataProto) -> dict[str, Any]:
        """Do one update by maximum likelihood of the given responses; meta_info as in `update_actor`."""
        return self._update(data, self._supervised_loss, MetricSums())

    def finish_supervised(self) -> None:
        """Create the optimizer for `update_actor`."""
        value_steps = self.cfg.algorithm.critic_warmup_steps
        self.learner.start_training(self.cfg.actor.optim, self.total_steps, value_steps)

    def complete_step(self, version: int) -> None:
        """Set the version of the present weights."""
        self.version = version

    def save_policy(self, directory: str) -> None:
        """Write the policy, without training state."""
        self.learner.save_model(Path(directory))

    def save_checkpoint(self, directory: str) -> None:
        """Write `policy/` and this group's part of `training_state/` below `directory`."""
        self.learner.save(Path(directory) / "policy", Path(directory) / "training_state")

    def load_checkpoint(self, directory: str, version: int) -> None:
        """Load the files that `save_checkpoint` wrote; `version` is the number of completed steps."""
        self.learner.load(Path(directory) / "policy", Path(directory) / "training_state")
        self.version = version
        self.earlier.forget()

    def _measure_earlier(self, data: DataProto, sums: MetricSums) -> None:
        """Measure the drift between recomputed log-probabilities and those of acting, for tokens drawn by the kept
        earlier weights, on at most one micro-batch."""
        versions, mask = data.batch["acted_versions"], data.batch["response_mask"]
        if not self.earlier.arrived(versions[mask], self.version):
            return
        by_kept = mask & (versions == self.earlier.version)
        rows = torch.nonzero(by_kept.any(1)).flatten().numpy()
        if len(rows):
            rows = rows[micro_batches(data[rows], self.cfg.actor.max_tokens_per_micro_batch)[0]]
        some = data[rows].select(["input_ids", "attention_mask", "response_mask"], [])
        with self.timer("log-probs"), self.earlier.loaded():
            scored = self._column(some, lambda model, rows: self._score(model, rows)[0])
        by_kept = by_kept[rows]
        drift = algorithms.masked_mean((scored - data.batch["rollout_logprobs"][rows]).abs(), by_kept)
        sums.add({"rollout/logprob_drift": drift}, float(by_kept.sum()))

    def _loss(self, model: LanguageModel, data: DataProto, rows: Rows) -> tuple[Tensor, list[Measured]]:
        algorithm = self.cfg.algorithm
        columns = {name: rows.response(x) for name, x in data.batch.items() if x.dtype == torch.float32}
        mask, behaviour = rows.response(data.batch["response_mask"]), columns["rollout_logprobs"]
        logprobs, entropy = self._score(model, rows)
        proximal, versions = columns["old_logprobs"], rows.response(data.batch["acted_versions"])
        measured: list[Measured] = []
        weights: Tensor | None = None
        if algorithm.correction.kind != "none" or recomputed_logprobs(self.cfg)[0]:
            compared = mask
            if algorithm.correction.proximal == "interpolate":
                proximal = algorithms.interpolated_proximal(logprobs, behaviour, versions, self.version)
                compared = mask & (self.version - versions > 1)  # for newer ones, proximal equals behaviour
            corrected = algorithms.correction(proximal, behaviour, mask, algorithm.correction, compared)
            weights, measured = corrected.weights, [(corrected.metrics, compared.sum())]
        inputs = algorithms.LossInputs(
            logprobs=logprobs,
            old_logprobs=proximal,
            advantages=columns["advantages"],
            mask=mask,
            entropy=entropy,
            weights=weights,
            behaviour_logprobs=behaviour,
            teacher_logprobs=None if self.cfg.teacher.model_dir is None else columns["ref_logprobs"],
            denominator=data.meta_info["denominator"],
            dp_size=self.learner.dp_size,
        )
        outputs = algorithms.actor_loss(algorithm.loss_type, inputs, algorithm)
        loss, metrics = outputs.loss, dict(outputs.metrics)
        if algorithm.kl.place == "loss":
            kl = torch.where(mask, algorithms.kl_penalty(logprobs, columns["ref_logprobs"], algorithm.kl.kind), 0.0)
            mean_kl = algorithms.aggregate_loss(kl, mask, algorithm.loss_agg_mode, inputs.denominator, inputs.dp_size)
            loss = loss + algorithm.kl.coef * mean_kl
            metrics["ref_kl"] = algorithms.masked_mean(kl.detach(), mask)
        measured.append((metrics, mask.sum()))
        if data.meta_info["first"] and not recomputed_logprobs(self.cfg)[0]:
            same = mask & (versions == self.version)
            drift = algorithms.masked_mean((logprobs.detach() - behaviour).abs(), same)
            measured.append(({"rollout/logprob_drift": drift}, same.sum()))
        return loss, measured

    def _supervised_loss(self, model: LanguageModel, data: DataProto, rows: Rows) -> tuple[Tensor, list[Measured]]:
        mask = rows.response(data.batch["response_mask"])
        losses = -self._score(model, rows, temperature=1.0)[0]
        loss = algorithms.aggregate_loss(
            losses, mask, "token-mean", data.meta_info["denominator"], self.learner.dp_size
        )
        return loss, [({"sft_loss": algorithms.masked_mean(losses.detach(), mask)}, mask.sum())]


class LanguageReference(LanguageModelWorker):
    """Scores responses under weights that never change: those that the run began with, or a teacher's."""

    def init(self, directory: str) -> None:
        """Load the policy in `directory`."""
        is_teacher = self.cfg.teacher.model_dir is not None  # which has its own adapters, if any
        model = build_model(self.cfg, directory, self.cfg.model.attn_implementation, adapts=not is_teacher)
        self._take(model.requires_grad_(False), "reference")

    @register(dispatch_mode=nd_compute(MESH))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_logprobs` [B, R] of the responses."""
        with self.timer("log-probs"):
            columns = {"ref_logprobs": self._column(data, lambda model, rows: self._score(model, rows)[0])}
        return DataProto(columns, meta_info={"metrics": [{"spans": self.pop_spans()}]})
