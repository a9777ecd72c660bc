"""JobManager, with which the master of a built job starts the trainer's process, watches it and ends it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray

from rlinf_lite.control.context import Outcome
from rlinf_lite.scheduler.context import RAY_NAMESPACE
from rlinf_lite.scheduler.nodes import detached_actor


class JobManager:
    """The process of a job's trainer, which outlives the master that started it. (A training run's trainer is its
    driver, which nothing starts again.)

    `host`: the class of its Ray actor, constructed as (spec, restarts, failure). `directory`: for the job's
    events. `start_timeout_s`: for `init` of a new worker.
    """

    def __init__(self, job: str, host: type[Any], spec: Any, directory: str, start_timeout_s: float) -> None:
        self.directory = directory
        self.outcome: Outcome | None = None
        """How the trainer ended, as `lost` has learned from it, for a master that it could not tell."""
        self._host_class, self._spec, self._start_timeout_s = host, spec, start_timeout_s
        self._name = f"job.{job}.trainer"
        self._ping: Any = None
        self._host: Any = None

    def find_or_start(self) -> None:
        """Find the trainer's process that an earlier master has started, or start the first."""
        try:
            self._host = ray.get_actor(self._name, namespace=RAY_NAMESPACE)
        except ValueError:  # the job is new
            self.start(0, None)

    def start(self, restarts: int, failure: str | None) -> None:
        """Start the trainer's process. `restarts`: earlier ones; `failure`: the id of the one that it recovers from."""
        self._ping = None
        host = detached_actor(self._host_class, self._name, max_concurrency=2)
        self._host = host.remote(self._spec, restarts, failure)
        self._host.run.remote(self.directory, self._start_timeout_s)

    def lost(self) -> str | None:
        """Why the trainer's process is gone; None where it is not."""
        if self._ping is None or ray.wait([self._ping], timeout=0)[0]:
            before, self._ping = self._ping, self._host.outcome.remote()
            if before is not None:
                try:
                    self.outcome = ray.get(before)
                except ray.exceptions.RayActorError as error:
                    return str(error).strip().split("\n")[0]
        return None

    def log_paths(self) -> list[str]:
        """Files that the trainer prints to; none where its process is gone."""
        with suppress(ray.exceptions.RayError):
            return list(ray.get(self._host.log_paths.remote(), timeout=5))
        return []

    def end(self) -> None:
        """Kill the trainer's process."""
        with suppress(Exception):  # it is gone already
            ray.kill(self._host)
