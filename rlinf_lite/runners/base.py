"""What all training runs share: the loop over steps, evaluation, checkpoints, logs, and a clean end on Ctrl-C."""

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
    """Drives one training run. `init_workers` brings the groups up, `run` trains, `evaluate` measures.

    A subclass says what one step is, and what the state of a run is besides the actor's.
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
    """How many steps were done before this process."""
    _secured_step: int
    """How many completed steps a failure would not take back, at the farthest that the run got."""

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
        """`claim`: the run, if `claim_run` was called before; without it `run` claims one, for as long as it lasts."""
        self.cfg, self.actor, self.rollout, self.supervisor = cfg, actor, rollout, supervisor
        self._groups = (*others, rollout, actor)
        self._trained_groups = [actor]  # what they hold is in checkpoints alone
        self.completed_steps = 0
        self._evals: dict[int, EvalSummary] = {}  # by step
        self._stop, self._interrupted = StopRequest(cfg.runner.phase_timeout_s), False
        self._wait = self._stop.wait
        self._update_s = 0.0  # how long the last update took
        self._num_transfers = 0  # of weights

        self._claim = paths = claim or find_run(cfg)
        self._own_claim: AbstractContextManager[Any] = nullcontext(paths) if claim else paths
        self.run_dir, self._resume_from = paths.log_dir, paths.resume_from
        self.store = CheckpointStore(paths.checkpoint_dir, cfg.runner.keep_checkpoints)
        groups = self._groups, self._trained_groups
        self.states = SavedStates(self.store, self.run_dir, self._stop, self._state, self._write_state, *groups)
        self.step_log = StepLog(cfg, self.run_dir, self.states.disk)

    # what a subclass says

    @abstractmethod
    def init_workers(self) -> None:
        """Build what the workers need, and load the checkpoint if the run resumes."""

    def prepare(self) -> None:  # noqa: B027 (most runs have nothing to do)
        """What comes before the first step of this process; an interrupt is handled as within a step."""

    @abstractmethod
    def run_step(self, step: int) -> None:
        """One step: have the groups work, wait for the updates by `_train`, which completes the step, and log."""

    @abstractmethod
    def evaluate(self, videos: Path | None = None) -> EvalSummary:
        """Measure the actor's present weights, on the same seeded episodes every time.

        `videos` is where a GIF of the first episodes goes, if there is anything to see.
        """

    def _flows(self) -> list[tuple[WorkerGroup, WorkerGroup]]:
        """Pairs of groups of which the first sends to the second without a call of this driver."""
        return [(self.actor, self.rollout)]

    def _experience(self) -> dict[str, int]:
        """What evaluations are plotted over besides steps: `env_steps`, if there are any."""
        return {}

    def _num_updates_done(self) -> int:
        """What `control.snapshot_interval` counts."""
        return self.completed_steps

    def _state(self) -> dict[str, Any]:
        """What this driver needs to go on after the last completed step; JSON."""
        return {"completed_steps": self.completed_steps, "run": self.run_dir.name}

    def _load_state(self, state: dict[str, Any]) -> None:
        """Take what `_state` gave."""
        self.completed_steps = state["completed_steps"]

    def _save_state(self, directory: Path) -> None:
        """Write what is needed to go on from here besides the actor's part."""
        (directory / "runner.json").write_text(json.dumps(self._state()))
        write_config(self.cfg, directory)

    def _load(self, checkpoint: Path) -> None:
        """Go back to, or on from, a checkpoint or snapshot."""
        self._load_state(read_state(checkpoint))
        loading = self.actor.load_checkpoint(str(checkpoint), self.completed_steps)
        self._wait(loading, what=f"{checkpoint} to load", says_so=True)
        log.info("resumed from %s: %d steps are done", checkpoint, self.completed_steps)

    def _forget_unfinished_step(self) -> None:  # noqa: B027 (most runs have nothing to do)
        """Bring this driver, and workers that still live, to the end of the last completed step; the trained groups
        are there already."""

    # the run

    def run(self, until: int | None = None) -> RunResult:
        """Train to the last step, or until Ctrl-C or SIGTERM, which leaves a checkpoint of the last completed step.
        A second Ctrl-C raises KeyboardInterrupt at once.

        `until`: pause after so many steps, with a checkpoint, for which no earlier one is deleted. A runner with other
        groups and the same claim goes on from there (`run_placed`)."""
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
                        if self.supervisor is None or full:  # workers that start again have no more room
                            raise
                        self._recover(self.supervisor, error)  # what failed is then done again
            has_ended = self._interrupted or self.completed_steps >= self.total_steps
            if not has_ended and self._stop.requested:  # while it paused; the next runner would not know
                has_ended = self._interrupted = True
                if self.supervisor is not None:
                    self.supervisor.interrupted(self.completed_steps)
            return self._result(has_ended)

    @contextmanager
    def _open_run(self) -> Iterator[None]:
        """Open the run's directory with config, versions and logs, progress on the terminal, and a place for
        snapshots."""
        try:
            begin_run(self.cfg, self.run_dir, self.store, self.completed_steps, self.total_steps, self._resume_from)
        except OSError as error:
            if not has_no_room(error):
                raise
            raise DiskFullError(f"the disk is full: {room_at(self.run_dir)}. Make room, and begin again") from error
        self._first_step = self._secured_step = self.completed_steps
        nodes = [member.node.node_id for group in self._trained_groups for member in group.members]
        snapshots = Snapshots(self.cfg.control.snapshot_interval, self._num_parameters, nodes)
        resume_step = -1 if self._claim.begun else None  # another placement has failed before it had a checkpoint
        if self._resume_from is not None:
            resume_step = self.completed_steps
        self._claim.begun = True
        opened = self.step_log.open(self.completed_steps, self.total_steps, resume_step)
        with opened as (self.logger, self.progress), self._stop:
            self.states.open(snapshots, self._resume_from, self.progress.message)
            yield

    def _begin(self) -> None:
        """What comes before the first step of this process, and a state to go back to."""
        if self.supervisor is not None:
            for source, target in self._flows():
                source.feeds(target)
            self.supervisor.begin(str(self.run_dir), self.completed_steps, self.total_steps)
        if self.cfg.runner.task_type != "sft":
            recomputed, why = recomputed_logprobs(self.cfg)
            which = "the actor's, computed before updates" if recomputed else "those of acting"
            self.progress.message(f"log-probabilities that ratios begin with: {which} ({why})")
            if self.total_steps <= (warm := cast(Any, self.cfg).algorithm.critic_warmup_steps):
                text = f"of {self.total_steps} steps in all; only the critic trains, and the policy stays as it is"
                self.progress.message(f"note: algorithm.critic_warmup_steps is {warm}, {text}")
        self.prepare()
        snapshots = self.states.snapshots
        snapshots.take(self.completed_steps, self.states.write)
        if self.supervisor is not None and snapshots.newest() is None and self.save_checkpoint() is not None:
            log.warning("no snapshots (%s): checkpoints are what the actor is rebuilt from", snapshots.why_none)
        self.progress.start_clock()

    def _save_and_evaluate(self, until: int | None) -> bool:
        """Between two steps: save and evaluate where due. Returns whether there is another step to do."""
        at_end = self.completed_steps >= self.total_steps
        if until is not None and self.completed_steps >= until and not at_end:
            self.save_checkpoint()
            newest = self.store.newest()
            self._claim.resume_from = None if newest is None else newest.resolve()
            return False

        def due(interval: int) -> bool:
            return interval > 0 and (at_end or self.completed_steps % interval == 0)

        # there is nothing new to save before this process has done a step
        if due(self.cfg.runner.save_interval) and (at_end or self.completed_steps > self._first_step):
            self.save_checkpoint()
        if due(self.cfg.runner.val_check_interval):
            self._evaluate_and_log()
        return not at_end

    def save_checkpoint(self) -> Path | None:
        """See `SavedStates.save`."""
        return self.states.save()

    def _evaluate_and_log(self) -> None:
        step = self.completed_steps
        if step not in self._evals:
            film = self.step_log.film(step)
            self._evals[step] = self.evaluate(film)
            self.step_log.write_evaluation(step, self._evals[step], film, self._experience())

    def _after_step(self) -> None:
        """A step is only done once there is a state to go back to, if one is due."""
        if self._snapshot_is_due():
            self.states.snapshots.take(self.completed_steps, self.states.write)
        self._secured_step = self.completed_steps
        if self.supervisor is not None:
            self.supervisor.progress(self.completed_steps)

    def _snapshot_is_due(self) -> bool:
        is_only_way = self._update_s > STOP_TIMEOUT_S / 2
        return self.states.snapshots.due(self._num_updates_done(), is_only_way)

    # what a step is made of

    def update_rollout_weights(self) -> None:
        """Bring the rollout workers to the actor's weights."""
        with self.step_log.phase("sync_weights"):
            self._wait(*self._transfer_weights(), what="weight sync")

    def _transfer_weights(self) -> tuple[Handle, Handle]:
        self._num_transfers += 1
        sending = self.actor.sync_model_to_rollout(self._num_transfers)
        return self.rollout.sync_model_from_actor(self.completed_steps, self._num_transfers), sending

    def _train(self, *handles: Handle) -> list[Any]:
        """Wait for the updates of a step, which complete it, even if workers that play ahead fail meanwhile."""
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
        """Log the step, for which workers did `spans`; see `StepLog.write`. `before`: what was done for the step
        before, where that may overlap with the rollouts of this one."""
        if self.supervisor is not None:
            metrics = {**metrics, **self.supervisor.metrics(), "time/snapshot": self.states.snapshots.took_s}
        self.step_log.write(self.completed_steps, metrics, [*spans, *before], pair, rollouts)
        self._show_timeline(self.completed_steps, [*spans, *self.step_log.spans])

    def _show_timeline(self, step: int, spans: Sequence[Span]) -> None:
        """Keep the timeline of the third step, or of the last."""
        if step in (3, self.total_steps):
            self.step_log.write_timeline(step, [span for span in spans if span.start >= self.step_log.began])

    # checkpoints, and what is done when workers fail

    def _write_state(self, directory: Path) -> None:
        """Write everything that training goes on from."""
        self._wait(self.actor.save_checkpoint(str(directory)), what="checkpoint", grace_s=math.inf, alone=True)
        self._save_state(directory / "training_state")

    def _resume(self) -> None:
        """Load what the run resumes from, if it does. If that fails, `run` is never reached: let go of the run."""
        if self._resume_from is None:
            return
        try:
            self._load(self._resume_from)
        except BaseException:  # Ctrl-C too
            with self._own_claim:
                raise

    def _recover(self, supervisor: Supervisor, error: SchedulerError) -> None:
        """Have workers started again, and everything brought back to the end of a completed step."""
        started, step = time.monotonic(), self._secured_step
        self.progress.message(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        in_update, self.states.in_update = self.states.in_update, True  # until all of this is done
        with self._stop.at_once():
            recovered = supervisor.recover(error, lambda decision: self._restore(decision.ranks, in_update))
        self.states.in_update = False
        again = ", ".join(f"{group} {list(ranks)}" for group, ranks in recovered.ranks.items()) or "no worker"
        lost = f", steps done again: {step - self.completed_steps}" if step > self.completed_steps else ""
        self.progress.message(f"recovered in {time.monotonic() - started:.1f} s: {again} started again{lost}")

    def _restore(self, restarted: Mapping[str, Sequence[int]], in_update: bool) -> int:
        """Go back to the end of a completed step, the last one if possible; returns how many steps that loses.
        `restarted`: ranks that were started again, by group. `in_update`: an update was broken off."""
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
        """A run that is stopped, or fails, ends here, and leaves a checkpoint of its last completed step, or of the
        newest one that has a snapshot."""
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
            except Exception as error:  # any: training is over, and must not be said to have failed
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
