"""The loop for reinforcement learning of a language model: one driver process; heavy operations are group methods.

prompts -> rollout.generate -> reward.compute_rewards -> actor.compute_log_prob, reference.compute_ref_log_prob,
critic.compute_values -> KL -> advantages -> critic.update_critic, actor.update_actor -> weights to rollout
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlinf_lite.config.names import recomputed_logprobs
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import policy_directory, start_dir
from rlinf_lite.data import DataProto
from rlinf_lite.data.problems import Problems, solved_batch, supervised_batches
from rlinf_lite.data.prompts import ResumableSampler
from rlinf_lite.file_modes import write_whole
from rlinf_lite.metrics import EvalSummary, Span, summarize_episodes
from rlinf_lite.rewards.scorer import Scoring
from rlinf_lite.runners import experience
from rlinf_lite.runners.base import Runner
from rlinf_lite.runners.checkpoints import CheckpointError, read_state
from rlinf_lite.runners.protocol import protocol_of_problems
from rlinf_lite.runners.run_config import Change, check_changes
from rlinf_lite.runners.run_paths import RunClaim
from rlinf_lite.runners.scored import ScoringLog, check_scored
from rlinf_lite.runners.stopping import STOP_TIMEOUT_S, RunResult
from rlinf_lite.scheduler import Handle, WorkerGroup
from rlinf_lite.threads import torch_threads
from rlinf_lite.weights import WeightRoutes

if TYPE_CHECKING:
    from rlinf_lite.control import Supervisor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generating:
    """Running calls that generate and score responses, in parts."""

    started: Handle
    parts: list[tuple[Handle, Handle]]
    """The calls for responses and for their rewards, by part."""

    @property
    def handles(self) -> list[Handle]:
        return [self.started, *(handle for part in self.parts for handle in part)]


class ReasoningRunner(Runner):
    """Runs reinforcement learning of a language model; see `Runner` for the loop around the steps. Only some algorithms
    need the groups `reference` and `critic`."""

    cfg: ReasoningConfig

    def __init__(
        self,
        cfg: ReasoningConfig,
        problems: Problems,
        actor: WorkerGroup,
        rollout: WorkerGroup,
        reward: WorkerGroup,
        reference: WorkerGroup | None = None,
        critic: WorkerGroup | None = None,
        supervisor: Supervisor | None = None,
        claim: RunClaim | None = None,
    ) -> None:
        others = [group for group in (reward, reference, critic) if group is not None]
        super().__init__(cfg, actor, rollout, *others, supervisor=supervisor, claim=claim)
        if critic is not None:
            self._trained_groups.append(critic)
        self.problems, self.reward, self.reference, self.critic = problems, reward, reference, critic
        self.sampler = ResumableSampler(len(problems.train), cfg.data.num_prompts, cfg.runner.seed)
        self.kl = experience.kl_controller(cfg.algorithm.kl)
        per_epoch = len(problems.train) // cfg.data.num_prompts
        limit = cfg.runner.max_epochs * per_epoch
        self.total_steps = limit if cfg.runner.max_steps < 0 else min(cfg.runner.max_steps, limit)
        self._drawn: dict[int, list[int]] = {}  # rows of the prompts of steps that have begun or are admitted
        self._supervised_updates = 0  # completed updates of supervised training, which comes before the first step
        self._resumable = self._position()  # the position after the last completed step or supervised update
        self.scoring = ScoringLog()
        self._others_exist = False  # whether reference and critic are built, which start after supervised training

    def run(self, until: int | None = None) -> RunResult:
        with torch_threads(1):  # this process computes little, and the workers use every core
            return super().run(until)

    def init_workers(self) -> None:
        """Build the models, and load the checkpoint if the run resumes."""
        nodes = [tuple(member.node.rank for member in group.members) for group in (self.rollout, self.actor)]
        routes, start = WeightRoutes(*nodes), start_dir(self.cfg)
        directory = None if start is None else str(start)
        actor = self.actor.init(directory, routes, self.total_steps)
        built = self._wait(
            actor, self.rollout.init(directory, routes), self.reward.init(), what="models to be built", says_so=True
        )
        if self._resume_from is not None and self._resumes_supervised(self._resume_from):
            self._wait(self.actor.start_supervised(), what="the actor")
        self._resume()
        self._num_parameters = built[0][0] * (1 if self.critic is None else 2)
        log.info("model of %s parameters", f"{built[0][0]:,}")

    def prepare(self) -> None:
        """Do supervised training, or the rest of it; then build reference and critic from the resulting policy."""
        if self.cfg.rollout.top_p < 1 or self.cfg.rollout.top_k:
            drawn = f"rollout.top_p={self.cfg.rollout.top_p:g}, rollout.top_k={self.cfg.rollout.top_k}"
            text = (
                "log-probabilities and ratios are over the whole vocabulary, but responses are drawn from a part of it"
            )
            self.progress.message(f"{text} ({drawn})")
        self._wait(self.actor.complete_step(self.completed_steps), what="the actor")
        if self.completed_steps == 0 and max(self.cfg.sft.num_steps, self._supervised_updates):
            self._supervise()
        self._init_others()

    def run_step(self, step: int) -> None:
        self.scoring.spans = []
        self.update_rollout_weights()
        with self.step_log.phase("generate_rollouts"):
            batch, metrics = self.collect(step)
        if batch is None:
            log.warning("step %d: every group was filtered; nothing to train on", step + 1)
            trained = self._train(self.actor.complete_step(step + 1))
        else:
            with self.step_log.phase("advantages"):
                version = step if recomputed_logprobs(self.cfg)[0] else None
                batch, found = experience.add_advantages(batch, self.cfg.algorithm, self.kl, recomputed_by=version)
                metrics |= found
            with self.step_log.phase("training"):
                trained = self._train(*self.updates(batch, step), self.actor.complete_step(step + 1))
        step_s = self.step_log.end_step()

        results = [result for ranks in trained for result in ranks if result is not None]
        for ranks in trained:  # each result includes the metrics of earlier updates
            metrics |= {} if ranks[0] is None else ranks[0]["metrics"]
        metrics |= self.scoring.metrics(has_model=self.cfg.reward.model is not None)
        metrics["perf/tokens_per_s"] = metrics["rollout/generated_tokens"] / step_s
        if results:
            metrics["perf/peak_memory_bytes"] = max(result["peak_memory_bytes"] for result in results)
        self.scoring.forget()
        spans = self.scoring.spans + [span for result in results for span in result["spans"]]
        self._log_generated(batch, metrics, spans)

    def _log_generated(self, batch: DataProto | None, metrics: dict[str, float], spans: list[Span]) -> None:
        """Log a step; `batch`: the data it trained on."""
        generation_s = self.step_log.times["generate_rollouts"]
        metrics["perf/generated_tokens_per_s"] = metrics["rollout/generated_tokens"] / generation_s
        self._log_step(metrics, spans, pair=("actor", "rollout"))

    def collect(self, step: int) -> tuple[DataProto | None, dict[str, float]]:
        """Generate and score responses to `data.num_prompts` prompts. Returns the batch, in order and with all columns
        that training needs (None if every group was filtered), and `rollout/*` metrics.

        If groups without a signal are filtered, more prompts replace them, up to `algorithm.max_refills` times.
        """
        algorithm, wanted = self.cfg.algorithm, self.cfg.data.num_prompts
        recomputes = recomputed_logprobs(self.cfg)[0]
        trained: list[DataProto] = []
        scores: list[DataProto] = []  # of all responses, including filtered ones
        num_groups = num_kept = num_tokens = 0
        for refill in range(algorithm.max_refills + 1 if algorithm.filter_groups else 1):
            generating = self._generate(step, refill)
            # policy, reference and critic score each part while the rollout workers generate the next one
            pending: list[tuple[DataProto, list[Handle]]] = []
            waiting: list[DataProto] = []
            scorings: list[dict[str, Scoring]] = []
            for part, rewarding in generating.parts:
                sequences, rewards, _ = self._wait(part, rewarding, generating.started, what="responses")
                scorings += self.scoring.take(sequences, rewards)
                batch = sequences.union(rewards)
                if refill:  # wait for all parts: if surplus groups are dropped, early (short) ones must not be favored
                    waiting.append(batch)
                    if len(waiting) < len(generating.parts):
                        continue
                    batch = experience.in_order(DataProto.concat(waiting))
                num_tokens += int(batch.batch["response_mask"].sum())
                num_groups += experience.num_groups(batch)
                batch = experience.split_baselines(batch, algorithm)
                columns = [name for name in batch.batch if name.endswith("scores")]
                scores.append(batch.select(columns, ["reward_metrics"], []))
                if algorithm.filter_groups:
                    batch = experience.first_groups(experience.with_signal(batch), wanted - num_kept)
                num_kept += experience.num_groups(batch)
                if not len(batch):
                    continue
                rows = batch.select(["input_ids", "attention_mask", "response_mask"], [])
                if not recomputes:
                    batch.batch["old_logprobs"] = batch.batch["rollout_logprobs"]
                scoring = [self.actor.compute_log_prob(rows)] if recomputes else []
                if self.reference is not None:
                    scoring.append(self.reference.compute_ref_log_prob(rows))
                if self.critic is not None:
                    scoring.append(self.critic.compute_values(rows))
                pending.append((batch, scoring))
            check_scored(scorings, self.problems.train)
            for batch, scoring in pending:
                if scoring:
                    for found in self._wait(*scoring, what="log-probabilities and values"):
                        self.scoring.take(found)
                        batch = batch.union(found)
                trained.append(batch)
            if num_kept >= wanted:
                break

        metrics = {"rollout/generated_tokens": float(num_tokens), **experience.score_metrics(DataProto.concat(scores))}
        if algorithm.filter_groups:
            metrics["rollout/filtered_groups_frac"] = 1 - num_kept / num_groups
        return (experience.in_order(DataProto.concat(trained)) if trained else None), metrics

    def _generate(self, step: int, refill: int = 0) -> Generating:
        """Start generating and scoring responses to the prompts of the step, or (`refill` > 0) to new prompts that
        replace its filtered groups."""
        if refill:
            rows = next(self.sampler)
        else:
            if step not in self._drawn:
                self._drawn[step] = next(self.sampler).tolist()
            rows = np.array(self._drawn[step])
        wanted = self.cfg.data.num_prompts
        noise = np.random.SeedSequence([self.cfg.runner.seed, step]).generate_state(1, np.uint64)
        prompts = self.problems.train.batch(rows)
        prompts.batch["group"] = torch.arange(refill * wanted, refill * wanted + len(prompts))
        prompts.meta_info = {"seed": int(noise[0] >> 1)}
        started = self.rollout.start_generation(prompts)
        parts = [self.rollout.next_sequences() for _ in range(self.cfg.rollout.pipeline_stage_num)]
        return Generating(started, [(part, self.reward.compute_rewards(part)) for part in parts])

    def updates(self, batch: DataProto, step: int) -> Iterator[Handle]:
        """Start the updates of critic and actor, by minibatch; both groups work at the same time."""
        algorithm, actor = self.cfg.algorithm, ["old_logprobs", "rollout_logprobs", "acted_versions", "advantages"]
        if algorithm.kl.place == "loss" or self.cfg.teacher.model_dir is not None:
            actor.append("ref_logprobs")
        size, seed = self.cfg.actor.global_batch_size, self.cfg.runner.seed
        for minibatch in experience.updates(batch, algorithm, size, seed, step):
            if self.critic is not None:
                columns = experience.for_ranks(minibatch, ["values", "returns"], self._num_models(self.critic))
                yield self.critic.update_critic(columns)
            if self.critic is None or step >= algorithm.critic_warmup_steps:
                yield self.actor.update_actor(experience.for_ranks(minibatch, actor, self._num_models(self.actor)))

    def _num_models(self, group: WorkerGroup) -> int:
        """The number of model copies in a group, that is, of parts into which its batches are split."""
        return group.world_size // self.cfg.actor.tensor_model_parallel_size

    def evaluate(self, videos: Path | None = None) -> EvalSummary:
        """Answer the evaluation problems greedily with the actor's present weights. Problems, answers and scores are
        written to `videos` with the suffix `.answers.jsonl`, one JSON object per line."""
        val = self.problems.val
        assert val is not None, "a run that evaluates has data.val_files"
        with self.step_log.phase("eval"):
            self.update_rollout_weights()
            rows = np.arange(min(len(val), self.cfg.data.max_val_prompts or len(val)))
            prompts = val.batch(rows)
            prompts.batch["group"] = torch.from_numpy(rows)
            prompts.meta_info = {"seed": self.cfg.runner.seed, "greedy": True}
            sequences = self.rollout.generate_sequences(prompts)
            batch, rewards = self._wait(sequences, self.reward.compute_rewards(sequences), what="evaluation")
        check_scored(self.scoring.take(batch, rewards), val)
        if videos is not None:
            texts = self.problems.tokenizer.batch_decode(prompts.batch["prompt_ids"], skip_special_tokens=True)
            path, text = videos.with_suffix(".answers.jsonl"), experience.answer_lines(texts, prompts, rewards)
            self.states.disk.write(path, lambda: write_whole(path, text), len(text))
        answers = experience.as_episodes(rows.tolist(), batch, rewards)
        protocol = protocol_of_problems(self.cfg, len(rows))
        return summarize_episodes(answers, "greedy", protocol=protocol, all_judged=True)

    def _supervise(self) -> None:
        """Train on the solutions of the problems; a resumed run skips the updates that are already done."""
        sft, train, first = self.cfg.sft, self.problems.train, self._supervised_updates
        resumed = f", {first} of them done" if first else ""
        what = f"{sft.num_steps} updates on {sft.batch_size} solutions each{resumed}"
        self.progress.message(f"supervised training: {what}")
        began = time.time()
        if first == 0:
            self._wait(self.actor.start_supervised(), what="the actor")
        trained: list[Any] = []
        under_way: list[Handle] = []
        for step, rows in islice(enumerate(supervised_batches(train, self.cfg)), first, None):
            batch = solved_batch(train, rows, self.cfg)
            batch.meta_info = {"step": step, "denominator": float(batch.batch["response_mask"].sum())}
            self.states.in_update = True
            under_way.append(
                self.actor.update_supervised(experience.for_ranks(batch, [], self._num_models(self.actor)))
            )
            is_last, snapshot_is_due = step + 1 == sft.num_steps, self._snapshot_is_due()
            pausing = self._stop.requested or snapshot_is_due or is_last
            while len(under_way) > (0 if pausing else 1):  # one update runs while the next batch is made
                started = time.monotonic()
                trained = self._wait(under_way.pop(0), what="supervised training", grace_s=STOP_TIMEOUT_S)[0]
                self._update_s = time.monotonic() - started
                self._supervised_updates += 1
                self._resumable = self._position()
            if pausing:
                self.states.in_update = False
                self._stop.check()
                if snapshot_is_due and not is_last:
                    self.states.snapshots.take(self.completed_steps, self.states.write)
        self._wait(self.actor.finish_supervised(), what="the actor")
        self.states.snapshots.remove()  # a recovery must not go back into this stage
        loss = f"; loss {trained[0]['metrics']['train/actor/sft_loss']:.3f}" if trained else ""
        self.progress.message(f"supervised training took {time.time() - began:.0f} s{loss}")

    def _num_updates_done(self) -> int:
        return self.completed_steps + self._supervised_updates

    def _resumes_supervised(self, checkpoint: Path) -> bool:
        """Whether a checkpoint was written during supervised training, and so has its optimizer."""
        state = read_state(checkpoint)
        return state["completed_steps"] == 0 and state["supervised_updates"] > 0

    def _init_others(self) -> None:
        """Build reference and critic from the policy that reinforcement learning starts from, unless there is a
        teacher. It is on disk, so that a resumed run starts them from the same policy."""
        start = start_dir(self.cfg)
        others = [group for group in (self.reference, self.critic) if group is not None]
        taught_by = self.cfg.teacher.model_dir
        if others and taught_by is None and (start is None or self.cfg.sft.num_steps):
            start = self.run_dir / "start"
            if self.completed_steps == 0:
                self._wait(self.actor.save_policy(str(start)), what="the starting policy to be written")
        building: list[Handle] = []
        if self.reference is not None:
            building.append(self.reference.init(str(policy_directory(taught_by or str(start)))))
        if self.critic is not None:
            building.append(self.critic.init(self.cfg.critic.model_dir or str(start), self.total_steps))
        self._wait(*building, what="reference and critic to be built", says_so=True)
        self._others_exist = True
        if self.critic is not None and self._resume_from is not None and self.completed_steps > 0:
            self._load_critic(self._resume_from)

    def _position(self) -> dict[str, Any]:
        """The driver's state that the next step depends on, as JSON."""
        return {
            "problems": self.problems.train.digest,
            "sampler": self.sampler.state_dict(),
            "drawn": {str(step): rows for step, rows in self._drawn.items()},
            "kl": self.kl.state_dict(),
            "supervised_updates": self._supervised_updates,
        }

    def _complete_step(self) -> None:
        super()._complete_step()
        self._drawn.pop(self.completed_steps - 1, None)
        self._resumable = self._position()

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), **self._resumable}  # never of an interrupted step

    def _load_state(self, state: dict[str, Any]) -> None:
        super()._load_state(state)
        self._go_back_to(state)

    def _forget_unfinished_step(self) -> None:
        self.scoring.forget()
        self._go_back_to(self._resumable)

    def _go_back_to(self, position: dict[str, Any]) -> None:
        """Restore the sampler, the KL controller and the other state in `position`, a result of `_position`."""
        try:
            self.sampler.load_state_dict(position["sampler"])
        except ValueError as error:
            raise CheckpointError(f"{self._resume_from}: {error}") from error
        was, now = (str(digest)[:8] for digest in (position["problems"], self.problems.train.digest))
        if self._resume_from is not None and was != now:
            change = Change("data.train_files", f"rows {was}", f"rows {now}", is_fixed=True)
            check_changes([change], self.cfg, self._resume_from)
        self._drawn = {int(step): rows for step, rows in position["drawn"].items()}
        self.kl.load_state_dict(position["kl"])
        self._supervised_updates = position["supervised_updates"]
        self._resumable = self._position()

    def _save_state(self, directory: Path) -> None:
        super()._save_state(directory)
        if self.critic is not None and self._others_exist:
            saving = self.critic.save_checkpoint(str(directory))
            self._wait(saving, what="the critic's checkpoint", grace_s=math.inf, alone=True)

    def _load(self, checkpoint: Path) -> None:
        super()._load(checkpoint)
        if self._others_exist:
            self._load_critic(checkpoint)

    def _load_critic(self, checkpoint: Path) -> None:
        if self.critic is not None:
            directory = str(checkpoint / "training_state")
            self._wait(self.critic.load_checkpoint(directory), what="the critic's checkpoint to load")
