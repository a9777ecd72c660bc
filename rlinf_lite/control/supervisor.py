"""The trainer's side of failover: it sends the master the state of the job, and carries out its decisions."""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import ray

from rlinf_lite.control.context import (
    ASK_LIMIT_S,
    Attachment,
    JobContext,
    Outcome,
    Stage,
    WorkerRecord,
    ask_master,
    master_name,
)
from rlinf_lite.control.diagnosis import Finding, explain_error
from rlinf_lite.control.failover import LEVELS, Decision
from rlinf_lite.scheduler import AbortedError, Cluster, ClusterError, SchedulerError, WorkerError
from rlinf_lite.scheduler.context import get_context
from rlinf_lite.scheduler.local_ray import local_ray_has_ended
from rlinf_lite.scheduler.ray_runtime import RayRemote

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0  # interval of the trainer's heartbeats
_FINISH_S = 20.0  # longest wait of the report of the job's end for a master that is restarting
_MAX_ABORTED = 3  # how often in a row a step is repeated because workers aborted it although none failed
_EXPLAIN_S = 3.0
_BLAME_S = 2.0  # longest search for a dead worker that may have caused an error

Restore = Callable[[Decision], int]
"""Restores the trainer's own state to the end of a completed step after workers were restarted; returns the number of
completed steps that are lost."""


class JobFailedError(SchedulerError):
    """The job failed: a limit was reached, or no recovery succeeded."""


