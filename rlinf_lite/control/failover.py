"""Decisions about failures: which part restarts, after how long a wait, and when a limit ends the job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlinf_lite.config.schema import ControlConfig
from rlinf_lite.control.context import Failover, JobContext, Stage
from rlinf_lite.control.diagnosis import Finding

LEVELS = ("worker", "group", "job")  # the parts that can restart, from the smallest to the largest


@dataclass(frozen=True)
class Decision:
    """The action that the trainer's process must take after a failure."""

    id: str
    level: str  # worker, group, job, trainer or fail
    ranks: dict[str, list[int]] = field(default_factory=dict)
    """The ranks that restart, by group; all of a group's ranks if the level is group."""
    touched: list[str] = field(default_factory=list)  # groups that must abort their running calls
    wait_s: float = 0.0
    reason: str = ""  # the limit that is reached, if the level is fail
    evidence: str = ""


class FailoverCoordinator:
    """Takes a job from a failure back to running, or to its end. `save` persists the context after every change."""

    def __init__(self, context: JobContext, control: ControlConfig, save: Callable[[], None]) -> None:
        self._context, self._control, self._save = context, control, save

    def decide(self, failure: str, findings: Sequence[Finding], trainer: str | None = None) -> Decision:
        """Decide what to do about a failure. `failure` is its id: for the same id the decision stays the same, also
        after a restart of the master, until `ended` reports that it did not help; then a larger part restarts.

        `trainer`: the exception of a trainer that can restart, if no worker failed.
        """
        context = self._context
        if context.stage not in (Stage.STARTING, Stage.RUNNING, Stage.RECOVERING):
            return Decision(failure, "fail", reason=f"the job is {context.stage}: {context.reason}")
        known = next((failover for failover in context.failovers if failover.id == failure), None)
        if known is None:
            workers = sorted({finding.worker for finding in findings}) or ["trainer"]
            evidence = "; ".join(f"{finding.worker}: {finding.evidence}" for finding in findings) or str(trainer)
            kind = findings[0].kind if findings else "raised"
            known = Failover(failure, kind, workers, evidence, time.time())
            context.failovers.append(known)
        else:
            known.failed = sorted({*known.failed, *(finding.worker for finding in findings)})
        limit = self._limit(known)
        known.level = "fail" if limit else self._level(known)
        times = max(map(self._count, known.failed))  # no wait the first time, then twice as long each time
        delay = 0.0 if times < 2 or limit else self._control.backoff_s * 2 ** (times - 2)
        wait_s = float(min(delay, self._control.max_backoff_s))
        touched = context.touched_by({worker.partition("[")[0] for worker in known.failed} - {"trainer"})
        context.move_to(Stage.RECOVERING, known.evidence)
        self._save()
        return Decision(failure, known.level, self._ranks(known), touched, wait_s, limit, known.evidence)

    def ended(self, failure: str, ok: bool, steps_lost: int, problem: str = "") -> Failover:
        """Record that a recovery has succeeded, or failed because of `problem`."""
        known = next(failover for failover in self._context.failovers if failover.id == failure)
        known.attempts += 1
        known.seconds = round(time.time() - known.time, 3)
        if ok:
            known.outcome, known.steps_lost = "done", steps_lost
            self._context.move_to(Stage.RUNNING)
        else:
            known.evidence += f"; the recovery (of the {known.level}) failed: {problem}"
        self._save()
        return known

    def forget(self) -> None:
        """Stop counting earlier failures: the failed workers have ended, and new ones will take their place."""
        for failover in self._context.failovers:
            failover.counts = False
            failover.outcome = "failed" if failover.outcome == "pending" else failover.outcome
        if self._context.stage == Stage.RECOVERING:
            self._context.move_to(Stage.RUNNING)
        self._save()

    def history(self) -> list[str]:
        """A line for each failure."""
        return [
            f"{time.strftime('%H:%M:%S', time.localtime(failover.time))} {', '.join(failover.failed)} {failover.kind}: "
            f"{failover.evidence.splitlines()[0]} -> {failover.level} {failover.outcome}"
            for failover in self._context.failovers
        ]

    def _recent(self, who: str = "") -> list[Failover]:
        """The failures within `control.restart_window_s` of a worker (`env[1]`) or role (`env`); "": of all."""
        since = time.time() - self._control.restart_window_s
        recent = [failover for failover in self._context.failovers if failover.counts and failover.time >= since]
        return [f for f in recent if any(who in ("", worker, worker.partition("[")[0]) for worker in f.failed)]

    def _count(self, who: str) -> int:
        """The number of recent failures of a worker or a role; each attempt to recover counts."""
        return sum(max(failover.attempts, 1) for failover in self._recent(who))

    def _limit(self, failover: Failover) -> str:
        """The limit that this failure exceeds, in words; "" if it exceeds none."""
        control = self._control
        counts = [(len(self._recent()), control.max_job_restarts, "the job", "control.max_job_restarts")]
        for worker in failover.failed:
            role = worker.partition("[")[0]
            counts.append((self._count(role), control.max_role_restarts, role, "control.max_role_restarts"))
            counts.append((self._count(worker), control.max_restarts, worker, "control.max_restarts"))
        for count, limit, what, key in counts:
            if count > limit:
                return (
                    f"{what} failed {count} times within {control.restart_window_s:g} s, and {key} is {limit}. "
                    f"The last time: {failover.evidence}"
                )
        return ""

    def _level(self, failover: Failover) -> str:
        """The part that restarts: by the failed workers' classes, and a larger one after each attempt that failed."""
        if failover.failed == ["trainer"]:
            return "trainer"
        records = [self._context.workers[name] for name in failover.failed if name in self._context.workers]
        least = max((LEVELS.index(record.failover) for record in records), default=2)
        return LEVELS[min(least + failover.attempts, 2)]

    def _ranks(self, failover: Failover) -> dict[str, list[int]]:
        """The ranks that restart, by group."""
        failed = set(failover.failed)
        groups = {worker.partition("[")[0] for worker in failed}
        ranks: dict[str, list[int]] = {}
        for record in self._context.workers.values():
            together = record.failover != "worker" or failover.attempts > 0
            whole = failover.level == "job" or (record.group in groups and together)
            if failover.level not in ("fail", "trainer") and (whole or record.name in failed):
                ranks.setdefault(record.group, []).append(record.rank)
        return {group: sorted(found) for group, found in ranks.items()}
