"""The master of a job: a detached Ray actor that watches the job's workers and decides which part restarts.

Ray restarts it when it dies. It then continues from its persisted context, and from the state that the trainer sends.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray

from rlinf_lite.config.schema import ControlConfig
from rlinf_lite.control.context import (
    DAMAGED,
    Attachment,
    ContextError,
    Failover,
    JobContext,
    Stage,
    load_context,
    master_name,
    open_backend,
)
from rlinf_lite.control.diagnosis import SILENT_S, DiagnosisManager, Finding, describe, innermost_frames
from rlinf_lite.control.failover import Decision, FailoverCoordinator
from rlinf_lite.control.job_manager import JobManager
from rlinf_lite.scheduler.context import run_on, set_context
from rlinf_lite.scheduler.handle import exit_reason
from rlinf_lite.scheduler.heartbeat import Beat, num_oom_kills
from rlinf_lite.scheduler.nodes import detached_actor
from rlinf_lite.scheduler.processes import dump_stacks, end_process, is_ray_process, tail_logs

log = logging.getLogger(__name__)

WATCH_S = 1.0
EVENTS = "events.jsonl"
_SAVE_STEPS_S = 2.0  # interval of saves of the step number
_DUMP_S = 0.5  # time for a hung worker to write its stacks to its log
_DUMP_LINES = 200
_EXIT_S = 0.5  # time between the end of a job and that of its master, so that the caller gets its answer


def create_master(job: str, control: ControlConfig, trainer: JobManager | None = None) -> Any:
    """Start a job's master on this node; Ray restarts it as long as the job lasts. `trainer`: a built job's process."""
    return detached_actor(JobMaster, master_name(job), max_restarts=-1, max_concurrency=16).remote(
        job, control, trainer
    )


class JobMaster:
    """Owns the job's context. The trainer's process, workers (`beat`) and users call its public methods."""

    def __init__(self, job: str, control: ControlConfig, trainer: JobManager | None) -> None:
        self._lock = threading.RLock()
        self._backend = open_backend(control.backend)
        self._diagnosis = DiagnosisManager(control.hang_timeout_s, control.slow_factor)
        self._handles: dict[str, Any] = {}
        self._pings: dict[str, Any] = {}
        self._findings: dict[str, Finding] = {}
        self._replacing: set[str] = set()  # workers whose end is expected
        self._stall = ""  # a line about workers without progress, sent with the next answer to the trainer
        self._trainer_heard, self._saved = time.monotonic(), 0.0
        self._stop_asked = False
        self._recover_context(job, "" if trainer is None else trainer.directory)
        self._failover = FailoverCoordinator(self._context, control, self._save)
        self._trainer = trainer
        self._trainer_due: tuple[float, str] | None = None
        self._save()
        if trainer is not None:
            trainer.find_or_start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def __repr__(self) -> str:
        return f"master of {self._context.name}"

    # methods for the trainer's process

    def attach(self, attachment: Attachment) -> None:
        """Take the state of the trainer, with its workers, at the start and after workers were restarted."""
        with self._lock:
            context, sent = self._context, attachment.job
            set_context(attachment.context)
            context.trainer_pid, context.trainer_restarts = sent.trainer_pid, sent.trainer_restarts
            context.trainer_node, context.trainer_node_id = sent.trainer_node, sent.trainer_node_id
            context.directory, context.total_steps = sent.directory, sent.total_steps
            self._hear_trainer(sent.step, sent.edges)
            if len(sent.failovers) > len(context.failovers):
                context.failovers[:] = sent.failovers
            for record in sent.workers.values():
                before = context.workers.get(record.name)
                if before is not None:
                    record.restarts = before.restarts + (before.pid != record.pid)
                    record.started = before.started if before.pid == record.pid else record.started
                if before is None or before.pid != record.pid:
                    self._diagnosis.forget(record)
                    self._findings.pop(record.name, None)
                    self._pings.pop(record.name, None)
            context.workers, self._handles = sent.workers, attachment.handles
            self._replacing.clear()
            if context.stage == Stage.STARTING:
                context.move_to(Stage.RUNNING)
                self._event("running", workers=len(context.workers))
            self._save()

    def release(self) -> None:
        """The trainer is about to end its workers and to start others."""
        with self._lock:
            for known in (self._findings, self._pings, self._replacing, self._handles, self._context.workers):
                known.clear()
            self._stall = ""
            self._failover.forget()

    def trainer_beat(self, step: int, edges: list[tuple[str, str]]) -> dict[str, Any]:
        """Record a heartbeat of the trainer: its completed steps, and the data flow between groups (`edges`). Returns
        `known` (whether its workers are known here), `stop` (whether it must stop), `failovers` (all so far), and
        `stuck` (a line about workers that make no progress)."""
        with self._lock:
            if self._hear_trainer(step, edges) or time.monotonic() - self._saved > _SAVE_STEPS_S:
                self._save()
            failovers = list(self._context.failovers)
            stuck, self._stall = self._stall, ""
            return {"known": bool(self._handles), "stop": self._stop_asked, "failovers": failovers, "stuck": stuck}

    def failed(self, failure: str, dead: list[tuple[str, str]], raised: list[Finding], trainer: str | None) -> Decision:
        """Decide what to do about a step that could not be completed. `dead`: dead workers, with Ray's reasons;
        `raised`: findings about workers that raised; `trainer`: the exception of a trainer that can restart."""
        with self._lock:
            findings = [self._find_death(name, reason) for name, reason in dead if name in self._context.workers]
            findings += [f for f in self._findings.values() if f.worker not in {found.worker for found in findings}]
            findings = findings or raised
            for finding in raised if findings is raised else ():
                self._event("detected", **asdict(finding))
            decision = self._failover.decide(failure, findings, trainer)
            self._replacing = {f"{group}[{rank}]" for group, ranks in decision.ranks.items() for rank in ranks}
            self._event("failover", **asdict(decision))
            return decision

    def explain_death(self, worker: str, pid: int, reason: str) -> str:
        """The reason of a worker's death, in a line; "" if no more is known than Ray's `reason`, or the worker has been
        replaced."""
        with self._lock:
            known = self._context.workers.get(worker)
            if known is None or known.pid != pid or worker not in self._handles or worker in self._replacing:
                return ""
            finding = self._find_death(worker, reason)
            if finding.kind == "hung":
                return f"ended by the watchdog, because it hung: {finding.evidence}"
            return "" if finding.kind == "crashed" else f"{finding.kind}: {finding.evidence}"

    def recovered(self, failure: str, ok: bool, steps_lost: int, problem: str = "") -> list[Failover]:
        """Record that a recovery has succeeded (`ok`) or failed; returns all failures so far."""
        with self._lock:
            done = self._failover.ended(failure, ok, steps_lost, problem)
            self._diagnosis.restart_hang_limit()
            what = {"id": failure, "failed": done.failed, "level": done.level, "seconds": done.seconds}
            detail = {"steps_lost": steps_lost} if ok else {"problem": problem}
            self._event("recovered" if ok else "recovery_failed", **what, **detail)
            return list(self._context.failovers)

    def finish(self, stage: Stage, reason: str = "", known: Attachment | None = None) -> None:
        """Record the end of the job; then end the trainer's process and this one. `known`: the trainer's state, in case
        this master has lost it."""
        with self._lock:
            if self._context.stage.is_final:
                return
            if known is not None:
                if not self._handles:
                    self.attach(known)
                self._hear_trainer(known.job.step, known.job.edges)
            self._replacing = set(self._handles)
            self._context.move_to(stage, reason or self._context.reason)
            self._event(str(stage), reason=self._context.reason, step=self._context.step)
            self._save()

        def leave() -> None:
            time.sleep(_EXIT_S)
            if self._trainer is not None:
                self._trainer.end()
            ray.kill(ray.get_runtime_context().current_actor)  # so that Ray does not restart it

        threading.Thread(target=leave, daemon=True).start()

    def history(self) -> list[str]:
        """One line for every failure so far."""
        with self._lock:
            return self._failover.history()

    # methods for workers

    def beat(self, beats: list[Beat]) -> None:
        """Record the heartbeats of a process's workers."""
        with self._lock:
            self._diagnosis.record(beats)

    # methods for users

    def process_id(self) -> int:
        return os.getpid()

    def doing(self) -> dict[str, str]:
        """The method that each worker was last seen in."""
        with self._lock:
            beats = self._diagnosis.last_beats
            return {name: describe(beats[name]) for name in self._context.workers if name in beats}

    def logs(self, group: str | None, rank: int | None, num_lines: int) -> dict[str, str]:
        """The last lines that workers have printed, by worker."""
        with self._lock:
            records = list(self._context.workers.values())
            found = {}
            if self._trainer is not None and group in (None, "trainer"):
                found["trainer"] = tail_logs(self._trainer.log_paths(), num_lines)
        for record in records:
            if group in (None, record.group) and rank in (None, record.rank):
                try:
                    found[record.name] = run_on(record.node_id, tail_logs, record.log_paths, num_lines)
                except Exception as error:  # the node may be gone, and Ray raises many kinds then
                    found[record.name] = f"(the log could not be read: {error})"
        return found

    def stop(self, reason: str) -> None:
        """End the job: ask a training run to stop, which saves a checkpoint, or end the processes of a submitted
        job."""
        with self._lock:
            if self._context.stage.is_final:
                return
            self._stop_asked = True
            self._context.move_to(Stage.STOPPING, reason)
            self._event("stopping", reason=reason)
            self._save()
            if self._trainer is None:
                return
            self._replacing = set(self._handles)
        self._trainer.end()
        self._end_workers()
        self.finish(Stage.STOPPED, reason)

    # internal

    def _recover_context(self, job: str, directory: str) -> None:
        with warnings.catch_warnings(
            action="ignore", category=DeprecationWarning
        ):  # Ray calls its own deprecated names
            again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        problem, found = "no persisted context was found", None
        try:
            found = load_context(self._backend, job) if again else None
        except ContextError as error:
            problem = str(error)
            self._backend.save(job + DAMAGED, self._backend.load(job) or "")
        self._context = found or JobContext(job, directory)
        if again:
            self._diagnosis.restart_hang_limit()  # earlier waits and recoveries are not known here
            about = {} if found is not None else {"problem": f"{problem}: the trainer sends its state"}
            self._event("master_restarted", stage=str(self._context.stage), **about)

    def _hear_trainer(self, step: int, edges: list[tuple[str, str]]) -> bool:
        """Record the trainer's step and data flow; returns whether there is a new edge."""
        self._trainer_heard = time.monotonic()
        before = self._context.edges
        self._context.edges = sorted({*before, *edges, *self._diagnosis.sent_to()})
        if step > self._context.step:
            self._context.last_progress = time.time()
        self._context.step = step
        return self._context.edges != before

    def _save(self) -> None:
        self._saved = time.monotonic()
        self._backend.save(self._context.name, self._context.to_json())

    def _event(self, event: str, **what: Any) -> None:
        directory = Path(self._context.directory)
        try:
            if self._context.directory:
                directory.mkdir(parents=True, exist_ok=True)
                with open(directory / EVENTS, "a") as file:
                    file.write(json.dumps({"time": round(time.time(), 3), "event": event, **what}) + "\n")
        except OSError as error:
            log.warning("an event cannot be written: %s", error)

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_S)
            for check in (self._find_dead, self._find_hung, self._find_slow, self._check_trainer):
                try:
                    with self._lock:
                        if self._context.stage.is_final:
                            continue
                        check()
                except Exception:  # Ray raises many kinds if a node is lost meanwhile: watching must go on
                    log.exception("the master failed in %s", check.__name__)

    def _find_dead(self) -> None:
        here = ray.get_runtime_context().get_node_id()
        for name, handle in self._handles.items():
            record = self._context.workers[name]
            if record.node_id == here and is_ray_process(record.pid):
                continue  # known without a call
            ping = self._pings.get(name)
            if ping is None or ray.wait([ping], timeout=0)[0]:
                self._pings[name] = handle._ping.remote()
            if ping is None or not ray.wait([ping], timeout=0)[0] or name in self._replacing:
                continue
            try:
                ray.get(ping)
            except ray.exceptions.RayActorError as error:
                self._find_death(name, str(error))
            except ray.exceptions.RayError:  # the worker lives; the call failed for another reason
                continue

    def _find_death(self, name: str, reason: str) -> Finding:
        """The reason why a worker is dead; it is determined once."""
        if name not in self._findings:
            record = self._context.workers[name]
            alive = any(node["Alive"] and node["NodeID"] == record.node_id for node in ray.nodes())
            kills = None
            with suppress(Exception):  # the node may be gone, and Ray raises many kinds then
                kills = run_on(record.node_id, num_oom_kills) if alive else None
            finding = self._diagnosis.explain_death(record, exit_reason(reason), alive, kills)
            self._findings[name] = finding
            self._event("detected", **asdict(finding))
        return self._findings[name]

    def _find_hung(self) -> None:
        self._diagnosis.notice_pause()
        if self._context.stage == Stage.RECOVERING:
            self._diagnosis.restart_hang_limit()
        if not self._findings:
            self._stall = self._diagnosis.describe_stall(self._context.workers) or self._stall
        found = []
        for name, record in self._context.workers.items():
            if name in self._findings or name in self._replacing or name not in self._handles:
                continue
            hung = self._diagnosis.find_hung(record)
            if hung is not None:
                found.append((record, hung))
                with suppress(Exception):  # the node may be gone
                    run_on(record.node_id, dump_stacks, record.pid)
        time.sleep(_DUMP_S if found else 0.0)
        for record, hung in found:
            place = ""
            with suppress(Exception):  # likewise
                place = innermost_frames(run_on(record.node_id, tail_logs, record.log_paths, _DUMP_LINES))
            hung = replace(hung, evidence=f"{hung.evidence}; it stood at {place}") if place else hung
            self._findings[record.name] = hung
            self._event("detected", **asdict(hung))
            run_on(record.node_id, end_process, record.pid, 0.0)  # the trainer's process notices the death

    def _find_slow(self) -> None:
        for finding in self._diagnosis.find_slow(list(self._context.workers.values())):
            self._event("detected", **asdict(finding))

    def _check_trainer(self) -> None:
        """Restart the trainer's process if it is gone, or end the job."""
        context = self._context
        if self._trainer is None:
            silent = context.trainer_pid and time.monotonic() - self._trainer_heard > SILENT_S
            here = ray.get_runtime_context().get_node_id() == context.trainer_node_id
            if silent and here and not os.path.exists(f"/proc/{context.trainer_pid}"):
                self.finish(Stage.FAILED, "the process that trains is gone")
        elif self._trainer_due is not None:
            due, failure = self._trainer_due
            if time.monotonic() >= due:
                self._trainer_due = None
                self._trainer.start(context.trainer_restarts, failure)
        elif (outcome := self._trainer.outcome) is not None:
            self.finish(*outcome)
        elif (lost := self._trainer.lost()) is not None:
            self._replacing = set(self._handles)
            self._end_workers()
            failure = f"trainer-{context.trainer_restarts}-{int(time.time())}"
            decision = self._failover.decide(failure, [], f"the trainer's process died: {lost}")
            self._event("failover", **asdict(decision))
            if decision.level == "fail":
                self.finish(Stage.FAILED, decision.reason)
                return
            context.trainer_restarts += 1
            self._handles.clear()
            self._findings.clear()
            self._trainer_due = (time.monotonic() + decision.wait_s, failure)

    def _end_workers(self) -> None:
        """End the workers of a trainer's process that is gone, earlier than Ray does."""
        for name, record in self._context.workers.items():
            with suppress(Exception):  # gone already, or its node is
                ray.kill(self._handles[name])
            with suppress(Exception):  # likewise
                run_on(record.node_id, end_process, record.pid, 1.0)
