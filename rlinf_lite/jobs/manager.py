"""Runs a built job's trainer in a process of its own, which launches the workers and owns them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray

from rlinf_lite.control.link import Outcome
from rlinf_lite.jobs.spec import JobSpec
from rlinf_lite.scheduler.context import RAY_NAMESPACE
from rlinf_lite.scheduler.nodes import beside_this_process


class JobManager:
    """Creates, finds and ends the process of a job's trainer, which outlives the master that made it.

    `directory`: where events go. `start_timeout_s`: for `init` of a new worker.
    """

    def __init__(self, job: str, spec: JobSpec, directory: str, start_timeout_s: float) -> None:
        self.directory = directory
        self._job, self._spec, self._start_timeout_s = job, spec, start_timeout_s
        self._ping: Any = None
        self._host: Any = None
        self._outcome: Outcome | None = None

    def find_or_start(self) -> None:
        """Take up the trainer's process that an earlier master has started, or start the first."""
        with suppress(ValueError):  # the job is new
            self._host = ray.get_actor(self._name, namespace=RAY_NAMESPACE)
        if self._host is None:
            self.start(0, None)

    @property
    def _name(self) -> str:
        return f"job.{self._job}.trainer"

    def start(self, restarts: int, failure: str | None) -> None:
        """Start the trainer's process; `failure`: which it recovers from."""
        from rlinf_lite.jobs.trainer_host import TrainerHost

        self._ping = None
        self._host = (
            ray.remote(TrainerHost)
            .options(
                name=self._name,
                namespace=RAY_NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_concurrency=2,
                **beside_this_process(),
                enable_task_events=False,
            )
            .remote(self._job, self._spec, restarts, failure)
        )
        self._host.run.remote(self.directory, self._start_timeout_s)

    def lost(self) -> str | None:
        """Why the trainer's process is gone; None where it is not."""
        if self._ping is None or ray.wait([self._ping], timeout=0)[0]:
            before, self._ping = self._ping, self._host.outcome.remote()
            if before is not None:
                try:
                    self._outcome = ray.get(before)
                except ray.exceptions.RayActorError as error:
                    return str(error).strip().split("\n")[0]
        return None

    def outcome(self) -> Outcome | None:
        """How the trainer ended, as far as `lost` has heard: should its own word not have reached the master."""
        return self._outcome

    def log_paths(self) -> list[str]:
        """Files that the trainer prints to."""
        with suppress(ray.exceptions.RayError):
            paths: list[str] = ray.get(self._host.log_paths.remote(), timeout=5)
            return paths
        return []

    def end(self) -> None:
        """Kill the trainer's process."""
        with suppress(Exception):  # it is gone already
            ray.kill(self._host)
