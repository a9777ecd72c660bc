"""How a job's master is found and asked, and what a trainer's process tells it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray

from rlinf_lite.control.context import JobContext, Stage
from rlinf_lite.scheduler import SchedulerError
from rlinf_lite.scheduler.context import RAY_NAMESPACE, ProcessContext

ASK_LIMIT_S = 60.0
"""How long a master may be away."""
_ASK_AGAIN_S = 0.3


@dataclass(frozen=True)
class Attachment:
    """What a trainer's process tells the master after every start of workers; enough for one that has lost it."""

    job: JobContext
    """As the trainer knows it."""
    context: ProcessContext
    handles: dict[str, Any]
    """Ray actors of the workers, by name."""


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
