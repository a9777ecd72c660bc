"""The actor of embodied runs: reinforcement learning on trajectories (PPO, GRPO, ...), and imitation of demonstrations.

The order of an update, top to bottom:

    recv_rollout_batch               trajectories of this actor's environments
    compute_advantages_and_returns   over the global batch; made into samples, one per decision
    run_training                     recomputed log-probabilities, if `config.names.recomputed_logprobs`; then epochs,
                                     minibatches, micro-batches of samples; the loss; `training.Learner`
    run_sft                          one update on demonstrated chunks instead

The critic: `algorithms.needs_values` says whether `algorithm.adv_type` reads values; if so, `_loss` has a value loss.
Truncated episodes are bootstrapped in `workers/rollout.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_lite import algorithms
from rlinf_lite.config import Config
from rlinf_lite.config.names import compared_staleness, recomputed_logprobs
from rlinf_lite.config.resources import start_dir
from rlinf_lite.copies import to_device
from rlinf_lite.data.demonstrations import (
    DemonstrationPool,
    Demonstrations,
    batch_indices,
    foreign_dimensions,
    policy_statistics,
    stride_of,
)
from rlinf_lite.data.lerobot.layout import LeRobotError
from rlinf_lite.data.lerobot.statistics import Statistics
from rlinf_lite.dimensions import VECTORS
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import NOISE_KEY, Policy, build_policy, load_policy
from rlinf_lite.models.conditions import CONDITION, NEGATIVE, POSITIVE, drawn_conditions
from rlinf_lite.models.sampling import noise_keys
from rlinf_lite.scheduler import Worker
from rlinf_lite.threads import torch_threads
from rlinf_lite.training.earlier import EarlierWeights
from rlinf_lite.training.learner import Learner
from rlinf_lite.training.metrics import MetricSums, advantage_metrics
from rlinf_lite.training.minibatches import micro_batches, minibatches
from rlinf_lite.training.precision import be_deterministic, cast_parameters
from rlinf_lite.training.recap import Labels, label_frames
from rlinf_lite.weights import WeightSender, copy_weights
from rlinf_lite.workers.layout import Layout
from rlinf_lite.workers.trajectory import Trajectories, advantage_inputs

_TASKS_AT_ONCE = 64
_CONDITIONS = (POSITIVE, NEGATIVE)


@dataclass
class _Batch:
    """This rank's samples, each field [n = rows * T, ...], and the masks of all ranks' samples."""

    forward_inputs: dict[str, Tensor]
    acted: Tensor  # [n, C, D]: log-probabilities computed while acting
    proximal: Tensor  # [n, C, D]: log-probabilities that ratios are formed with; the same if nothing is recomputed
    versions: Tensor  # int64 [n]: versions of the weights that acted
    values: Tensor  # [n, 1 or C]
    advantages: Tensor  # [n, 1 or C]
    returns: Tensor  # [n, 1 or C]
    mask: Tensor  # bool [n, C]
    global_mask: Tensor  # bool [N, C]
    valid: np.ndarray  # bool [N]: samples that train
    teacher: Tensor | None = None  # [n, C, D]: log-probabilities of a teacher


class EmbodiedFSDPActor(Worker):
    """Trains the policy on trajectories or demonstrations. Each rank has its own environments' trajectories;
    `actor.strategy` sets how the model is spread over ranks.

    Advantages, shuffles and loss denominators are those of the global batch, so that updates do not depend on the
    number of actors.
    """

    cfg: Config
    layout: Layout
    policy: Policy
    learner: Learner
    teacher: Policy | None = None
    earlier: EarlierWeights
    version: int

    trajectories: Trajectories | None
    batch: _Batch | None
    unchanged: bool  # no update of this step has changed the weights yet
    demonstrations: DemonstrationPool  # in an sft run
    positive: np.ndarray | None  # bool [F] with RECAP: labels of all frames of demonstrations
    spec: EnvSpec

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg

    def init(self, layout: Layout, spec: EnvSpec, total_steps: int) -> int:
        """Build the policy and the optimizer; returns the number of parameters."""
        cfg, self.layout, self.spec, self.version = self.cfg, layout, spec, 0
        self.trajectories, self.batch, self.positive = None, None, None
        be_deterministic(self.device, cfg.runner.deterministic)
        torch.manual_seed(cfg.runner.seed)  # the same random weights on each rank
        self.policy = build_policy(cfg, spec).train()
        if cfg.actor.frozen_dtype == "bf16":
            cast_parameters(self.policy, torch.bfloat16, frozen_only=True)
        self.teacher = None if cfg.teacher.model_dir is None else self._taught_by(cfg.teacher.model_dir)
        self.learner = Learner(self, self.policy, cfg, "actor")
        self.learner.start_training(cfg.actor.optim, total_steps, cfg.algorithm.critic_warmup_steps)
        self.earlier = EarlierWeights(self.learner, compared_staleness(cfg))
        if "rollout" not in self.fused:
            limits = cfg.weight_sync.bucket_bytes, cfg.runner.phase_timeout_s, self.learner.num_threads
            self.sender = WeightSender(self, "rollout", layout.weight_routes, *limits, cfg.weight_sync.cuda_ipc)
        return self.learner.num_parameters

    def _taught_by(self, directory: str) -> Policy:
        """The teacher, which scores what the student did, with the run's settings of exploration. Raises ValueError if
        it is of another kind."""
        key, student = "teacher.model_dir", self.policy
        try:
            teacher = load_policy(directory, self.cfg.model).to(self.device).eval().requires_grad_(False)
        except ValueError as error:
            raise ValueError(f"{key}: {directory} does not fit the student: {error}") from error
        sizes = [(x.policy_id, x.num_action_chunks, x.action_dim, x.reads()) for x in (teacher, student)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"{key}: {directory} is {sizes[0]}, and the student {sizes[1]}. Name one alike")
        return teacher

    def sync_model_to_rollout(self, number: int = 0) -> None:
        """Send the present weights to the rollout workers, as transfer `number`. A rollout worker in this process gets
        them only if it has a policy of its own."""
        rollout: Any = self.fused.get("rollout")
        shares = rollout is not None and rollout.policy is self.policy
        with self.timer("sync weights"), self.learner.sending(keeps_parameters=shares):
            if rollout is None:
                self.sender.send(self.version, self.policy, number)
            elif not shares:
                copy_weights(self.policy, rollout.policy)
        self.earlier.published(self.version)

    def recv_rollout_batch(self, step: int | None = None) -> None:
        """Receive the trajectories of this actor's environments from the rollout workers; `step`: only those of this
        step (None: of any)."""
        tag = ... if step is None else step
        parts: list[Trajectories] = []
        while sum(len(part.env_ids) for part in parts) < self.layout.rows_per_actor:
            _, part = self.recv_any("rollout", self.cfg.runner.phase_timeout_s, tag)
            with self.timer("receive trajectories"):
                parts.append(part)
        self.trajectories = Trajectories.concat(parts)

    def compute_advantages_and_returns(self) -> dict[str, float]:
        """Estimate advantages over the global batch. Returns `rollout/*` metrics, the same on every rank."""
        algorithm, own = self.cfg.algorithm, self.trajectories
        assert own is not None, "compute_advantages_and_returns before recv_rollout_batch"
        with self.timer("advantages"):
            # all ranks' rows, a few numbers per decision: estimators see whole groups and the global batch
            inputs = advantage_inputs(own, algorithm)
            names = ("rewards", "mask", "values", "next_values", "dones", "group_ids")
            gathered: dict[str, Any] = {name: self._all_gather(getattr(inputs, name)) for name in names}
            inputs = replace(inputs, **gathered)
            metrics = {"rollout/rewards": float(inputs.rewards[inputs.mask.bool()].mean())}
            keep = torch.ones(len(inputs.rewards), dtype=torch.bool)
            if algorithm.filter_groups:  # filtered groups must not influence the normalisation of advantages
                keep = torch.zeros_like(keep)
                keep[algorithms.filter_groups(inputs)] = True
                inputs = replace(inputs, mask=inputs.mask * keep[:, None])
                metrics["rollout/filtered_groups_frac"] = 1.0 - float(keep.float().mean())
            outputs = algorithms.compute_advantages(algorithm.adv_type, inputs, algorithm)
            advantages, returns = outputs.advantages.float(), outputs.returns.float()
            values = inputs.values if algorithms.needs_values(algorithm.adv_type) else None  # None: they are untrained
            if keep.any():
                metrics |= advantage_metrics(advantages, returns, inputs.mask.bool(), values)
            if self.cfg.runner.mode == "async":
                staleness = self.version - self._all_gather(own.versions)[self._all_gather(own.mask).any(-1)]
                metrics["async/staleness_mean"] = float(staleness.double().mean())
                metrics["async/staleness_max"] = float(staleness.max())
            if algorithms.whitens(algorithm):
                advantages = algorithms.whiten(advantages, inputs.mask)

            # samples that train: decisions with an executed action, in groups with a signal
            global_mask = self._all_gather(own.mask).flatten(0, 1)  # [N, C]
            valid = (global_mask.any(-1) & keep.repeat_interleave(len(global_mask) // len(keep))).numpy()

            rows = slice(self.rank * self.layout.rows_per_actor, (self.rank + 1) * self.layout.rows_per_actor)
            num_samples = own.mask.shape[0] * own.mask.shape[1]
            self.batch = _Batch(
                forward_inputs={name: x.flatten(0, 1) for name, x in own.forward_inputs.items()},
                acted=own.logprobs.flatten(0, 1),
                proximal=own.logprobs.flatten(0, 1),
                versions=own.versions.flatten(),
                values=own.values.flatten(0, 1),
                advantages=advantages[rows].reshape(num_samples, -1),
                returns=returns[rows].reshape(num_samples, -1),
                mask=own.mask.flatten(0, 1),
                global_mask=global_mask,
                valid=valid,
            )
        return metrics

    def run_training(self, step: int | None = None) -> dict[str, Any]:
        """Train `update_epochs` epochs on the batch. `step`: decides the learning rate and the shuffles; None: the
        number of completed steps. Returns `train/*` metrics, the same on every rank, and spans."""
        step = self.version if step is None else step
        cfg, batch, learner, sums = self.cfg, self.batch, self.learner, MetricSums()
        assert batch is not None, "run_training before compute_advantages_and_returns"
        num_samples, target_kl = len(batch.valid), cfg.algorithm.target_kl
        num_decisions = num_samples // self.layout.num_envs
        only = self.policy.value_parameters() if step < cfg.algorithm.critic_warmup_steps else None
        self.unchanged = True
        recomputes = recomputed_logprobs(cfg)[0]
        if cfg.algorithm.update_epochs > 1 or recomputes:
            with self.timer("fixed inputs"):
                batch.forward_inputs |= self._computed(lambda policy, x: policy.fixed_inputs(x))
        if recomputes:
            with self.timer("log-probs"):
                batch.proximal = self._score()
            self._measure_drift(batch.proximal, batch.acted, batch.mask, batch.versions, sums)
        if self.teacher is not None:
            with self.timer("teacher"), torch.no_grad():
                teacher = self.teacher
                batch.teacher = self._computed(lambda _, x: {"": teacher(x).logprobs.float()})[""]
        if self.earlier.arrived(batch.versions[batch.mask.any(-1)], self.version):
            with self.timer("log-probs"):
                self._measure_earlier(sums)
        updates = (
            (f"step {step}, epoch {epoch}, minibatch {index}", minibatch)
            for epoch in range(cfg.algorithm.update_epochs)
            for index, minibatch in enumerate(
                minibatches(batch.valid, cfg.actor.global_batch_size, cfg.runner.seed, step, epoch)
            )
        )
        with self.timer("train"):
            learner.set_learning_rate(step)
            for where, minibatch in updates:  # global indices
                mask = self._position_mask(batch.global_mask[torch.from_numpy(minibatch)])
                denominator = algorithms.loss_denominator(mask, cfg.algorithm.loss_agg_mode).clamp(min=1)
                parts = micro_batches(minibatch, self.rank, self.world_size, num_samples, cfg.actor.micro_batch_size)
                environments = partial(_listed, "environments", minibatch // num_decisions)
                loss_fn = partial(self._loss, denominator)
                stepped, own_sums = learner.update(parts, loss_fn, sums, where, environments, only)
                self.unchanged = self.unchanged and not stepped
                if target_kl is not None:
                    of_update = own_sums.result(learner.over_ranks)
                    if of_update.get("train/actor/approx_kl_k3", 0.0) > target_kl:
                        sums.add_scalar("train/actor/stopped_early", 1.0)
                        break
        self.version += 1
        self.trajectories, self.batch = None, None
        return learner.result(sums)

    def open_demonstrations(
        self, frames: str, statistics: dict[str, Statistics] | None
    ) -> tuple[dict[str, Statistics], list[str], list[str]]:
        """Open the demonstrations whose frames were decoded into the directory `frames`.

        A policy with random weights takes the statistics of the folder. `statistics`: those that it took before the run
        was interrupted (empty: it took none); None: the run begins. Returns the statistics that it took; which of
        `state` and `action` it normalises by them; and a line for each dimension in which the demonstrations are
        unusual for a policy that keeps its own statistics (`foreign_dimensions`).

        Raises ValueError if the policy cannot be trained on them, because of missing inputs or an instruction that it
        cannot read.
        """
        cfg = self.cfg
        begun_with = Demonstrations(Path(frames), cfg.model.num_action_chunks, stride_of(cfg))
        self.demonstrations = DemonstrationPool(begun_with)
        found = policy_statistics(begun_with, self.spec, self.policy.relative_actions)
        is_fresh = start_dir(cfg) is None
        if statistics is None:
            statistics = found if cfg.data.source == "folder" and is_fresh else {}
        if statistics:
            self.policy.take_statistics(statistics)
        reads, ranges = self.policy.reads(), self.policy.usual_ranges()
        unread = "state" if reads is not None and not reads.state_dim else None
        normalised = [name for name in VECTORS if name in statistics and name in ranges and name != unread]
        self.policy.take_names(self.demonstrations.frames.names)
        tasks = self.demonstrations.frames.tasks
        for first in range(0, len(tasks), _TASKS_AT_ONCE):
            some = tasks[first : first + _TASKS_AT_ONCE]
            obs, _ = self.demonstrations.read(np.zeros(len(some), np.int64))
            obs |= {"instruction": some, NOISE_KEY: noise_keys(0, np.arange(len(some)), 0)}
            try:
                self.policy.sft_inputs(obs)
                if cfg.data.recap.rounds:
                    self._check_conditions(obs)
            except KeyError as error:
                text = f"the policy reads {error}, and the demonstrations have {', '.join(obs)}: see data.keys"
                raise LeRobotError(text) from error
        return statistics, normalised, [] if is_fresh else foreign_dimensions(found, ranges)

    def _check_conditions(self, obs: dict[str, Any]) -> None:
        """Raise LeRobotError if the policy does not tell the two conditions of some instruction apart."""
        told = [self.policy.sft_inputs({**obs, CONDITION: [one] * len(obs["instruction"])}) for one in _CONDITIONS]
        differs = torch.stack([(x != told[1][name]).reshape(len(x), -1).any(1) for name, x in told[0].items()]).any(0)
        for row in torch.nonzero(~differs).flatten().tolist():
            text = f"{obs['instruction'][row]!r} gives the same prompt with RECAP's positive and negative condition"
            raise LeRobotError(
                f"{text}. Raise model.options.max_prompt_length, or use a tokenizer that knows the words"
            )

    def label_demonstrations(self) -> Labels | None:
        """Label all frames of the demonstrations as `data.recap` says; rank 0 does, others return None."""
        if self.rank:
            return None

        def report() -> None:
            self.check_abort("labelling demonstrations")
            self.report_progress()

        with self.timer("label"), torch_threads(self.learner.num_threads):
            return label_frames(self.demonstrations, self.cfg, self.device, report)

    def take_labels(self, positive: np.ndarray) -> None:
        """Go on with these labels of all frames of the demonstrations, bool [F]."""
        self.positive = positive

    def add_demonstrations(self, frames: str) -> None:
        """Go on with those in `frames` too, of the same features as the first."""
        cfg = self.cfg
        self.demonstrations.add(Demonstrations(Path(frames), cfg.model.num_action_chunks, stride_of(cfg)))

    def save_policy(self, directory: str) -> None:
        """Write the policy with its present weights; all ranks call."""
        self.learner.save_model(Path(directory))

    def run_sft(self, step: int) -> dict[str, Any]:
        """Update once, on the batch of `step`; every rank reads its own part of it. Returns as `run_training` does."""
        cfg, demonstrations, sums = self.cfg, self.demonstrations, MetricSums()
        batch = batch_indices(len(demonstrations), cfg.actor.global_batch_size, cfg.runner.seed, step)
        num_actions = int(demonstrations.mask(batch).sum())
        own = np.array_split(batch, self.world_size)[self.rank]

        def read(part: np.ndarray) -> dict[str, Tensor]:
            obs, actions = demonstrations.read(part)
            mask = torch.from_numpy(demonstrations.mask(part))
            keys = noise_keys(cfg.runner.seed, part, step)  # depends on chunk and step, not on the rank
            if self.positive is not None:
                labels = self.positive[demonstrations.first_frames(part)]
                obs[CONDITION] = drawn_conditions(labels, keys, cfg.data.recap.drop)
            return {**self.policy.sft_inputs({**obs, NOISE_KEY: keys}), "actions": actions, "mask": mask}

        def loss_fn(policy: Policy, inputs: dict[str, Tensor], found: MetricSums) -> Tensor:
            """This part's share of the mean loss over all ranks' actions."""
            with self.learner.autocast():
                loss = policy.sft_loss({name: to_device(x, self.device) for name, x in inputs.items()})
            weight = float(inputs["mask"].numpy().sum())
            found.add({"sft_loss": loss}, weight)
            return loss * (weight * self.world_size / num_actions)

        with self.timer("train"):
            self.learner.set_learning_rate(step)
            parts = np.array_split(own, -(-len(own) // cfg.actor.micro_batch_size))
            episodes = partial(_listed, "episodes", demonstrations.episodes(batch))
            self.learner.update(map(read, parts), loss_fn, sums, f"step {step}", episodes)
        self.version += 1
        return self.learner.result(sums)

    def save_checkpoint(self, directory: str) -> None:
        """Write `policy/` and this group's part of `training_state/` below `directory`; all ranks call."""
        self.learner.save(Path(directory) / "policy", Path(directory) / "training_state")

    def load_checkpoint(self, directory: str, version: int) -> None:
        """Load the files that `save_checkpoint` wrote; `version` is the number of completed steps."""
        self.learner.load(Path(directory) / "policy", Path(directory) / "training_state")
        self.version = version
        self.earlier.forget()

    def _loss(self, denominator: Tensor, policy: Policy, part: np.ndarray, found: MetricSums) -> Tensor:
        """Loss of this rank's samples `part` [b]; 0 for an empty part, so that the rank takes part in collective
        operations."""
        assert self.batch is not None
        algorithm, batch, device = self.cfg.algorithm, self.batch, self.device
        empty = len(part) == 0
        index = torch.zeros(1, dtype=torch.int64) if empty else torch.from_numpy(part)
        mask = to_device(batch.mask[index], device) & (not empty)
        with self.learner.autocast():
            output = policy({name: to_device(x[index], device) for name, x in batch.forward_inputs.items()})
        acted, proximal = (to_device(x[index], device) for x in (batch.acted, batch.proximal))
        level, shape = algorithm.logprob_type, acted.shape[1:]

        def at_level(x: Tensor) -> Tensor:  # [b, 1 or C] -> positions
            return algorithms.expand_to_level(to_device(x, device), level, *shape)

        def summed(logprobs: Tensor) -> Tensor:  # [b, C, D] -> positions
            return algorithms.sum_to_level(torch.where(executed, logprobs, 0.0), level)

        executed, positions = mask[..., None], self._position_mask(mask)
        if self.unchanged and not recomputed_logprobs(self.cfg)[0]:
            versions = to_device(batch.versions[index], device)
            self._measure_drift(output.logprobs.detach(), acted, mask, versions, found)
        weights, corrected = None, {}
        measured = positions
        if algorithm.correction.kind != "none" or recomputed_logprobs(self.cfg)[0]:
            if algorithm.correction.proximal == "interpolate":
                versions = to_device(batch.versions[index, None, None], device)
                proximal = algorithms.interpolated_proximal(output.logprobs, acted, versions, self.version)
                measured = positions & (self.version - versions[:, 0] > 1)  # for newer ones, proximal equals acted
            correction = algorithms.correction(
                summed(proximal), summed(acted), positions, algorithm.correction, measured
            )
            weights, corrected = correction.weights, correction.metrics
        with_values = algorithms.needs_values(algorithm.adv_type)
        inputs = algorithms.LossInputs(
            logprobs=summed(output.logprobs),
            old_logprobs=summed(proximal),
            advantages=at_level(batch.advantages[index]),
            mask=positions,
            entropy=algorithms.entropy_at_level(output.entropy, mask, algorithm.entropy_type, level),
            values=at_level(output.values) if with_values else None,
            old_values=at_level(batch.values[index]) if with_values else None,
            returns=at_level(batch.returns[index]) if with_values else None,
            weights=weights,
            behaviour_logprobs=summed(acted),
            teacher_logprobs=None if batch.teacher is None else summed(to_device(batch.teacher[index], device)),
            denominator=to_device(denominator, device),
            dp_size=self.world_size,
        )
        outputs = algorithms.actor_critic_loss(algorithm.loss_type, inputs, algorithm)
        found.add(outputs.metrics, weight=positions.sum())
        if corrected:
            found.add(corrected, weight=measured.sum())
        return outputs.loss

    def _measure_drift(
        self, now: Tensor, acted: Tensor, mask: Tensor, versions: Tensor, sums: MetricSums, of: int | None = None
    ) -> None:
        """Add the mean difference between log-probabilities `now` [n, C, D] and those of acting, over samples that the
        same weights acted on: version `of`, or None for the present version."""
        same = mask[..., None] & (versions == (self.version if of is None else of))[:, None, None]
        drift, num_elements = torch.where(same, now - acted, 0.0).abs().sum(), same.sum() * acted.shape[2]
        sums.add({"rollout/logprob_drift": drift / num_elements.clamp(min=1)}, weight=num_elements)

    def _measure_earlier(self, sums: MetricSums) -> None:
        """Measure the drift for samples of the kept earlier weights, on at most one micro-batch."""
        assert self.batch is not None
        batch, version = self.batch, self.earlier.version
        index = torch.nonzero((batch.versions == version) & batch.mask.any(-1)).flatten()
        index = index[: self.cfg.actor.micro_batch_size] if len(index) else torch.zeros(1, dtype=torch.int64)
        with self.earlier.loaded():
            scored = self._score(index.numpy())
        of_index = batch.acted[index], batch.mask[index], batch.versions[index]
        self._measure_drift(scored, *of_index, sums, of=version)

    def _score(self, index: np.ndarray | None = None) -> Tensor:
        """Log-probabilities [n, C, D] of all samples, or of `index` [n], under the policy's present weights; on the
        CPU."""
        return self._computed(lambda policy, x: {"": policy(x).logprobs.float()}, index)[""]

    def _computed(
        self,
        compute: Callable[[Policy, dict[str, Tensor]], dict[str, Tensor]],
        index: np.ndarray | None = None,
    ) -> dict[str, Tensor]:
        """The outputs of `compute` on the forward inputs [n, ...] of the batch, or of its samples `index` [n]; on the
        CPU. Every rank must have the same number of micro-batches."""
        assert self.batch is not None
        inputs, learner = self.batch.forward_inputs, self.learner
        index = np.arange(len(self.batch.mask)) if index is None else index
        num_samples = len(index)
        parts = np.array_split(np.arange(num_samples), -(-num_samples // self.cfg.actor.micro_batch_size))

        def of_part(policy: Policy, part: np.ndarray) -> dict[str, Tensor]:
            with learner.scoring(), learner.autocast():
                rows = torch.from_numpy(index[part])
                found = compute(policy, {name: to_device(x[rows], self.device) for name, x in inputs.items()})
                return {name: x.detach() for name, x in found.items()}  # a graph goes before the next one is recorded

        kept: dict[str, Tensor] = {}
        for part, found in zip(parts, learner.passes(of_part, parts), strict=True):
            if not found:
                break
            for name, x in found.items():
                if name not in kept:
                    kept[name] = torch.empty(num_samples, *x.shape[1:], dtype=x.dtype)
                kept[name][torch.from_numpy(part)] = x.cpu()
        return kept

    def _position_mask(self, mask: Tensor) -> Tensor:
        """The mask of executed actions [b, C], in the positions of `logprob_type`."""
        level = self.cfg.algorithm.logprob_type
        if level == "chunk_level":
            return mask[:, :1]
        return mask if level == "action_level" else mask.repeat_interleave(self.policy.action_dim, dim=1)

    def _all_gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, in rank order; every rank has the same number."""
        if self.world_size == 1:
            return rows
        own = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
        out = torch.empty((len(own) * self.world_size, *own.shape[1:]), dtype=own.dtype, device=self.device)
        dist.all_gather_single(out, own.contiguous().to(self.device))
        return out.cpu().to(rows.dtype)


def _listed(what: str, numbers: np.ndarray) -> str:
    return f"{what} {np.unique(numbers).tolist()}"