class Supervisor:
    """Keeps the groups of `cluster` alive, following the decisions of the job's master."""

    def __init__(self, job: str, cluster: Cluster, timeout_s: float) -> None:
        """`timeout_s`: limit for a new worker's `init`."""
        self.job, self._cluster, self._timeout_s = job, cluster, timeout_s
        self._known = JobContext(job)  # the state that the master gets
        self._attachment: Attachment | None = None  # the same, with the workers' actors; None before `begin`
        self._ended, self._num_aborted = threading.Event(), 0
        self._raised_before: set[tuple[str, str]] = set()
        """Group and origin of each exception that a worker has raised in this step."""
        self._outcome = Stage.FINISHED
        cluster.runtime.watch(master_name(job))

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.finish(self._outcome)
        else:
            self.finish(Stage.FAILED, f"{type(error).__name__}: {error}")

    def begin(self, directory: str, step: int, total_steps: int, trainer_restarts: int = 0) -> None:
        """Watch the groups, which must all be launched, from now on. `directory`: for events. A later call, such as
        that of a runner within a job, changes neither `directory` nor `trainer_restarts`."""
        has_begun = self._attachment is not None
        self._known.step, self._known.total_steps = step, total_steps
        if not has_begun:
            self._known.directory, self._known.trainer_restarts = directory, trainer_restarts
        self._attach()
        self._cluster.calls.explain_death = self._explain_death
        if not has_begun:
            threading.Thread(target=self._send_heartbeats, name="supervisor", daemon=True).start()

    def release(self) -> None:
        """Stop watching until the next `begin`, because the groups will be shut down. Earlier failures no longer
        count."""
        self._raised_before.clear()
        self._num_aborted = 0
        self._known.workers = {}
        self._attachment = Attachment(self._known, get_context(), {})
        self._ask("release")

    def progress(self, step: int) -> None:
        """Record how many steps are completed."""
        if step > self._known.step:
            self._num_aborted = 0
            self._raised_before.clear()
        self._known.step = step

    def recover(self, error: SchedulerError, restore: Restore, same_step: bool = True) -> Decision:
        """Recover the job from `error`. Raises it if no worker is its cause, and JobFailedError at a limit.

        `same_step`: all calls before `progress` belong to one step, which is repeated from its beginning. If a worker
        raises at the same place in it again, repeating would never end, so the exception is raised here.
        """
        if local_ray_has_ended():
            raise error
        failure = uuid.uuid4().hex[:12]
        if isinstance(error.__cause__, AbortedError) and not self._find_dead():
            self._num_aborted += 1  # the abort belongs to a failure from which the job has recovered
            if self._num_aborted > _MAX_ABORTED:
                raise error
            try:
                repeat = Decision(failure, "worker")
                self._abort((), "this step is done again")
                restore(repeat)
                return repeat
            except SchedulerError as another:  # a worker has died meanwhile
                error = another
        dead, raised = self._blame(error)
        if not dead and not raised:
            raise error
        while True:
            # errors of messages and processes have their cause in another worker
            others_fault = isinstance(error.__cause__, SchedulerError | ray.exceptions.RayError)
            if raised and same_step and isinstance(error, WorkerError) and not others_fault:
                place = (error.group, error.origin)
                if place in self._raised_before:
                    raise error
                self._raised_before.add(place)
            decision = self._decide(failure, error, dead, raised)
            failed = ", ".join([name for name, _ in dead] + [finding.worker for finding in raised])
            delay = f" in {decision.wait_s:g} s" if decision.wait_s else ""
            names = ", ".join(f"{group} {ranks}" for group, ranks in decision.ranks.items())
            ends = f". If the step raises the same again, the run ends ({raised[0].evidence})" if raised else ""
            log.warning("%s failed; starting again%s: %s%s", failed, delay, names, ends)
            time.sleep(decision.wait_s)
            try:
                self._cluster.restart(decision.ranks, self._timeout_s)
                self._abort(decision.touched, f"{', '.join(decision.ranks)} started again")
                steps_lost = restore(decision)
            except SchedulerError as again:
                log.warning("the recovery failed: %s", again)
                self._ask("recovered", failure, False, 0, str(again).split("\n")[0])
                error = again
                dead, raised = self._blame(error)
                continue
            self._attach()
            self._known.failovers = self._ask("recovered", failure, True, steps_lost)
            return decision

    def trainer_raised(self, error: Exception) -> Decision:
        """Report the exception of a trainer that can restart. Raises JobFailedError at a limit."""
        failure = uuid.uuid4().hex[:12]
        decision = self._decide(failure, error, trainer=f"{type(error).__name__}: {error}")
        time.sleep(decision.wait_s)
        self._known.trainer_restarts += 1
        self._attach()
        self._known.failovers = self._ask("recovered", failure, True, 0)
        return decision

    def recovered(self, failure: str) -> None:
        """Report that this process replaces the one whose death was `failure`."""
        self._ask("recovered", failure, True, 0)

    def finish(self, stage: Stage, reason: str = "") -> None:
        """Report the end of the job; its master ends then too."""
        self._ended.set()
        self._cluster.calls.explain_death = None
        with suppress(Exception):  # the master may be gone, or Ray: the job's own end matters more
            self._ask("finish", *self.outcome(stage, reason), limit_s=_FINISH_S)

    def outcome(self, stage: Stage, reason: str) -> Outcome:
        """The outcome of the job, with the state that its master may have lost."""
        self._known.edges = sorted(self._cluster.calls.data_flow)
        return stage, reason, self._attachment

    def interrupted(self, step: int) -> None:
        """Record that the user has stopped the run, after `step` completed steps."""
        self._known.step, self._outcome = step, Stage.STOPPED

    def metrics(self) -> dict[str, float]:
        """The metrics `control/*`: failures of this job so far, and their cost."""
        failovers = self._known.failovers
        done = [failover for failover in failovers if failover.outcome == "done"]
        return {
            "control/failures": float(len(failovers)),
            "control/recovery_s": sum(failover.seconds or 0.0 for failover in done),
            "control/steps_lost": float(sum(failover.steps_lost or 0 for failover in done)),
        }

    def _attach(self) -> None:
        """Send the master the present workers, after some were started."""
        workers, handles = {}, {}
        for group, failover in self._levels().items():
            for member in self._cluster.groups[group].members:
                node = member.node
                where = f"node {node.rank} ({node.ip})"
                workers[str(member)] = WorkerRecord(
                    group, member.rank, member.pid, where, node.node_id, failover, member.log_paths
                )
                handles[str(member)] = cast(RayRemote, member.remote).actor
        known, context = self._known, get_context()
        known.trainer_pid, known.trainer_node_id = os.getpid(), context.node_id
        known.trainer_node = f"node {context.node_id[:8]}"
        known.workers, known.edges = workers, sorted(self._cluster.calls.data_flow)
        self._attachment = Attachment(known, context, handles)
        self._ask("attach", self._attachment)

    def _abort(self, names: Sequence[str], reason: str) -> None:
        """Abort the running calls of these groups; let them, and groups that a failed wait has aborted, serve again."""
        groups = [group for name, group in self._cluster.groups.items() if name in names or group.aborted]
        for group in groups:
            group.abort(reason)
        for group in groups:
            group.clear_abort()

    def _decide(
        self,
        failure: str,
        error: Exception,
        dead: Sequence[tuple[str, str]] = (),
        raised: Sequence[Finding] = (),
        trainer: str | None = None,
    ) -> Decision:
        """The master's decision about a failure. Raises JobFailedError if a limit is reached."""
        decision: Decision = self._ask("failed", failure, dead, raised, trainer)
        if decision.level == "fail":
            lines = "\n".join(f"  {line}" for line in self._ask("history"))
            message = f"{decision.reason}\n\nWhat failed:\n{lines}\n\nThe last time:\n{error}"
            raise JobFailedError(message) from error
        return decision

    def _blame(self, error: SchedulerError) -> tuple[list[tuple[str, str]], list[Finding]]:
        """The causes of an error: dead workers with Ray's reasons, else the worker that raised; both may be empty."""
        deadline = time.monotonic() + _BLAME_S
        while not (dead := self._find_dead()) and time.monotonic() < deadline:
            time.sleep(0.2)
        if dead:
            return dead, []
        aborted = isinstance(error.__cause__, AbortedError)
        if isinstance(error, WorkerError) and not aborted and self._levels().get(error.group) == "worker":
            return [], [explain_error(error.group, error.rank, error.summary, error.origin)]
        return [], []

    def _levels(self) -> dict[str, str]:
        """The part that restarts if a worker fails, by group: the largest one that the groups of its process ask
        for."""
        return {
            group.name: max((fused.cls.failover for fused in processes.groups), key=LEVELS.index)
            for processes in self._cluster.processes
            for group in processes.groups
        }

    def _explain_death(self, worker: str, pid: int, ray_message: str) -> str:
        """The cause of a death, if the master knows it (the watchdog, or the kernel); else ""."""
        with suppress(Exception):  # if the master fails, the death is still reported, with Ray's reason
            return str(self._ask("explain_death", worker, pid, ray_message, limit_s=_EXPLAIN_S))
        return ""

    def _find_dead(self) -> list[tuple[str, str]]:
        """Dead workers, with Ray's reasons."""
        members = [member for group in self._cluster.groups.values() for member in group.members]
        pings = [member.remote.call("_ping") for member in members]
        answered = set(ray.wait(pings, num_returns=len(pings), timeout=0.5)[0]) if pings else set()
        dead = []
        for member, ping in zip(members, pings, strict=True):
            try:
                if ping in answered:
                    ray.get(ping)
            except ray.exceptions.RayActorError as error:
                dead.append((str(member), str(error)))
            except ray.exceptions.RayError:  # the worker lives; the call failed for another reason
                continue
        return dead

    def _ask(self, method: str, *args: Any, limit_s: float = ASK_LIMIT_S) -> Any:
        if local_ray_has_ended():
            raise ClusterError(f"the master of the job {self.job!r} has ended with Ray")
        return ask_master(self.job, method, *args, limit_s=limit_s)

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            try:
                stop = self._send_heartbeat()
            except Exception as error:  # the master is restarting, or Ray is gone: training goes on without supervision
                if not self._ended.is_set():
                    log.warning("the job is not supervised at the moment: %s", error)
                continue
            if stop:
                _thread.interrupt_main()
                return

    def _send_heartbeat(self) -> bool:
        """Send the master the number of completed steps; returns whether the job must stop."""
        self._known.edges = sorted(self._cluster.calls.data_flow)
        reply = self._ask("trainer_beat", self._known.step, self._known.edges, limit_s=10.0)
        if reply["known"]:
            self._known.failovers = reply["failovers"]
            if reply["stuck"]:
                log.warning("%s", reply["stuck"])
        else:
            self._ask("attach", self._attachment)
        return bool(reply["stop"])
