"""What all training runs share: the loop over steps, evaluation, checkpoints, logs, and a clean end on Ctrl-C."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rlinf_lite.config.schema import BaseConfig
from rlinf_lite.metrics import EvalSummary, MetricLogger, Progress, Span
from rlinf_lite.report import write_report
from rlinf_lite.runners.checkpoints import CheckpointError, CheckpointStore, read_state, verify
from rlinf_lite.runners.recovery import Recovered, RunSupervisor, Snapshots
from rlinf_lite.runners.run_config import write_config
from rlinf_lite.runners.run_paths import RunClaim, begin_run, find_run
from rlinf_lite.runners.run_result import RunResult
from rlinf_lite.runners.stopping import Stopped, StopRequest
from rlinf_lite.runners.versions import write_versions
from rlinf_lite.scheduler import Handle, SchedulerError, WorkerError, WorkerGroup, wait_all

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""Longest wait, after Ctrl-C, for an update that is under way, and for workers to give up what they do. Batch systems
give 30 s before they kill, and what comes after this takes some of them too."""


class Runner(ABC):
    """Drives one training run. `init_workers` brings the groups up, `run` trains, `evaluate` measures.

    A subclass says what one step is.
    """

    cfg: BaseConfig

    run_dir: Path
    store: CheckpointStore
    logger: MetricLogger
    progress: Progress

    total_steps: int
    completed_steps: int
    _num_parameters: int
    _first_step: int
    _secured_step: int

    def __init__(
        self,
        cfg: BaseConfig,
        actor: WorkerGroup,
        rollout: WorkerGroup,
        *others: WorkerGroup,
        supervisor: RunSupervisor | None = None,
        claim: RunClaim | None = None,
    ) -> None:
        """`claim`: the run, where `claim_run` was called before; else `run` claims it, for as long as it lasts."""
        self.cfg, self.actor, self.rollout, self.supervisor = cfg, actor, rollout, supervisor
        self._groups = (*others, rollout, actor)
        self._trained_groups = [actor]  # what they hold is in checkpoints alone
        self._snapshots: Snapshots | None = None
        self.completed_steps = 0
        self._evals: list[EvalSummary] = []
        self._times: dict[str, float] = {}
        self._driver_spans: list[Span] = []
        self._stop = StopRequest()
        self._is_settled = True  # the trained groups hold the state of the last completed step
        self._update_s = 0.0  # how long the last update took
        self._saved: dict[str, Any] = {}  # the state that is in the newest checkpoint
        self._evaluated_step = -1

        paths = claim or find_run(cfg)
        self._own_claim: AbstractContextManager[Any] = nullcontext(paths) if claim else paths
        self.run_dir, self._resume_from = paths.log_dir, paths.resume_from
        self.store = CheckpointStore(paths.checkpoint_dir, cfg.runner.keep_checkpoints)

    @abstractmethod
    def init_workers(self) -> None:
        """Build what the workers need, and load the checkpoint where the run resumes."""

    def run(self) -> RunResult:
        """Train to the last step, or until Ctrl-C or SIGTERM, which leaves a checkpoint of the last completed step.
        A second Ctrl-C raises KeyboardInterrupt at once."""
        with self._own_claim:
            return self._run()

    def _run(self) -> RunResult:
        cfg = self.cfg.runner
        begin_run(self.cfg, self.run_dir, self.store, self.completed_steps, self._resume_from)
        write_versions(self.run_dir)
        self.logger = MetricLogger(
            self.run_dir,
            cfg.logger.backends,
            project_name=cfg.logger.project_name,
            config=self.cfg.model_dump(mode="json"),
            resume_step=None if self._resume_from is None else self.completed_steps,
        )
        self._first_step = self._secured_step = self.completed_steps
        if self._resume_from is not None and self._resume_from.parent == self.store.root.resolve():
            self._saved = read_state(self._resume_from)
        interrupted, num_updates_before = False, self._num_updates_done()
        with (
            self.logger,
            self._stop,
            Progress(self.total_steps, self.run_dir.name, start_step=self.completed_steps) as self.progress,
        ):
            try:
                self._begin()
                while self._go_on():
                    self._stop.check()
            except Stopped:
                interrupted = True
                self._save_stopped()
                if self.supervisor is not None:
                    self.supervisor.interrupted(self.completed_steps)
            except Exception:
                if self._num_updates_done() > num_updates_before:
                    self._save_snapshot()  # of what was done before this
                raise
            finally:
                if self._snapshots is not None:
                    self._snapshots.remove()
        newest = self.store.steps()[-1:]
        checkpoint = newest[0] if newest else None
        report = self._write_report() if cfg.report else None
        return RunResult(
            self.completed_steps,
            interrupted,
            self.run_dir,
            checkpoint,
            self.total_steps,
            list(self._evals),
            report,
            self._how_to_measure(checkpoint),
        )

    def _begin(self) -> None:
        """What comes before the first step of this process, and a state to go back to."""
        if self.supervisor is not None:
            self.supervisor.begin(str(self.run_dir), self.completed_steps, self.total_steps)
        nodes = [member.node.node_id for group in self._trained_groups for member in group.members]
        self._snapshots = Snapshots(self.cfg.control.snapshot_interval, self._num_parameters, nodes)
        self.prepare()
        self._take_snapshot(anyway=True)
        if self.supervisor is not None and self._snapshots.newest() is None and self._saved != self._plain_state():
            log.warning("no snapshots (%s): checkpoints are what the actor is rebuilt from", self._snapshots.why_none)
            self.save_checkpoint()
        self.progress.start_clock()

    def _go_on(self) -> bool:
        """Do what comes next, a step and what surrounds it; False when nothing is left. Where a worker fails, it is
        started again, and this is done again."""
        cfg = self.cfg.runner
        try:
            if self.completed_steps > self._first_step and self._due(cfg.save_interval):
                self.save_checkpoint()
            if self.completed_steps < self.total_steps:
                if self._due(cfg.val_check_interval):
                    self._evaluate_and_log()
                self.run_step(self.completed_steps)
                self._after_step()
                return True
            if cfg.val_check_interval > 0:
                self._evaluate_and_log()
            if cfg.save_interval > 0:
                self.save_checkpoint()
        except SchedulerError as error:
            if self.supervisor is None:
                raise
            self._recover(self.supervisor, error)
            return True
        return False

    def _after_step(self) -> None:
        """What the run could go back to. A step is only done once that is there."""
        self._take_snapshot()
        self._secured_step = self.completed_steps
        if self.supervisor is not None:
            self.supervisor.progress(self.completed_steps)

    def _take_snapshot(self, anyway: bool = False) -> None:
        """Where one is due: what a failed actor is rebuilt from, and what is saved when the run is stopped in the
        middle of an update, which then has not changed it."""
        if self._snapshots is None or self._snapshots.why_none or not (anyway or self._snapshot_is_due()):
            return
        self._snapshots.take(self.completed_steps, self._write_state)
        if self._snapshots.why_none:  # the failed wait has aborted those that were still writing
            self._free(self._trained_groups)

    def _snapshot_is_due(self) -> bool:
        is_only_way = self._update_s > STOP_TIMEOUT_S / 2
        return self._snapshots is not None and self._snapshots.due(self._num_updates_done(), is_only_way)

    def _num_updates_done(self) -> int:
        """What `control.snapshot_interval` counts."""
        return self.completed_steps

    def _recover(self, supervisor: RunSupervisor, error: SchedulerError) -> None:
        started, step = time.monotonic(), self._secured_step
        self.progress.message(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        was_settled, self._is_settled = self._is_settled, False
        with self._stop.at_once():
            recovered = supervisor.recover(error, lambda recovered: self._restore(recovered, was_settled))
        self._is_settled = True
        again = ", ".join(f"{group} {list(ranks)}" for group, ranks in recovered.ranks.items()) or "nobody"
        lost = f", steps done again: {step - self.completed_steps}" if step > self.completed_steps else ""
        self.progress.message(f"recovered in {time.monotonic() - started:.1f} s: {again} started again{lost}")

    def _restore(self, recovered: Recovered, was_settled: bool) -> int:
        """Go back to the end of a completed step, the last one if possible; returns how many steps that loses.
        `was_settled`: the failure did not come in the middle of an update."""
        logged = self.completed_steps
        if not was_settled or any(group.name in recovered.ranks for group in self._trained_groups):
            self._load(self._newest_state())
        else:
            self._load_state(self._state())
            self._rewind()
        lost = max(0, self._secured_step - self.completed_steps)
        self._secured_step = self.completed_steps
        if self.completed_steps < logged:
            self._evaluated_step = min(self._evaluated_step, self.completed_steps)
            self.logger.rewind(self.completed_steps)
        return lost

    def _newest_state(self) -> Path:
        """The newest snapshot, or the newest checkpoint."""
        saved = self.store.steps()[-1:]
        snapshot = None if self._snapshots is None else self._snapshots.newest()
        found = [*([] if snapshot is None else [snapshot]), *saved]
        if not found:
            raise CheckpointError("the actor cannot be rebuilt: there is neither a snapshot nor a checkpoint")
        # of two of one step the snapshot: a checkpoint of step 0 may be of the middle of supervised training
        newest = max(found, key=lambda path: int(read_state(path)["completed_steps"]))
        if newest in saved:
            verify(newest)
        return newest

    def _rewind(self) -> None:  # noqa: B027 (most runs have nothing to do)
        """Bring workers that still live to the end of the last completed step."""

    def _how_to_measure(self, checkpoint: Path | None) -> str:
        """A command that evaluates a checkpoint."""
        return f"{sys.executable} -m rlinf_lite.cli eval --checkpoint {checkpoint}"

    def prepare(self) -> None:  # noqa: B027 (most runs have nothing to do)
        """What comes before the first step of this process; an interrupt is handled as within a step."""

    @abstractmethod
    def run_step(self, step: int) -> None:
        """One step: train, call `_complete_step`, log."""

    def update_rollout_weights(self) -> None:
        """Bring the rollout workers to the actor's weights."""
        with self._phase("sync_weights"):
            sending = self.actor.sync_model_to_rollout()
            self._wait(self.rollout.sync_model_from_actor(self.completed_steps), sending, what="weight sync")

    @abstractmethod
    def evaluate(self, videos: Path | None = None) -> EvalSummary:
        """Measure the actor's present weights, on the same seeded episodes every time.

        `videos` is where a GIF of the first episodes goes, if there is anything to see.
        """

    def save_checkpoint(self) -> Path | None:
        """Write a checkpoint of the last completed step; a failed write leaves earlier ones untouched."""
        if self._saved == self._plain_state():
            return None
        with self._phase("checkpoint"):
            partial = self.store.begin(self.completed_steps)
            try:
                self._write_state(partial)
                path = self.store.commit(self.completed_steps, partial)
            finally:
                self.store.discard(partial)
        self._saved = self._plain_state()
        self.progress.message(f"checkpoint {path}")
        return path

    def _write_state(self, directory: Path) -> None:
        """Everything that training goes on from. Raises CheckpointError where it cannot be written."""
        try:
            self._wait(self.actor.save_checkpoint(str(directory)), what="checkpoint", grace_s=math.inf)
            self._save_state(directory / "training_state")
        except (OSError, WorkerError) as error:
            problem = error.__cause__ if isinstance(error, WorkerError) else error
            if not isinstance(problem, OSError | SafetensorError):
                raise
            raise CheckpointError(f"cannot write {directory}: {problem}") from error

    def _state(self) -> dict[str, Any]:
        """What this driver needs to go on from here; JSON."""
        return {"completed_steps": self.completed_steps, "run": self.run_dir.name}

    def _plain_state(self) -> dict[str, Any]:
        """`_state` as a checkpoint has it."""
        plain: dict[str, Any] = json.loads(json.dumps(self._state()))
        return plain

    def _load_state(self, state: dict[str, Any]) -> None:
        """Take what `_state` gave."""
        self.completed_steps = state["completed_steps"]

    def _save_state(self, directory: Path) -> None:
        """Write what is needed to go on from here besides the actor's part."""
        (directory / "runner.json").write_text(json.dumps(self._state()))
        write_config(self.cfg, directory)

    def _load(self, checkpoint: Path) -> None:
        self._load_state(read_state(checkpoint))
        self._wait(self.actor.load_checkpoint(str(checkpoint), self.completed_steps), what=f"{checkpoint} to load")
        log.info("resumed from %s: %d steps are done", checkpoint, self.completed_steps)

    def _train(self, *handles: Handle) -> list[Any]:
        """Wait for the updates of a step, which complete it."""
        self._is_settled, started = False, time.monotonic()
        trained = self._wait(*handles, what="training", grace_s=STOP_TIMEOUT_S)
        self._update_s = time.monotonic() - started
        self._complete_step()
        self._is_settled = True
        return trained

    def _complete_step(self) -> None:
        self.completed_steps += 1

    def _save_stopped(self) -> None:
        """A checkpoint of the last completed step: from its snapshot, else from the workers that hold it, else, where
        they are dead or in the middle of an update, from the newest snapshot there is."""
        self.progress.message("stopping: saving the last completed step (Ctrl-C again: stop at once)")
        snapshot = None if self._snapshots is None else self._snapshots.newest()
        if self._is_settled and (snapshot is None or read_state(snapshot) != self._plain_state()):
            try:
                self._free(self._groups)
                self.save_checkpoint()
                return
            except (SchedulerError, CheckpointError) as error:
                self.progress.message(f"the workers cannot write it: {str(error).splitlines()[0]}")
        saved = self._save_snapshot()
        if saved < self.completed_steps:
            self.progress.message(f"steps {saved + 1} to {self.completed_steps} are lost: {self._why_lost()}")
        self.completed_steps = saved

    def _save_snapshot(self) -> int:
        """Make a checkpoint of the newest snapshot, if that has more than the newest checkpoint; returns how many steps
        are saved then."""
        snapshots, checkpoints = self._snapshots, self.store.steps()[-1:]
        snapshot = None if snapshots is None else snapshots.newest()
        saved = int(read_state(checkpoints[0])["completed_steps"]) if checkpoints else -1
        if snapshots is not None and snapshot is not None and read_state(snapshot) != self._saved:
            step = int(read_state(snapshot)["completed_steps"])
            if step >= saved:
                try:
                    path = snapshots.keep_newest(self.store, step)
                except CheckpointError as error:
                    log.error("the last completed step cannot be saved: %s", error)
                else:
                    self.progress.message(f"checkpoint {path}, from its snapshot")
                    saved = step
        return max(saved, 0)

    def _free(self, groups: Sequence[WorkerGroup]) -> None:
        """Have these give up what they are doing, and those that train serve calls again."""
        for group in groups:
            group.abort("the run is being stopped")
        for group in self._trained_groups:
            group.clear_abort(STOP_TIMEOUT_S)

    def _why_lost(self) -> str:
        if self._snapshots is not None and self._snapshots.why_none:
            return f"there are no snapshots ({self._snapshots.why_none})"
        return "the last snapshot is older (control.snapshot_interval)"

    def _evaluate_and_log(self) -> None:
        if self._evaluated_step == self.completed_steps:
            return
        path = self.run_dir / "eval" / f"step_{self.completed_steps:06d}.json"
        path.parent.mkdir(exist_ok=True)
        summary = self.evaluate(path.with_suffix(".gif"))
        self._evaluated_step = self.completed_steps
        self._evals.append(summary)
        seen = self._experience()
        path.write_text(summary.to_json(step=self.completed_steps, **seen))
        counts = {f"env/num_{name.removeprefix('env_')}": count for name, count in seen.items()}
        self.logger.log(self.completed_steps, {**summary.metrics(), **counts, "time/eval": self._times["eval"]})
        when = "".join(f", {count:,} {name.replace('_', ' ')}" for name, count in seen.items())
        self.progress.message(f"eval after step {self.completed_steps}{when}: {summary.headline()}")

    def _experience(self) -> dict[str, int]:
        """What evaluations are plotted over besides steps: `env_steps`, where there are any."""
        return {}

    def _write_report(self) -> Path | None:
        """A page that cannot be written must not turn a finished run into a failed one."""
        try:
            return write_report(self.run_dir)
        except Exception:
            log.exception("no report; try again with: python -m rlinf_lite.report %s", self.run_dir)
            return None

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.time()
        try:
            yield
        finally:
            ended = time.time()
            self._times[name] = self._times.get(name, 0.0) + ended - started
            self._driver_spans.append(Span(name, started, ended, "driver"))

    def _control_metrics(self) -> dict[str, float]:
        if self.supervisor is None or self._snapshots is None:
            return {}
        return {**self.supervisor.metrics(), "time/snapshot": self._snapshots.took_s}

    def _wait(self, *handles: Handle, what: str, grace_s: float = 0.0) -> list[Any]:
        """Results of calls. A run that is asked to stop meanwhile waits `grace_s` longer, then raises Stopped."""
        limit_s = self.cfg.runner.phase_timeout_s
        return wait_all(*handles, timeout_s=limit_s, what=what, check=lambda: self._stop.check(grace_s))

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.completed_steps % interval == 0
