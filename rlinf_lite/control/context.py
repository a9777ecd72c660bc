"""The context of a job (stage, workers, data flow between groups, failures), the backends that store it, and functions
to find and call the job's master."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import ray

from rlinf_lite.scheduler.context import RAY_NAMESPACE, ProcessContext
from rlinf_lite.scheduler.errors import SchedulerError
from rlinf_lite.scheduler.ray_private import get_value, list_keys, put_value

ASK_LIMIT_S = 60.0  # longest wait for a master that is restarting
_ASK_AGAIN_S = 0.3
_PREFIX = "rlinf_lite/jobs/"
DAMAGED = ".damaged"  # suffix of the name under which a backend keeps a context that could not be read


class Stage(StrEnum):
    """The stages of a job."""

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
    """A persisted context cannot be read, or a job cannot change its stage in this way."""


@dataclass
class WorkerRecord:
    """The master's record of a worker."""

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
    """The workers that failed, such as `env[1]`; `trainer` for the trainer."""
    evidence: str
    time: float
    level: str = ""
    """The part that restarts: worker, group, job or trainer; fail if a limit is reached."""
    attempts: int = 0
    outcome: str = "pending"
    """pending, done or failed."""
    seconds: float | None = None
    """From the report to the end of the recovery."""
    steps_lost: int | None = None
    counts: bool = True
    """Whether it counts towards the limits of `control`."""


@dataclass
class JobContext:
    """The state of a job, which outlives its master."""

    name: str
    directory: str = ""
    """The directory of `events.jsonl`."""
    stage: Stage = Stage.STARTING
    reason: str = ""
    started: float = field(default_factory=time.time)
    ended: float | None = None
    step: int = 0
    total_steps: int = 0
    last_progress: float = field(default_factory=time.time)
    """The time when `step` last rose."""
    trainer_pid: int = 0
    trainer_node: str = ""
    trainer_node_id: str = ""
    trainer_restarts: int = 0
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)
    """Pairs (a, b): group a feeds group b."""
    failovers: list[Failover] = field(default_factory=list)

    def move_to(self, stage: Stage, reason: str = "") -> None:
        """Change the stage. Raises ContextError for a change that no job can make."""
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
        """The context that `to_json` wrote. Raises ContextError for any other text."""
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
        """The given groups and all groups that work with them, directly or through others: these cannot complete their
        running calls. A group without any known data flow may work with any other.
        """
        touched, everyone = set(groups), {record.group for record in self.workers.values()}
        connected = {name for edge in self.edges for name in edge}
        touched |= everyone - connected if touched <= connected else everyone
        both_ways = self.edges + [(b, a) for a, b in self.edges]
        while more := {b for a, b in both_ways if a in touched} - touched:
            touched |= more
        return sorted(touched & (everyone | set(groups)))


class KVBackend:
    """Contexts in Ray's key-value store, which lasts as long as the Ray cluster."""

    def save(self, job: str, text: str) -> None:
        put_value(_PREFIX + job, text.encode())

    def load(self, job: str) -> str | None:
        found = get_value(_PREFIX + job)
        return None if found is None else found.decode(errors="replace")

    def jobs(self) -> list[str]:
        return [key.removeprefix(_PREFIX) for key in list_keys(_PREFIX)]


class DirectoryBackend:
    """Contexts in a directory, one file per job; they outlive Ray."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def save(self, job: str, text: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        partial = self._directory / f".{job}.json.partial"
        partial.write_text(text)
        os.replace(partial, self._directory / f"{job}.json")

    def load(self, job: str) -> str | None:
        path = self._directory / f"{job}.json"
        return path.read_text(errors="replace") if path.exists() else None

    def jobs(self) -> list[str]:
        return sorted(path.stem for path in self._directory.glob("*.json"))


ContextBackend = KVBackend | DirectoryBackend
"""Stores one text per job. A save replaces the whole text, or nothing."""


def open_backend(where: str) -> ContextBackend:
    """The backend that `control.backend` names: `kv`, or a directory."""
    return KVBackend() if where == "kv" else DirectoryBackend(where)


def load_context(backend: ContextBackend, job: str) -> JobContext | None:
    """The context of a job; None if the backend has none. Raises ContextError if it is damaged."""
    text = backend.load(job)
    if text is None:
        return None
    try:
        return JobContext.from_json(text)
    except ContextError as error:
        raise ContextError(f"the persisted context of the job {job!r} is damaged ({error})") from error


@dataclass(frozen=True)
class Attachment:
    """The state that the trainer's process sends to the master after every start of workers. A master that has lost its
    own state can continue from it."""

    job: JobContext  # the trainer's own copy
    context: ProcessContext
    handles: dict[str, Any]  # Ray actors of the workers, by name


Outcome = tuple[Stage, str, Attachment | None]
"""(final stage of a job, reason, state for its master). The state is None if the job had not begun."""


def master_name(job: str) -> str:
    return f"job.{job}"


def find_master(job: str) -> Any:
    """The Ray actor of the job's master, which may be restarting. Raises ValueError if it is gone."""
    return ray.get_actor(master_name(job), namespace=RAY_NAMESPACE)


def ask_master(job: str, method: str, *args: Any, limit_s: float = ASK_LIMIT_S) -> Any:
    """Call a method of a job's master, and wait if Ray is restarting the master. Raises SchedulerError."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            master = find_master(job)
        except ValueError as error:
            raise SchedulerError(f"the job {job!r} has no master here: it has ended, or was never started") from error
        try:
            return ray.get(getattr(master, method).remote(*args), timeout=limit_s)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            if time.monotonic() >= deadline:
                problem = str(error).strip().split("\n")[0]
                raise SchedulerError(
                    f"the master of the job {job!r} has not answered {method!r} for {limit_s:g} s: {problem}"
                ) from error
            time.sleep(_ASK_AGAIN_S)
