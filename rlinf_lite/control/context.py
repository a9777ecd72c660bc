"""What is known of a job: its stage, its workers, who feeds whom, what failed and what was done. JSON, kept outside."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Stage(StrEnum):
    """Where a job is."""

    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        return self in (Stage.FINISHED, Stage.FAILED, Stage.STOPPED)


_ENDS = {Stage.STOPPING, Stage.FINISHED, Stage.FAILED, Stage.STOPPED}
_NEXT = {
    Stage.STARTING: {Stage.RUNNING, Stage.RECOVERING} | _ENDS,
    Stage.RUNNING: {Stage.RECOVERING} | _ENDS,
    Stage.RECOVERING: {Stage.RUNNING, Stage.STARTING} | _ENDS,
    Stage.STOPPING: {Stage.FINISHED, Stage.FAILED, Stage.STOPPED},
}


class ContextError(RuntimeError):
    """A persisted context that cannot be read, or a transition that a job cannot make."""


@dataclass
class WorkerRecord:
    """A worker as the master knows it."""

    group: str
    rank: int
    pid: int
    node: str
    node_id: str
    failover: str
    log_paths: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    restarts: int = 0

    @property
    def name(self) -> str:
        return f"{self.group}[{self.rank}]"


@dataclass
class Failover:
    """One failure, from its report to its end."""

    id: str
    kind: str
    """crashed, hung, out_of_memory, node_lost or raised."""
    failed: list[str]
    """The workers to blame, such as `env[1]`; `trainer` for the trainer."""
    evidence: str
    time: float
    level: str = ""
    """What was started again: worker, group, job or trainer; fail where a limit was reached."""
    attempts: int = 0
    outcome: str = "pending"
    """pending, done or failed."""
    seconds: float | None = None
    """From the report to the end of the recovery."""
    steps_lost: int | None = None


@dataclass
class JobContext:
    """Everything about a job that outlives its master."""

    name: str
    directory: str = ""
    """Where its events go."""
    stage: Stage = Stage.STARTING
    reason: str = ""
    started: float = field(default_factory=time.time)
    ended: float | None = None
    step: int = 0
    total_steps: int = 0
    last_progress: float = field(default_factory=time.time)
    """When `step` last rose."""
    trainer_pid: int = 0
    trainer_node: str = ""
    trainer_node_id: str = ""
    trainer_restarts: int = 0
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)
    """(a, b): group a feeds group b."""
    failovers: list[Failover] = field(default_factory=list)

    def move_to(self, stage: Stage, reason: str = "") -> None:
        """Change the stage. Raises ContextError where a job cannot go there from here."""
        if stage == self.stage:
            return
        if stage not in _NEXT.get(self.stage, set()):
            raise ContextError(f"the job {self.name!r} is {self.stage}, and cannot become {stage}")
        self.stage, self.reason = stage, reason
        if stage.is_final:
            self.ended = time.time()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobContext:
        """Raises ContextError for anything that `to_json` did not write."""
        try:
            data: dict[str, Any] = json.loads(text)
            data["stage"] = Stage(data["stage"])
            data["workers"] = {name: WorkerRecord(**record) for name, record in data["workers"].items()}
            data["edges"] = [(str(a), str(b)) for a, b in data["edges"]]
            data["failovers"] = [Failover(**failover) for failover in data["failovers"]]
            return cls(**data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ContextError(f"not a job's context: {type(error).__name__}: {error}") from error

    def touched_by(self, groups: Iterable[str]) -> list[str]:
        """Groups that work with any of these, directly or through others: what they are doing cannot be completed.

        A group that has not been seen to feed another, or to be fed, may work with any.
        """
        touched, everyone = set(groups), {record.group for record in self.workers.values()}
        connected = {name for edge in self.edges for name in edge}
        touched |= everyone - connected if touched <= connected else everyone
        both_ways = self.edges + [(b, a) for a, b in self.edges]
        while more := {b for a, b in both_ways if a in touched} - touched:
            touched |= more
        return sorted(touched & (everyone | set(groups)))
