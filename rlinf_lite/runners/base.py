"""What all training runs share: the loop over steps, evaluation, checkpoints, logs, and a clean end on Ctrl-C."""

from __future__ import annotations

import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError

from rlinf_lite.config.names import coarsest_precision, recomputed_logprobs
from rlinf_lite.config.schema import BaseConfig
from rlinf_lite.file_modes import write_whole
from rlinf_lite.metrics import EvalSummary, MetricLogger, Progress, Span, utilization, write_chrome_trace
from rlinf_lite.registry import of_main
from rlinf_lite.report import write_report
from rlinf_lite.runners.checkpoints import CheckpointError, CheckpointStore, Snapshots, read_state, size_of, verify
from rlinf_lite.runners.full_disk import Disk, DiskFullError, has_no_room, room_at
from rlinf_lite.runners.run_config import write_config
from rlinf_lite.runners.run_paths import RunClaim, begin_run, find_run
from rlinf_lite.runners.stopping import RunResult, Stopped, StopRequest, command_on
from rlinf_lite.scheduler import Handle, SchedulerError, SharedMemoryFullError, WorkerError, WorkerGroup, wait_all

if TYPE_CHECKING:
    from rlinf_lite.control import Supervisor

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""Longest wait, after Ctrl-C, for an update that is under way, and for workers to give up what they do. Batch systems
give 30 s before they kill, and what comes after this takes some of them too."""

_SAY_AFTER_S = 30.0

DRIFT_LIMITS = {"fp32": 1e-3, "bf16": 5e-2}
"""What the log-probabilities of acting and training may differ by on average, per token or action dimension."""


class Runner(ABC):
    """Drives one training run. `init_workers` brings the groups up, `run` trains, `evaluate` measures.

    A subclass says what one step is, and what the state of a run is besides the actor's.
    """

    cfg: BaseConfig

    run_dir: Path
    store: CheckpointStore
    logger: MetricLogger
    progress: Progress

    total_steps: int
    completed_steps: int
    _first_step: int
    """How many steps were done before this process."""
    _secured_step: int
    """How many completed steps a failure would not take back, as far as the run got."""

    _snapshots: Snapshots
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
        """`claim`: the run, where `claim_run` was called before; else `run` claims it, for as long as it lasts."""
        self.cfg, self.actor, self.rollout, self.supervisor = cfg, actor, rollout, supervisor
        self._groups = (*others, rollout, actor)
        self._trained_groups = [actor]  # what they hold is in checkpoints alone
        self.completed_steps = 0
        self._evals: dict[int, EvalSummary] = {}  # by step
        self._evaluated_step = -1
        self._times: dict[str, float] = {}  # seconds by phase of the present step
        self._driver_spans: list[Span] = []
        self._stop, self._interrupted = StopRequest(), False
        self._is_saving = False  # what is done, at the end of a run that is stopped or fails
        self._disk = Disk(cfg.runner.phase_timeout_s, self._check_stop, self._while_disk_is_full)
        self._in_update = False  # the trained groups hold neither the state before a step nor that after it
        self._update_s = 0.0  # how long the last update took
        self._num_transfers = 0  # of weights
        self._warned_of_drift = False
        self._saved: dict[str, Any] = {}  # the state that is in the newest checkpoint

        self._claim = paths = claim or find_run(cfg)
        self._own_claim: AbstractContextManager[Any] = nullcontext(paths) if claim else paths
        self.run_dir, self._resume_from = paths.log_dir, paths.resume_from
        self.store = CheckpointStore(paths.checkpoint_dir, cfg.runner.keep_checkpoints)

    @abstractmethod
    def init_workers(self) -> None:
        """Build what the workers need, and load the checkpoint where the run resumes."""

    def _flows(self) -> list[tuple[WorkerGroup, WorkerGroup]]:
        """Who sends to whom by itself."""
        return [(self.actor, self.rollout)]

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

    def run(self, until: int | None = None) -> RunResult:
        """Train to the last step, or until Ctrl-C or SIGTERM, which leaves a checkpoint of the last completed step.
        A second Ctrl-C raises KeyboardInterrupt at once.

        `until`: pause after so many steps, with a checkpoint, for which no earlier one is deleted. A runner with other
        groups and the same claim goes on from there (`run_placed`)."""
        cfg = self.cfg.runner
        if until is not None:
            self.store.keep = 10**6
        with self._own_claim:
            with self._open_run(), self._save_what_is_done():
                self._begin()
                while True:
                    self._stop.check()
                    try:
                        at_end = self.completed_steps >= self.total_steps
                        if until is not None and self.completed_steps >= until and not at_end:
                            self.save_checkpoint()
                            newest = self.store.newest()
                            self._claim.resume_from = None if newest is None else newest.resolve()
                            break
                        # there is nothing new to save before this process has done a step
                        if self._due(cfg.save_interval) and (at_end or self.completed_steps > self._first_step):
                            self.save_checkpoint()
                        if self._due(cfg.val_check_interval):
                            self._evaluate_and_log()
                        if at_end:
                            break
                        self._times, self._driver_spans = {}, []
                        self.run_step(self.completed_steps)
                        self._after_step()
                    except SchedulerError as error:
                        full = isinstance(error, SharedMemoryFullError) or isinstance(
                            error.__cause__, SharedMemoryFullError
                        )
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
        """The run's directory with config, versions and logs, progress on the terminal, and a place for snapshots."""
        cfg = self.cfg.runner
        try:
            begin_run(self.cfg, self.run_dir, self.store, self.completed_steps, self.total_steps, self._resume_from)
        except OSError as error:
            if not has_no_room(error):
                raise
            raise DiskFullError(f"the disk is full: {room_at(self.run_dir)}. Make room, and begin again") from error
        self._first_step = self._secured_step = self.completed_steps
        if self._resume_from is not None and self._resume_from.parent == self.store.root.resolve():
            self._saved = read_state(self._resume_from)
        nodes = [member.node.node_id for group in self._trained_groups for member in group.members]
        self._snapshots = Snapshots(self.cfg.control.snapshot_interval, self._num_parameters, nodes)
        resume_step = -1 if self._claim.begun else None  # another placement has failed before it had a checkpoint
        if self._resume_from is not None:
            resume_step = self.completed_steps
        self._claim.begun = True
        logger = MetricLogger(
            self.run_dir,
            cfg.logger.backends,
            project_name=cfg.logger.project_name,
            config=self.cfg.model_dump(mode="json"),
            resume_step=resume_step,
            patiently=self._disk.write,
        )
        progress = Progress(self.total_steps, self.run_dir.name, start_step=self.completed_steps)
        with logger as self.logger, self._stop, progress as self.progress:
            yield

    @contextmanager
    def _save_what_is_done(self) -> Iterator[None]:
        """A run that is stopped, or fails, ends here, and leaves a checkpoint of its last completed step, or of the
        newest one that there is a snapshot of."""
        num_updates_before = self._num_updates_done()
        try:
            yield
        except Stopped:
            self._interrupted = self._is_saving = True
            self._save_stopped()
            if self.supervisor is not None:
                self.supervisor.interrupted(self.completed_steps)
        except Exception as error:  # whatever it is: raised again
            self._is_saving = True
            if self._num_updates_done() > num_updates_before:
                self._save_failed(error)
            if isinstance(error, DiskFullError):
                raise DiskFullError(f"{error}. {self._how_to_go_on()}") from None
            raise
        finally:
            self._snapshots.remove()

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
        self._take_snapshot(anyway=True)
        if self.supervisor is not None and self._snapshots.newest() is None and self._saved != self._plain_state():
            log.warning("no snapshots (%s): checkpoints are what the actor is rebuilt from", self._snapshots.why_none)
            self.save_checkpoint()
        self.progress.start_clock()

    def _after_step(self) -> None:
        """A step is only done once there is a state to go back to, if one is due."""
        self._take_snapshot()
        self._secured_step = self.completed_steps
        if self.supervisor is not None:
            self.supervisor.progress(self.completed_steps)

    def _result(self, has_ended: bool = True) -> RunResult:
        checkpoint, report = self.store.newest(), None
        if has_ended and self.cfg.runner.report:
            try:
                report = write_report(self.run_dir)
            except Exception as error:  # whatever it is: training is over, and must not be said to have failed
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

    # what a step is made of

    def update_rollout_weights(self) -> None:
        """Bring the rollout workers to the actor's weights."""
        with self._phase("sync_weights"):
            self._wait(*self._transfer_weights(), what="weight sync")

    def _transfer_weights(self) -> tuple[Handle, Handle]:
        self._num_transfers += 1
        sending = self.actor.sync_model_to_rollout(self._num_transfers)
        return self.rollout.sync_model_from_actor(self.completed_steps, self._num_transfers), sending

    def _train(self, *handles: Handle) -> list[Any]:
        """Wait for the updates of a step, which complete it, whatever becomes of those who play ahead meanwhile."""
        self._in_update, started = True, time.monotonic()
        trained = self._wait(*handles, what="training", grace_s=STOP_TIMEOUT_S, alone=True)
        self._update_s = time.monotonic() - started
        self._complete_step()
        self._in_update = False
        return trained

    def _complete_step(self) -> None:
        self.completed_steps += 1

    def _wait(
        self, *handles: Handle, what: str, grace_s: float = 0.0, alone: bool = False, says_so: bool = False
    ) -> list[Any]:
        """Results of calls. A run that is asked to stop meanwhile waits `grace_s` longer, then raises Stopped. `alone`:
        the failure of another call is for the next wait. `says_so`: a line says who is waited for after a while, and
        when that time has doubled; for what is no step."""
        limit_s, started, say_at = self.cfg.runner.phase_timeout_s, time.monotonic(), _SAY_AFTER_S

        def check() -> None:
            nonlocal say_at
            self._stop.check(grace_s)
            if says_so and (waited_s := time.monotonic() - started) >= say_at:
                say_at = 2 * waited_s
                if who := ", ".join(dict.fromkeys(handle.group.name for handle in handles if not handle.done())):
                    log.warning("%s: %.0f s so far, not done: %s (limit: %g s)", what, waited_s, who, limit_s)

        return wait_all(*handles, timeout_s=limit_s, what=what, check=check, alone=alone)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.time()
        try:
            yield
        finally:
            ended = time.time()
            self._times[name] = self._times.get(name, 0.0) + ended - started
            self._driver_spans.append(Span(name, started, ended, "driver"))

    def _log_step(
        self,
        started: float,
        metrics: Mapping[str, float],
        spans: Sequence[Span],
        pair: tuple[str, str] = ("env", "rollout"),
        rollouts: tuple[float, float] | None = None,
        before: Sequence[Span] = (),
    ) -> None:
        """Log a step that began at `started`, with its times and how busy the workers were, of which those of `pair`
        should overlap. `rollouts`: from when to when its rollouts were made, where not in `generate_rollouts`;
        `before`: what was done for the step before, where that may overlap with them."""
        step, ended = self.completed_steps, started + self._times["step"]
        if rollouts is None:
            phase = next(span for span in self._driver_spans if span.name == "generate_rollouts")
            rollouts = phase.start, phase.end
        metrics = {
            **metrics,
            **{f"time/{name}": seconds for name, seconds in self._times.items()},
            **utilization([*spans, *before], rollouts, (started, ended), pair),
        }
        self._warn_of_drift(metrics.get("rollout/logprob_drift", 0.0))
        if self.supervisor is not None:
            metrics |= {**self.supervisor.metrics(), "time/snapshot": self._snapshots.took_s}
        self.logger.log(step, metrics)
        self.progress.update(step, metrics)
        if self.cfg.runner.timeline:
            self._write_timeline(step, started, [*spans, *self._driver_spans])

    def _write_timeline(self, step: int, started: float, spans: Sequence[Span]) -> None:
        """Keep the timeline of the third step, or of the last."""
        path = self.run_dir / "timeline.json"
        if step in (3, self.total_steps) and not path.exists():
            shown = [span for span in spans if span.start >= started]
            self._disk.write(path, lambda: write_chrome_trace(shown, path, step=step))
            self.progress.message(f"timeline of step {step}: {path}")

    def _warn_of_drift(self, drift: float) -> None:
        """Say once where training gives what was done another probability than acting did, with the same weights."""
        precision = coarsest_precision(self.cfg)
        if drift > DRIFT_LIMITS[precision] and not self._warned_of_drift:
            self._warned_of_drift = True
            log.warning(
                "log-probabilities of training differ from those of acting by %.2g on average, with the same weights "
                "(rollout/logprob_drift; %g is usual in %s): ratios do not begin at 1, and clip what nothing has "
                "changed. Likely causes: layers that act otherwise in training (dropout, batch statistics), another "
                "temperature or another precision of acting, weights that did not arrive. algorithm.recompute_logprobs="
                "true with algorithm.correction.kind=tis corrects for it",
                drift,
                DRIFT_LIMITS[precision],
                precision,
            )

    def _evaluate_and_log(self) -> None:
        step = self.completed_steps
        if self._evaluated_step == step:
            return
        path = self.run_dir / "eval" / f"step_{step:06d}.json"
        self._disk.write(path.parent, lambda: path.parent.mkdir(exist_ok=True))
        film = path.with_suffix(".gif")
        summary = self.evaluate(film)
        self._evaluated_step = step
        self._evals[step] = summary
        counts = self._experience()
        text = summary.to_json(step=step, **counts)
        self._disk.write(path, lambda: write_whole(path, text), len(text))
        metrics = {f"env/num_{name.removeprefix('env_')}": count for name, count in counts.items()}
        self.logger.log(step, {**summary.metrics(), **metrics, "time/eval": self._times["eval"]})
        if film.exists():
            self.logger.log_film(step, film)
        when = "".join(f", {count:,} {name.replace('_', ' ')}" for name, count in counts.items())
        self.progress.message(f"eval after step {step}{when}: {summary.headline()}")

    def _experience(self) -> dict[str, int]:
        """What evaluations are plotted over besides steps: `env_steps`, where there are any."""
        return {}

    def _due(self, interval: int) -> bool:
        """Whether something that is done every `interval` steps, and at the end, is done now; never if that is < 1."""
        at_end = self.completed_steps >= self.total_steps
        return interval > 0 and (at_end or self.completed_steps % interval == 0)

    # the state of a run, and its checkpoints

    def _state(self) -> dict[str, Any]:
        """What this driver needs to go on after the last completed step; JSON."""
        return {"completed_steps": self.completed_steps, "run": self.run_dir.name}

    def _plain_state(self) -> dict[str, Any]:
        """`_state` as a checkpoint has it."""
        plain: dict[str, Any] = json.loads(json.dumps(self._state()))
        return plain

    def _load_state(self, state: dict[str, Any]) -> None:
        """Take what `_state` gave."""
        self.completed_steps = state["completed_steps"]

    def save_checkpoint(self) -> Path | None:
        """Write a checkpoint of the last completed step; a failed write leaves earlier ones untouched. Where the disk
        is full the workers keep the step until there is room."""
        if self._saved == self._plain_state():
            return None
        with self._phase("checkpoint"):
            write = partial(self.store.write, self.completed_steps, self._write_state)
            path = self._disk.write(self.store.root, write, self._state_bytes())
        self._saved = self._plain_state()
        self.progress.message(f"checkpoint {path}")
        return path

    def _write_state(self, directory: Path) -> None:
        """Everything that training goes on from. Raises CheckpointError where it cannot be written."""
        try:
            self._wait(self.actor.save_checkpoint(str(directory)), what="checkpoint", grace_s=math.inf, alone=True)
            self._save_state(directory / "training_state")
        except (OSError, WorkerError) as error:
            problem = error.__cause__ if isinstance(error, WorkerError) else error
            if not isinstance(problem, OSError | SafetensorError):
                raise
            self._free(self._trained_groups)  # the failed wait has aborted those that were still writing
            raise CheckpointError(f"cannot write {directory}: {problem}") from error

    def _save_state(self, directory: Path) -> None:
        """Write what is needed to go on from here besides the actor's part."""
        (directory / "runner.json").write_text(json.dumps(self._state()))
        write_config(self.cfg, directory)

    def _resume(self) -> None:
        """Load what the run resumes from, if it does. Where that fails `run` is not reached, and lets nobody in."""
        if self._resume_from is None:
            return
        try:
            self._load(self._resume_from)
        except BaseException:
            with self._own_claim:
                raise

    def _load(self, checkpoint: Path) -> None:
        self._load_state(read_state(checkpoint))
        loading = self.actor.load_checkpoint(str(checkpoint), self.completed_steps)
        self._wait(loading, what=f"{checkpoint} to load", says_so=True)
        log.info("resumed from %s: %d steps are done", checkpoint, self.completed_steps)

    # snapshots, and what is done when workers fail

    def _take_snapshot(self, anyway: bool = False) -> None:
        """Where one is due: what a failed actor is rebuilt from, and what is saved when the run is stopped in the
        middle of an update, which then has not changed it."""
        if self._snapshots.why_none or not (anyway or self._snapshot_is_due()):
            return
        self._snapshots.take(self.completed_steps, self._write_state)

    def _snapshot_is_due(self) -> bool:
        is_only_way = self._update_s > STOP_TIMEOUT_S / 2
        return self._snapshots.due(self._num_updates_done(), is_only_way)

    def _num_updates_done(self) -> int:
        """What `control.snapshot_interval` counts."""
        return self.completed_steps

    def _recover(self, supervisor: Supervisor, error: SchedulerError) -> None:
        """Have workers started again, and everything brought back to the end of a completed step."""
        started, step = time.monotonic(), self._secured_step
        self.progress.message(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        in_update, self._in_update = self._in_update, True  # until all of this is done
        with self._stop.at_once():
            recovered = supervisor.recover(error, lambda decision: self._restore(decision.ranks, in_update))
        self._in_update = False
        again = ", ".join(f"{group} {list(ranks)}" for group, ranks in recovered.ranks.items()) or "nobody"
        lost = f", steps done again: {step - self.completed_steps}" if step > self.completed_steps else ""
        self.progress.message(f"recovered in {time.monotonic() - started:.1f} s: {again} started again{lost}")

    def _restore(self, restarted: Mapping[str, Sequence[int]], in_update: bool) -> int:
        """Go back to the end of a completed step, the last one if possible; returns how many steps that loses.
        `restarted`: ranks that were started again, by group. `in_update`: an update was broken off."""
        logged = self.completed_steps
        if in_update or any(group.name in restarted for group in self._trained_groups):
            self._load(self._newest_state())
        else:
            self._forget_unfinished_step()
        lost = max(0, self._secured_step - self.completed_steps)
        self._secured_step = self.completed_steps
        if self.completed_steps < logged:
            self._evaluated_step = min(self._evaluated_step, self.completed_steps)
            self._evals = {step: found for step, found in self._evals.items() if step <= self.completed_steps}
            self.logger.rewind(self.completed_steps)
        return lost

    def _forget_unfinished_step(self) -> None:  # noqa: B027 (most runs have nothing to do)
        """Bring this driver, and workers that still live, to the end of the last completed step; the trained groups
        are there already."""

    def _newest_state(self) -> Path:
        """The newest snapshot, or the newest checkpoint."""
        saved = self.store.newest()
        found = [path for path in (self._snapshots.newest(), saved) if path is not None]
        if not found:
            raise CheckpointError("the actor cannot be rebuilt: there is neither a snapshot nor a checkpoint")
        # of two of one step the snapshot: a checkpoint of step 0 may be of the middle of supervised training
        newest = max(found, key=lambda path: int(read_state(path)["completed_steps"]))
        if newest == saved:
            verify(newest)
        return newest

    # what is saved of a run that is stopped, or fails

    def _save_stopped(self) -> None:
        """A checkpoint of the last completed step: from its snapshot, else from the workers that hold it, else, where
        they are dead or in the middle of an update, from the newest snapshot there is."""
        self.progress.message("stopping: saving the last completed step (Ctrl-C again: stop at once)")
        saved = self._save_last()
        if saved < self.completed_steps:
            why = f"there are no snapshots ({self._snapshots.why_none})"
            if not self._snapshots.why_none:
                why = "the last snapshot is older (control.snapshot_interval)"
            self.progress.message(f"steps {saved + 1} to {self.completed_steps} are lost: {why}")
        self.completed_steps = saved

    def _save_failed(self, error: Exception) -> None:
        """The same of a run that has failed, which says what that was."""
        try:
            if isinstance(error, CheckpointError) and not has_no_room(error) and not isinstance(error, DiskFullError):
                self._save_snapshot()  # the workers could not write theirs
            else:
                self._save_last()
        except CheckpointError as problem:
            log.error("the last completed step cannot be saved: %s", problem)
        if not isinstance(error, DiskFullError):
            self.progress.message(self._how_to_go_on())

    def _save_last(self) -> int:
        """How many steps are saved then. Raises DiskFullError."""
        snapshot = self._snapshots.newest()
        if not self._in_update and (snapshot is None or read_state(snapshot) != self._plain_state()):
            try:
                self._free(self._groups)
                self.save_checkpoint()
                return self.completed_steps
            except DiskFullError:
                raise
            except (SchedulerError, CheckpointError) as error:
                self.progress.message(f"the workers cannot write it: {str(error).splitlines()[0]}")
        return self._save_snapshot()

    def _save_snapshot(self) -> int:
        """Make a checkpoint of the newest snapshot, if that has more than the newest checkpoint; returns how many steps
        are saved then."""
        checkpoint, snapshot = self.store.newest(), self._snapshots.newest()
        saved = -1 if checkpoint is None else int(read_state(checkpoint)["completed_steps"])
        state = {} if snapshot is None else read_state(snapshot)
        if state and state != self._saved and state["completed_steps"] >= saved:
            try:
                keep = partial(self._snapshots.keep_newest, self.store, state["completed_steps"])
                path = self._disk.write(self.store.root, keep, self._state_bytes())
            except DiskFullError:
                raise
            except CheckpointError as error:
                log.error("the last completed step cannot be saved: %s", error)
            else:
                self.progress.message(f"checkpoint {path}, from its snapshot")
                saved = int(state["completed_steps"])
        return max(saved, 0)

    def _check_stop(self) -> None:
        """Raises Stopped, but for the writes that this makes a run end with."""
        if not self._is_saving:
            self._stop.check()

    def _while_disk_is_full(self) -> str:
        if self._is_saving:
            return "Ctrl-C again ends without it"
        kept = f"Step {self.completed_steps} is kept in memory, and the run goes on once there is room"
        return f"{kept}. Ctrl-C saves that step, to go on later with: {command_on(self.run_dir)}"

    def _how_to_go_on(self) -> str:
        newest = self.store.newest()
        if newest is None:
            return "No checkpoint was saved: mend this, then begin again"
        return f"To go on from step {read_state(newest)['completed_steps']}: {command_on(self.run_dir)}"

    def _state_bytes(self) -> int:
        """About what a checkpoint takes: as much as the one before, unless that has no moments yet."""
        before = self.store.newest() or self._snapshots.newest()
        has_moments = before is not None and read_state(before)["completed_steps"] > 0
        return size_of(before) if before is not None and has_moments else self._snapshots.num_bytes

    def _free(self, groups: Sequence[WorkerGroup]) -> None:
        """Have these give up what they are doing, and those that train serve calls again."""
        for group in groups:
            group.abort("the run is being stopped")
        for group in self._trained_groups:
            group.clear_abort(STOP_TIMEOUT_S)
