"""JobHandle, with which any process of a job's Ray cluster can follow and stop the job."""

from __future__ import annotations

import time

import ray

from rlinf_lite.control.context import DAMAGED, ContextBackend, JobContext, ask_master, find_master, load_context
from rlinf_lite.control.supervisor import JobFailedError
from rlinf_lite.scheduler import SchedulerError
from rlinf_lite.scheduler.local_ray import local_ray_has_ended

_POLL_S = 0.3
_LOST_S = 30.0


class JobHandle:
    """A handle on a supervised job, which was submitted or is a training run."""

    def __init__(self, name: str, backend: ContextBackend) -> None:
        self.name, self._backend = name, backend
        self.seen_ended = False
        """Whether `wait` or `stop` has seen the job's end."""

    def __repr__(self) -> str:
        return f"JobHandle({self.name!r})"

    def status(self) -> JobContext:
        """The job's context: stage, workers, restarts, steps. Raises SchedulerError if there is no such job."""
        context = load_context(self._backend, self.name)
        if context is None:
            raise SchedulerError(f"there is no job named {self.name!r} here; `rlinf-lite job list` shows all jobs")
        return context

    def doing(self) -> dict[str, str]:
        """The method that each worker was last seen in; empty if the job has ended or its master does not answer."""
        try:
            return dict(ask_master(self.name, "doing", limit_s=10.0))
        except SchedulerError:
            return {}

    def logs(self, role: str | None = None, rank: int | None = None, num_lines: int = 30) -> dict[str, str]:
        """The last lines that workers (and the trainer) have printed, by worker. Raises SchedulerError for a job that
        has ended."""
        return dict(ask_master(self.name, "logs", role, rank, num_lines))

    def wait(self, timeout_s: float | None = None) -> JobContext:
        """Wait until the job has ended. Raises JobFailedError if it failed, TimeoutError, and SchedulerError if it is
        lost, that is, has had no master for long."""
        context = self._wait_for_end(timeout_s)
        if context.stage == "failed":
            raise JobFailedError(f"the job {self.name!r} failed after step {context.step}: {context.reason}")
        return context

    def stop(self, reason: str = "its user stopped it", timeout_s: float = 60.0) -> JobContext:
        """End the job and wait until it has ended. Does nothing to a job that has ended already. Raises TimeoutError,
        and SchedulerError if the job is lost."""
        if not self.status().stage.is_final:
            ask_master(self.name, "stop", reason, limit_s=timeout_s)
        return self._wait_for_end(timeout_s)

    def has_master(self) -> bool:
        """Whether Ray knows the job's master, which then lives or is restarting."""
        try:
            find_master(self.name)
        except ValueError:
            return False
        return True

    def _wait_for_end(self, timeout_s: float | None) -> JobContext:
        began = seen = time.monotonic()
        while True:
            if local_ray_has_ended() or not ray.is_initialized():
                raise SchedulerError(f"the job {self.name!r} cannot be followed: this process's Ray has ended")
            context = self.status()
            if context.stage.is_final:
                self.seen_ended = True
                return context
            now = time.monotonic()
            seen = now if self.has_master() else seen
            if now - seen > _LOST_S:
                lost = f"has had no master for {now - seen:.0f} s"
                raise SchedulerError(f"the job {self.name!r} is {context.stage}, but {lost}")
            if timeout_s is not None and now - began >= timeout_s:
                after = f"after {timeout_s:g} s (step {context.step})"
                raise TimeoutError(f"the job {self.name!r} is still {context.stage} {after}")
            time.sleep(_POLL_S)


def find_jobs(backend: ContextBackend) -> list[JobHandle]:
    """All jobs in the backend."""
    return [JobHandle(job, backend) for job in backend.jobs() if not job.endswith(DAMAGED)]
