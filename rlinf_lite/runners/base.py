"""Runner: the shared part of all training runs: the loop over steps, evaluation, checkpoints, logs, and Ctrl-C."""

from __future__ import annotations

import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlinf_lite.config.names import recomputed_logprobs
from rlinf_lite.config.schema import BaseConfig
from rlinf_lite.metrics import EvalSummary, MetricLogger, Progress, Span
from rlinf_lite.preview.checkpointing import training_options
from rlinf_lite.registry import of_main
from rlinf_lite.report import write_report
from rlinf_lite.runners.checkpoints import CheckpointStore, Snapshots, read_state
from rlinf_lite.runners.full_disk import DiskFullError, has_no_room, room_at
from rlinf_lite.runners.run_config import write_config
from rlinf_lite.runners.run_paths import RunClaim, begin_run, find_run
from rlinf_lite.runners.saved_states import SavedStates
from rlinf_lite.runners.step_log import StepLog
from rlinf_lite.runners.stopping import STOP_TIMEOUT_S, RunResult, Stopped, StopRequest
from rlinf_lite.scheduler import Handle, SchedulerError, SharedMemoryFullError, WorkerGroup

if TYPE_CHECKING:
    from rlinf_lite.control import Supervisor

log = logging.getLogger(__name__)


class Runner(ABC):
    """Drives one training run. `init_workers` builds the workers' models, `run` trains, `evaluate` measures.

    A subclass defines one step, and the state of the run besides the actor's.
    """

    cfg: BaseConfig

    run_dir: Path
    store: CheckpointStore
    states: SavedStates
    step_log: StepLog
    logger: MetricLogger
    progress: Progress

    total_steps: int
    completed_steps: int
    _first_step: int
    """Number of steps that were complete before this process."""
    _secured_step: int
    """Number of steps that count as done: complete, and with a snapshot if one was due. A recovery that goes back
    further loses steps, which are done again."""

    _num_parameters: int

    def __init__(
        self,
        cfg: BaseConfig,
        actor: WorkerGroup,
        rollout: WorkerGroup,
        *others: WorkerGroup,
        supervisor: Supervisor | None = None,
        claim: RunClaim | None = None,
    ) -> None:
        """`claim`: the run's directory, if `claim_run` was called before; without it `run` claims one until it ends."""
        self.cfg, self.actor, self.rollout, self.supervisor = cfg, actor, rollout, supervisor
        self._groups = (*others, rollout, actor)
        self._trained_groups = [actor]  # groups whose state can only be restored from a checkpoint or snapshot
        self.completed_steps = 0
        self._evals: dict[int, EvalSummary] = {}  # by step
        self._stop, self._interrupted = StopRequest(cfg.runner.phase_timeout_s), False
        self._wait = self._stop.wait
        self._update_s = 0.0  # duration of the last update
        self._num_transfers = 0  # number of weight transfers so far

        self._claim = paths = claim or find_run(cfg)
        self._own_claim: AbstractContextManager[Any] = nullcontext(paths) if claim else paths
        self.run_dir, self._resume_from = paths.log_dir, paths.resume_from
        self.store = CheckpointStore(paths.checkpoint_dir, cfg.runner.keep_checkpoints)
        groups = self._groups, self._trained_groups
        self.states = SavedStates(self.store, self.run_dir, self._stop, self._state, self._write_state, *groups)
        self.step_log = StepLog(cfg, self.run_dir, self.states.disk)

    # what a subclass defines

    @abstractmethod
    def init_workers(self) -> None:
        """Build the workers' models and environments, and load the checkpoint if the run resumes."""

    def prepare(self) -> None:  # noqa: B027 (most runs have nothing to do)
        """Work before the first step of this process; an interrupt is handled as within a step."""

    @abstractmethod
    def run_step(self, step: int) -> None:
        """Do one step: call the groups, wait for the updates with `_train`, which completes the step, and log."""

    @abstractmethod
    def evaluate(self, videos: Path | None = None) -> EvalSummary:
        """Evaluate the actor's present weights, on the same seeded episodes every time.

        `videos`: the path for a GIF of the first episodes, written if they have images.
        """

    def _flows(self) -> list[tuple[WorkerGroup, WorkerGroup]]:
        """Pairs of groups (a, b) where a sends messages to b directly, not through the driver."""
        return [(self.actor, self.rollout)]

    def _experience(self) -> dict[str, int]:
        """Counters besides steps that evaluations are plotted over, such as `env_steps`."""
        return {}

    def _num_updates_done(self) -> int:
        """The number that `control.snapshot_interval` counts."""
        return self.completed_steps

    def _state(self) -> dict[str, Any]:
        """The driver's state after the last completed step, as JSON."""
        return {"completed_steps": self.completed_steps, "run": self.run_dir.name}

    def _load_state(self, state: dict[str, Any]) -> None:
        """Restore the driver from `_state`'s result."""
        self.completed_steps = state["completed_steps"]

    def _save_state(self, directory: Path) -> None:
        """Write the state of the run besides the actor's part."""
        (directory / "runner.json").write_text(json.dumps(self._state()))
        write_config(self.cfg, directory)

    def _load(self, checkpoint: Path) -> None:
        """Restore the driver and the actor from a checkpoint or snapshot."""
        self._load_state(read_state(checkpoint))
        loading = self.actor.load_checkpoint(str(checkpoint), self.completed_steps)
        self._wait(loading, what=f"{checkpoint} to load", says_so=True)
        log.info("resumed from %s: %d steps are done", checkpoint, self.completed_steps)

    def _forget_unfinished_step(self) -> None:  # noqa: B027 (most runs have nothing to do)
        """Reset the driver and the living workers to the end of the last completed step; the trained groups are there
        already."""

    # the run

    def run(self, until: int | None = None) -> RunResult:
        """Train to the last step, or until Ctrl-C or SIGTERM, which saves a checkpoint of the last completed step.
        A second Ctrl-C raises KeyboardInterrupt at once.

        `until`: pause when this many steps are complete, with a checkpoint (no earlier one is deleted). A runner with
        other groups and the same claim can go on from there (`run_placed`)."""
        if until is not None:
            self.store.keep = 10**6
        with self._own_claim:
            with self._open_run(), self._save_what_is_done():
                self._begin()
                while True:
                    self._stop.check()
                    try:
                        if not self._save_and_evaluate(until):
                            break
                        self.step_log.begin_step()
                        self.run_step(self.completed_steps)
                        self._after_step()
                    except SchedulerError as error:
                        causes = error, error.__cause__
                        full = any(isinstance(cause, SharedMemoryFullError) for cause in causes)
                        if self.supervisor is None or full:  # restarted workers would have no more room
                            raise
                        self._recover(self.supervisor, error)  # the loop then does the failed step again
            has_ended = self._interrupted or self.completed_steps >= self.total_steps
            if not has_ended and self._stop.requested:  # asked during the pause; the next runner would not know
                has_ended = self._interrupted = True
                if self.supervisor is not None:
                    self.supervisor.interrupted(self.completed_steps)
            return self._result(has_ended)

    @contextmanager
    def _open_run(self) -> Iterator[None]:
        """Write the run's config and versions, and open its logs, the progress on the terminal, and its snapshots."""
        try:
            begin_run(self.cfg, self.run_dir, self.store, self.completed_steps, self.total_steps, self._resume_from)
        except OSError as error:
            if not has_no_room(error):
                raise
            raise DiskFullError(f"the disk is full: {room_at(self.run_dir)}. Make room, and begin again") from error
        self._first_step = self._secured_step = self.completed_steps
        nodes = [member.node.node_id for group in self._trained_groups for member in group.members]
        snapshots = Snapshots(self.cfg.control.snapshot_interval, self._num_parameters, nodes)
        resume_step = -1 if self._claim.begun else None  # -1: another placement failed before its first checkpoint
        if self._resume_from is not None:
            resume_step = self.completed_steps
        self._claim.begun = True
        opened = self.step_log.open(self.completed_steps, self.total_steps, resume_step)
        with opened as (self.logger, self.progress), self._stop:
            self.states.open(snapshots, self._resume_from, self.progress.message)
            yield

    def _begin(self) -> None:
        """Work before the first step of this process; ends with a state to go back to."""
        if self.supervisor is not None:
            for source, target in self._flows():
                source.feeds(target)
            self.supervisor.begin(str(self.run_dir), self.completed_steps, self.total_steps)
        if self.cfg.runner.task_type in ("embodied", "reasoning"):
            recomputed, why = recomputed_logprobs(self.cfg)
            which = "the actor's, computed before updates" if recomputed else "those of acting"
            self.progress.message(f"log-probabilities that ratios begin with: {which} ({why})")
            if self.total_steps <= (warm := cast(Any, self.cfg).algorithm.critic_warmup_steps):
                text = f"of {self.total_steps} steps in all; only the critic trains, and the policy stays as it is"
                self.progress.message(f"note: algorithm.critic_warmup_steps is {warm}, {text}")
        options = training_options(cast(Any, self.cfg))[1]
        if options is not None and options.compile:
            self.progress.message("note: the first update takes a minute longer or more, as layers are compiled in it")
        self.prepare()
        snapshots = self.states.snapshots
        snapshots.take(self.completed_steps, self.states.write)
        if self.supervisor is not None and snapshots.newest() is None and self.save_checkpoint() is not None:
            log.warning("no snapshots (%s): checkpoints are what the actor is rebuilt from", snapshots.why_none)
        self.progress.start_clock()

    def _save_and_evaluate(self, until: int | None) -> bool:
        """Save and evaluate between two steps, if due. Returns whether there is another step to do."""
        at_end = self.completed_steps >= self.total_steps
        if until is not None and self.completed_steps >= until and not at_end:
            self.save_checkpoint()
            newest = self.store.newest()
            self._claim.resume_from = None if newest is None else newest.resolve()
            return False

        def due(interval: int) -> bool:
            return interval > 0 and (at_end or self.completed_steps % interval == 0)

        # before this process has done a step there is nothing new to save
        if due(self.cfg.runner.save_interval) and (at_end or self.completed_steps > self._first_step):
            self.save_checkpoint()
        if due(self.cfg.runner.val_check_interval):
            self._evaluate_and_log()
        return not at_end

    def save_checkpoint(self) -> Path | None:
        """Write a checkpoint of the last completed step; see `SavedStates.save`."""
        return self.states.save()

    def _evaluate_and_log(self) -> None:
        step = self.completed_steps
        if step not in self._evals:
            film = self.step_log.film(step)
            self._evals[step] = self.evaluate(film)
            self.step_log.write_evaluation(step, self._evals[step], film, self._experience())

    def _after_step(self) -> None:
        """Take a snapshot if one is due; only then does the step count as done."""
        if self._snapshot_is_due():
            self.states.snapshots.take(self.completed_steps, self.states.write)
        self._secured_step = self.completed_steps
        if self.supervisor is not None:
            self.supervisor.progress(self.completed_steps)

    def _snapshot_is_due(self) -> bool:
        is_only_way = self._update_s > STOP_TIMEOUT_S / 2
        return self.states.snapshots.due(self._num_updates_done(), is_only_way)

    # the parts of a step

    def update_rollout_weights(self) -> None:
        """Send the actor's weights to the rollout workers, and wait."""
        with self.step_log.phase("sync_weights"):
            self._wait(*self._transfer_weights(), what="weight sync")

    def _transfer_weights(self) -> tuple[Handle, Handle]:
        self._num_transfers += 1
        sending = self.actor.sync_model_to_rollout(self._num_transfers)
        return self.rollout.sync_model_from_actor(self.completed_steps, self._num_transfers), sending

    def _train(self, *handles: Handle) -> list[Any]:
        """Wait for the updates of a step, and count the step as complete, even if workers that play ahead fail
        meanwhile. Returns the results of the calls."""
        self.states.in_update, started = True, time.monotonic()
        trained = self._wait(*handles, what="training", grace_s=STOP_TIMEOUT_S, alone=True)
        self._update_s = time.monotonic() - started
        self._complete_step()
        self.states.in_update = False
        return trained

    def _complete_step(self) -> None:
        self.completed_steps += 1

    def _log_step(
        self,
        metrics: Mapping[str, float],
        spans: Sequence[Span],
        pair: tuple[str, str] = ("env", "rollout"),
        rollouts: tuple[float, float] | None = None,
        before: Sequence[Span] = (),
    ) -> None:
        """Log the step with the workers' `spans`; see `StepLog.write`. `before`: spans of the step before, if these may
        overlap with the rollouts of this one."""
        if self.supervisor is not None:
            metrics = {**metrics, **self.supervisor.metrics(), "time/snapshot": self.states.snapshots.took_s}
        self.step_log.write(self.completed_steps, metrics, [*spans, *before], pair, rollouts)
        self._show_timeline(self.completed_steps, [*spans, *self.step_log.spans])

    def _show_timeline(self, step: int, spans: Sequence[Span]) -> None:
        """Write the timeline of the third step, or of the last."""
        if step in (3, self.total_steps):
            self.step_log.write_timeline(step, [span for span in spans if span.start >= self.step_log.began])

    # checkpoints, and recovery when workers fail

    def _write_state(self, directory: Path) -> None:
        """Write the whole state of the run: the actor's part and the driver's."""
        self._wait(self.actor.save_checkpoint(str(directory)), what="checkpoint", grace_s=math.inf, alone=True)
        self._save_state(directory / "training_state")

    def _resume(self) -> None:
        """Load the checkpoint that the run resumes from, if any. If that fails, release the claim, as `run` is not
        called."""
        if self._resume_from is None:
            return
        try:
            self._load(self._resume_from)
        except BaseException:  # Ctrl-C too
            with self._own_claim:
                raise

    def _recover(self, supervisor: Supervisor, error: SchedulerError) -> None:
        """Restart failed workers, and restore the run to the end of a completed step."""
        started, step = time.monotonic(), self._secured_step
        self.progress.message(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        in_update, self.states.in_update = self.states.in_update, True  # until the recovery is complete
        with self._stop.at_once():
            recovered = supervisor.recover(error, lambda decision: self._restore(decision.ranks, in_update))
        self.states.in_update = False
        again = ", ".join(f"{group} {list(ranks)}" for group, ranks in recovered.ranks.items()) or "no worker"
        lost = f", steps done again: {step - self.completed_steps}" if step > self.completed_steps else ""
        self.progress.message(f"recovered in {time.monotonic() - started:.1f} s: {again} started again{lost}")

    def _restore(self, restarted: Mapping[str, Sequence[int]], in_update: bool) -> int:
        """Go back to the end of a completed step, the last one if possible; returns how many steps are lost.
        `restarted`: ranks that were restarted, by group. `in_update`: an update was interrupted."""
        logged = self.completed_steps
        if in_update or any(group.name in restarted for group in self._trained_groups):
            self._load(self.states.newest())
        else:
            self._forget_unfinished_step()
        lost = max(0, self._secured_step - self.completed_steps)
        self._secured_step = self.completed_steps
        if self.completed_steps < logged:
            self._evals = {step: found for step, found in self._evals.items() if step <= self.completed_steps}
            self.logger.rewind(self.completed_steps)
        return lost

    # the end

    @contextmanager
    def _save_what_is_done(self) -> Iterator[None]:
        """Save when the run is stopped or fails inside the block: a checkpoint of the last completed step, or of the
        newest snapshot. A stop ends here; an error is raised again."""
        num_updates_before = self._num_updates_done()
        try:
            yield
        except Stopped:
            self._interrupted = True
            self.completed_steps = self.states.save_stopped()
            if self.supervisor is not None:
                self.supervisor.interrupted(self.completed_steps)
        except Exception as error:  # any: raised again
            if self._num_updates_done() > num_updates_before:
                self.states.save_failed(error)
            if isinstance(error, DiskFullError):
                raise DiskFullError(f"{error}. {self.states.how_to_go_on()}") from None
            raise
        finally:
            self.states.snapshots.remove()

    def _result(self, has_ended: bool = True) -> RunResult:
        checkpoint, report = self.store.newest(), None
        if has_ended and self.cfg.runner.report:
            try:
                report = write_report(self.run_dir)
            except Exception as error:  # any: training itself has succeeded
                traceback = None if has_no_room(error) else error
                log.error("no report (%s); try again: rlinf-lite report %s", error, self.run_dir, exc_info=traceback)
        return RunResult(
            completed_steps=self.completed_steps,
            interrupted=self._interrupted,
            run_dir=self.run_dir,
            checkpoint=checkpoint,
            total_steps=self.total_steps,
            evals=list(self._evals.values()),
            report=report,
            program=any(of_main()),
            imitation=self.cfg.runner.task_type == "sft",
        )
