"""How a job's master is found and asked, and what a trainer's process tells it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray

from rlinf_lite.control.context import Failover, Stage, WorkerRecord
from rlinf_lite.scheduler import SchedulerError
from rlinf_lite.scheduler.context import RAY_NAMESPACE, ProcessContext

ASK_LIMIT_S = 60.0
"""How long a master may be away."""
_ASK_AGAIN_S = 0.3


@dataclass(frozen=True)
class Attachment:
    """What a trainer's process tells the master of its workers, after every start of some."""

    trainer_pid: int
    trainer_node: str
    context: ProcessContext
    workers: list[tuple[WorkerRecord, Any]]
    """With their Ray actors."""
    directory: str
    step: int
    total_steps: int
    failovers: list[Failover]
    """The history as far as the trainer knows it, for a master that has lost it."""
    edges: list[tuple[str, str]]
    """Whose results it has given to whom."""
    trainer_restarts: int = 0


Outcome = tuple[Stage, str, Attachment | None]
"""How a job has ended, why, and what its master should know (None where it had not begun)."""


def master_name(job: str) -> str:
    return f"job.{job}"


def ask_master(job: str, method: str, *args: Any, limit_s: float = ASK_LIMIT_S) -> Any:
    """Call a job's master; where it is away, as while Ray starts it again, wait for it. Raises SchedulerError."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            master = ray.get_actor(master_name(job), namespace=RAY_NAMESPACE)
        except ValueError as error:
            raise SchedulerError(f"the job {job!r} has no master here: it has ended, or never began") from error
        try:
            return ray.get(getattr(master, method).remote(*args), timeout=limit_s)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            if time.monotonic() >= deadline:
                problem = str(error).strip().split("\n")[0]
                raise SchedulerError(
                    f"the master of the job {job!r} has not answered {method!r} for {limit_s:g} s: {problem}"
                ) from error
            time.sleep(_ASK_AGAIN_S)
