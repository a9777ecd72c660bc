"""The master of a job: a detached Ray actor that knows its workers, watches them, and decides what starts again.

Ray starts it again where it dies; it then goes on from its persisted context, and from what the trainer tells it.
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
from rlinf_lite.control.diagnosis import SILENT_S, DiagnosisManager, Finding, describe, stood_at
from rlinf_lite.control.failover import Decision, FailoverCoordinator
from rlinf_lite.control.job_manager import JobManager
from rlinf_lite.scheduler.context import run_on, set_context
from rlinf_lite.scheduler.handle import exit_reason
from rlinf_lite.scheduler.heartbeat import Beat, num_oom_kills
from rlinf_lite.scheduler.nodes import detached_actor, tail_logs
from rlinf_lite.scheduler.processes import dump_stacks, end_process, is_ray_process

log = logging.getLogger(__name__)

WATCH_S = 1.0
EVENTS = "events.jsonl"
_SAVE_STEPS_S = 2.0
_DUMP_S = 0.5  # for a hung worker to write down where it is
_DUMP_LINES = 200
_LEAVE_S = 0.5  # between the end of a job and that of its master, for the answer to whoever ended it


def create_master(job: str, control: ControlConfig, trainer: JobManager | None = None) -> Any:
    """Start a job's master on this node; Ray restarts it for as long as the job lasts. `trainer`: of a built job."""
    return detached_actor(JobMaster, master_name(job), max_restarts=-1, max_concurrency=16).remote(
        job, control, trainer
    )


