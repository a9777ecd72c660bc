"""The trainer's side of failover: tells the master who works here and how far the job is, and does what it decides."""

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

HEARTBEAT_S = 2.0  # between two heartbeats of the trainer's process
_FINISH_S = 20.0  # how long the word that the job has ended waits for a master that is away
_MAX_GIVEN_UP = 3  # how often in a row a step is done again because workers gave it up, with none to blame
_EXPLAIN_S = 3.0
_BLAME_S = 2.0  # how long a dead worker is looked for behind an error that its death may have caused

Restore = Callable[[Decision], int]
"""Brings the trainer's own state to the end of a completed step after workers were started again; returns how many
completed steps that lost."""


class JobFailedError(SchedulerError):
    """A failure that the job does not survive: a limit is reached, or nothing helped."""


class Supervisor:
    """Keeps the groups of `cluster` alive, as the master of `job` decides."""

    def __init__(self, job: str, cluster: Cluster, timeout_s: float) -> None:
        """`timeout_s`: for a new worker's `init`."""
        self.job, self._cluster, self._timeout_s = job, cluster, timeout_s
        self._known = JobContext(job)  # what the master is to know of the job
        self._attachment: Attachment | None = None  # the same with the workers; None before `begin`
        self._ended, self._num_given_up = threading.Event(), 0
        self._raised_before: set[tuple[str, str]] = set()
        """Group and origin of the exceptions that workers have raised in this step."""
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
        """All groups are launched: from now on they are watched. `directory` is where events are written. Where that
        was said before, as by the process of a job's trainer to a runner, it stays, and so do restarts."""
        has_begun = self._attachment is not None
        self._known.step, self._known.total_steps = step, total_steps
        if not has_begun:
            self._known.directory, self._known.trainer_restarts = directory, trainer_restarts
        self._attach()
        self._cluster.calls.explain_death = self._explain_death
        if not has_begun:
            threading.Thread(target=self._send_heartbeats, name="supervisor", daemon=True).start()

    def release(self) -> None:
        """The groups are about to be shut down: until others begin nobody is watched; what failed counts no more."""
        self._raised_before.clear()
        self._num_given_up = 0
        self._known.workers = {}
        self._attachment = Attachment(self._known, get_context(), {})
        self._ask("release")

    def progress(self, step: int) -> None:
        """A step has been completed."""
        if step > self._known.step:
            self._num_given_up = 0
            self._raised_before.clear()
        self._known.step = step

    def recover(self, error: SchedulerError, restore: Restore, same_step: bool = True) -> Decision:
        """Bring the job back after `error`. Raises it where nobody is to blame, and JobFailedError at a limit.

        `same_step`: what is done until `progress` is called is one step, which is done again from its beginning. An
        exception that a worker raises in it twice at the same place would come for ever, and is raised here.
        """
        if local_ray_has_ended():
            raise error
        failure = uuid.uuid4().hex[:12]
        if isinstance(error.__cause__, AbortedError) and not self._dead():
            self._num_given_up += 1  # because of a failure that is dealt with
            if self._num_given_up > _MAX_GIVEN_UP:
                raise error
            try:
                gave_up = Decision(failure, "worker")
                self._give_up((), "this step is done again")
                restore(gave_up)
                return gave_up
            except SchedulerError as another:  # while they gave it up, somebody has died
                error = another
        dead, raised = self._blame(error)
        if not dead and not raised:
            raise error
        while True:
            # not of messages and processes: others are to blame for that
            others_fault = isinstance(error.__cause__, SchedulerError | ray.exceptions.RayError)
            if raised and same_step and isinstance(error, WorkerError) and not others_fault:
                this = (error.group, error.origin)
                if this in self._raised_before:
                    raise error
                self._raised_before.add(this)
            decision = self._decide(failure, error, dead, raised)
            failed = ", ".join([name for name, _ in dead] + [finding.worker for finding in raised])
            delay = f" in {decision.wait_s:g} s" if decision.wait_s else ""
            names = ", ".join(f"{group} {ranks}" for group, ranks in decision.ranks.items())
            ends = f". Where the step raises the same again, the run ends ({raised[0].evidence})" if raised else ""
            log.warning("%s failed; starting again%s: %s%s", failed, delay, names, ends)
            time.sleep(decision.wait_s)
            try:
                self._cluster.restart(decision.ranks, self._timeout_s)
                self._give_up(decision.touched, f"{', '.join(decision.ranks)} started again")
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
        """A trainer that can start again has raised. Raises JobFailedError at a limit."""
        failure = uuid.uuid4().hex[:12]
        decision = self._decide(failure, error, trainer=f"{type(error).__name__}: {error}")
        time.sleep(decision.wait_s)
        self._known.trainer_restarts += 1
        self._attach()
        self._known.failovers = self._ask("recovered", failure, True, 0)
        return decision

    def recovered(self, failure: str) -> None:
        """This process was started in the place of a dead one, because of `failure`."""
        self._ask("recovered", failure, True, 0)

    def finish(self, stage: Stage, reason: str = "") -> None:
        """The job has ended; its master goes too."""
        self._ended.set()
        self._cluster.calls.explain_death = None
        with suppress(Exception):  # that the master is gone, and maybe Ray, must not hide how the job ended
            self._ask("finish", *self.outcome(stage, reason), limit_s=_FINISH_S)

    def outcome(self, stage: Stage, reason: str) -> Outcome:
        """How the job has ended, with all that its master may have lost."""
        self._known.edges = sorted(self._cluster.calls.data_flow)
        return stage, reason, self._attachment

    def interrupted(self, step: int) -> None:
        """The user has stopped the run, after so many steps."""
        self._known.step, self._outcome = step, Stage.STOPPED

    def has_ended(self, wait_s: float) -> bool:
        """Whether `finish` was called, within `wait_s`."""
        return self._ended.wait(wait_s)

    def metrics(self) -> dict[str, float]:
        """`control/*`: what has failed in this job so far, and what that cost."""
        failovers = self._known.failovers
        done = [failover for failover in failovers if failover.outcome == "done"]
        return {
            "control/failures": float(len(failovers)),
            "control/recovery_s": sum(failover.seconds or 0.0 for failover in done),
            "control/steps_lost": float(sum(failover.steps_lost or 0 for failover in done)),
        }

    def _attach(self) -> None:
        """Workers were started: tell the master who works here now."""
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

    def _give_up(self, names: Sequence[str], reason: str) -> None:
        """Have these groups forget what they are doing, and those that a failed wait has aborted; then they serve
        again."""
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
        """What the master wants done. Raises JobFailedError where that is nothing any more."""
        decision: Decision = self._ask("failed", failure, dead, raised, trainer)
        if decision.level == "fail":
            lines = "\n".join(f"  {line}" for line in self._ask("history"))
            message = f"{decision.reason}\n\nWhat failed:\n{lines}\n\nThe last time:\n{error}"
            raise JobFailedError(message) from error
        return decision

    def _blame(self, error: SchedulerError) -> tuple[list[tuple[str, str]], list[Finding]]:
        """Who is behind an error: workers that Ray calls dead, else the one that raised; maybe nobody."""
        deadline = time.monotonic() + _BLAME_S
        while not (dead := self._dead()) and time.monotonic() < deadline:
            time.sleep(0.2)
        if dead:
            return dead, []
        gave_up = isinstance(error.__cause__, AbortedError)
        if isinstance(error, WorkerError) and not gave_up and self._levels().get(error.group) == "worker":
            return [], [explain_error(error.group, error.rank, error.summary, error.origin)]
        return [], []

    def _levels(self) -> dict[str, str]:
        """What starts again where a worker fails, by group: the widest of what those want that share processes."""
        return {
            group.name: max((fused.cls.failover for fused in processes.groups), key=LEVELS.index)
            for processes in self._cluster.processes
            for group in processes.groups
        }

    def _explain_death(self, worker: str, pid: int, ray_message: str) -> str:
        """What the master knows of a death: that the watchdog or the kernel has caused it."""
        with suppress(Exception):  # the death is reported, with Ray's reason
            return str(self._ask("explain_death", worker, pid, ray_message, limit_s=_EXPLAIN_S))
        return ""

    def _dead(self) -> list[tuple[str, str]]:
        """Workers that Ray calls dead, with its reason."""
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
            except ray.exceptions.RayError:  # it lives, and something else is the matter
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
            except Exception as error:  # the master is away, or Ray is gone: training goes on, unwatched
                if not self._ended.is_set():
                    log.warning("the job is not watched at the moment: %s", error)
                continue
            if stop:
                _thread.interrupt_main()
                return

    def _send_heartbeat(self) -> bool:
        """Tell the master how far the job is; returns whether it is to stop."""
        self._known.edges = sorted(self._cluster.calls.data_flow)
        reply = self._ask("trainer_beat", self._known.step, self._known.edges, limit_s=10.0)
        if reply["known"]:
            self._known.failovers = reply["failovers"]
            if reply["stuck"]:
                log.warning("%s", reply["stuck"])
        else:
            self._ask("attach", self._attachment)
        return bool(reply["stop"])