class JobMaster:
    """Owns the job's context. Its public methods are called by the trainer's process, by workers (`beat`) and users."""

    def __init__(self, job: str, control: ControlConfig, trainer: JobManager | None) -> None:
        self._lock = threading.RLock()
        self._backend = open_backend(control.backend)
        self._diagnosis = DiagnosisManager(control.hang_timeout_s, control.slow_factor)
        self._handles: dict[str, Any] = {}
        self._pings: dict[str, Any] = {}
        self._findings: dict[str, Finding] = {}
        self._replacing: set[str] = set()
        self._stuck = ""  # who does what where nobody comes on, until the trainer has been told
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

    # what the trainer's process calls

    def attach(self, attachment: Attachment) -> None:
        """Know the workers of a trainer, those that were started again among them."""
        with self._lock:
            context, told = self._context, attachment.job
            set_context(attachment.context)
            context.trainer_pid, context.trainer_restarts = told.trainer_pid, told.trainer_restarts
            context.trainer_node, context.trainer_node_id = told.trainer_node, told.trainer_node_id
            context.directory, context.total_steps = told.directory, told.total_steps
            self._hear_trainer(told.step, told.edges)
            if len(told.failovers) > len(context.failovers):
                context.failovers[:] = told.failovers
            for record in told.workers.values():
                before = context.workers.get(record.name)
                if before is not None:
                    record.restarts = before.restarts + (before.pid != record.pid)
                    record.started = before.started if before.pid == record.pid else record.started
                if before is None or before.pid != record.pid:
                    self._diagnosis.forget(record)
                    self._findings.pop(record.name, None)
                    self._pings.pop(record.name, None)
            context.workers, self._handles = told.workers, attachment.handles
            self._replacing.clear()
            if context.stage == Stage.STARTING:
                context.move_to(Stage.RUNNING)
                self._event("running", workers=len(context.workers))
            self._save()

    def release(self) -> None:
        """The trainer ends its workers, to go on with others."""
        with self._lock:
            for known in (self._findings, self._pings, self._replacing, self._handles, self._context.workers):
                known.clear()
            self._stuck = ""
            self._failover.forget()

    def trainer_beat(self, step: int, edges: list[tuple[str, str]]) -> dict[str, Any]:
        """A heartbeat of the trainer: it is so far, and has given results of groups to others (`edges`). Says whether
        its workers are known here, whether it has been asked to stop, what has failed so far, and what its workers do
        where they do not come on."""
        with self._lock:
            if self._hear_trainer(step, edges) or time.monotonic() - self._saved > _SAVE_STEPS_S:
                self._save()
            failovers = list(self._context.failovers)
            stuck, self._stuck = self._stuck, ""
            return {"known": bool(self._handles), "stop": self._stop_asked, "failovers": failovers, "stuck": stuck}

    def failed(self, failure: str, dead: list[tuple[str, str]], raised: list[Finding], trainer: str | None) -> Decision:
        """A step could not be completed: decide what to do. `dead`: workers that Ray calls dead, with its reasons;
        `raised`: what living ones raised; `trainer`: what a trainer that can start again raised."""
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
        """Why a worker is dead, in a line, of which Ray gives `reason`; empty where no more is known than that, or
        another has taken its place."""
        with self._lock:
            known = self._context.workers.get(worker)
            if known is None or known.pid != pid or worker not in self._handles or worker in self._replacing:
                return ""
            finding = self._find_death(worker, reason)
            if finding.kind == "hung":
                return f"ended by the watchdog, because it hung: {finding.evidence}"
            return "" if finding.kind == "crashed" else f"{finding.kind}: {finding.evidence}"

    def recovered(self, failure: str, ok: bool, steps_lost: int, problem: str = "") -> list[Failover]:
        """How a recovery went; returns what has failed so far."""
        with self._lock:
            done = self._failover.ended(failure, ok, steps_lost, problem)
            self._diagnosis.excuse()
            what = {"id": failure, "failed": done.failed, "level": done.level, "seconds": done.seconds}
            detail = {"steps_lost": steps_lost} if ok else {"problem": problem}
            self._event("recovered" if ok else "recovery_failed", **what, **detail)
            return list(self._context.failovers)

    def finish(self, stage: Stage, reason: str = "", known: Attachment | None = None) -> None:
        """The job has ended; nothing that it started is to be left. `known`: to the trainer's process."""
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

        def leave() -> None:  # the job is over: its trainer's process ends, and this one, which is not to start again
            time.sleep(_LEAVE_S)
            if self._trainer is not None:
                self._trainer.end()
            ray.kill(ray.get_runtime_context().current_actor)

        threading.Thread(target=leave, daemon=True).start()

    def history(self) -> list[str]:
        """A line for every failure so far."""
        with self._lock:
            return self._failover.history()

    # what workers call

    def beat(self, beats: list[Beat]) -> None:
        """What a process's workers are doing."""
        with self._lock:
            self._diagnosis.hear(beats)

    # what users call

    def process_id(self) -> int:
        return os.getpid()

    def doing(self) -> dict[str, str]:
        """What every worker was last seen doing."""
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
                except Exception as error:  # its node may be gone
                    found[record.name] = f"(the log could not be read: {error})"
        return found

    def stop(self, reason: str) -> None:
        """End the job: a training script is asked to, which leaves a checkpoint; a built job's processes are ended."""
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

    # its own

    def _recover_context(self, job: str, directory: str) -> None:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of what Ray itself calls there
            again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        problem, found = "no persisted context was found", None
        try:
            found = load_context(self._backend, job) if again else None
        except ContextError as error:
            problem = str(error)
            self._backend.save(job + DAMAGED, self._backend.load(job) or "")
        self._context = found or JobContext(job, directory)
        if again:
            self._diagnosis.excuse()  # who waited, and what was dealt with, it does not know
            about = {} if found is not None else {"problem": f"{problem}: the trainer tells what it knows"}
            self._event("master_restarted", stage=str(self._context.stage), **about)

    def _hear_trainer(self, step: int, edges: list[tuple[str, str]]) -> bool:
        """Returns whether a group was seen to feed another for the first time."""
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
            log.warning("no event can be written: %s", error)

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_S)
            for look in (self._look_for_dead, self._look_for_hung, self._look_for_slow, self._look_at_trainer):
                try:
                    with self._lock:
                        if self._context.stage.is_final:
                            continue
                        look()
                except Exception:  # a node that goes meanwhile must not end the watch
                    log.exception("the master could not %s", look.__name__.strip("_").replace("_", " "))

    def _look_for_dead(self) -> None:
        here = ray.get_runtime_context().get_node_id()
        for name, handle in self._handles.items():
            record = self._context.workers[name]
            if record.node_id == here and is_ray_process(record.pid):
                continue  # costs no call
            ping = self._pings.get(name)
            if ping is None or ray.wait([ping], timeout=0)[0]:
                self._pings[name] = handle._ping.remote()
            if ping is None or not ray.wait([ping], timeout=0)[0] or name in self._replacing:
                continue
            try:
                ray.get(ping)
            except ray.exceptions.RayActorError as error:
                self._find_death(name, str(error))
            except ray.exceptions.RayError:  # it lives, and something else is the matter
                continue

    def _find_death(self, name: str, reason: str) -> Finding:
        """Why a worker is dead, found out once."""
        if name not in self._findings:
            record = self._context.workers[name]
            alive = any(node["Alive"] and node["NodeID"] == record.node_id for node in ray.nodes())
            kills = None
            with suppress(Exception):  # the node may be gone
                kills = run_on(record.node_id, num_oom_kills) if alive else None
            finding = self._diagnosis.explain_death(record, exit_reason(reason), alive, kills)
            self._findings[name] = finding
            self._event("detected", **asdict(finding))
        return self._findings[name]

    def _look_for_hung(self) -> None:
        self._diagnosis.notice_pause()
        if self._context.stage == Stage.RECOVERING:
            self._diagnosis.excuse()
        if not self._findings:
            self._stuck = self._diagnosis.say_stuck(self._context.workers) or self._stuck
        found = []
        for name, record in self._context.workers.items():
            if name in self._findings or name in self._replacing or name not in self._handles:
                continue
            hung = self._diagnosis.find_hung(record)
            if hung is not None:
                found.append((record, hung))
                with suppress(Exception):  # its node may be gone
                    run_on(record.node_id, dump_stacks, record.pid)
        time.sleep(_DUMP_S if found else 0.0)
        for record, hung in found:
            place = ""
            with suppress(Exception):  # likewise
                place = stood_at(run_on(record.node_id, tail_logs, record.log_paths, _DUMP_LINES))
            hung = replace(hung, evidence=f"{hung.evidence}; it stood at {place}") if place else hung
            self._findings[record.name] = hung
            self._event("detected", **asdict(hung))
            run_on(record.node_id, end_process, record.pid, 0.0)  # which the trainer's process will notice

    def _look_for_slow(self) -> None:
        for finding in self._diagnosis.find_slow(list(self._context.workers.values())):
            self._event("detected", **asdict(finding))

    def _look_at_trainer(self) -> None:
        """Where the trainer's process is gone, start it again, or end the job."""
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
        """End what a trainer's process has started; Ray does as well, soon."""
        for name, record in self._context.workers.items():
            with suppress(Exception):  # gone already, or its node is
                ray.kill(self._handles[name])
            with suppress(Exception):  # likewise
                run_on(record.node_id, end_process, record.pid, 1.0)
