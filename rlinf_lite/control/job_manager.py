"""JobManager, with which the master of a submitted job starts, watches and ends the trainer's process."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray

from rlinf_lite.control.context import Outcome
from rlinf_lite.scheduler.context import RAY_NAMESPACE
from rlinf_lite.scheduler.nodes import detached_actor


class JobManager:
    """Manages the process of a job's trainer, which outlives the master that started it. (In a training run the driver
    is the trainer; it is not restarted.)

    `host`: the class of its Ray actor, constructed as (spec, restarts, failure). `directory`: for the job's
    events. `start_timeout_s`: for `init` of a new worker.
    """

    def __init__(self, job: str, host: type[Any], spec: Any, directory: str, start_timeout_s: float) -> None:
        self.directory = directory
        self.outcome: Outcome | None = None
        """The trainer's outcome, which `lost` asks for, in case the trainer could not report it to the master."""
        self._host_class, self._spec, self._start_timeout_s = host, spec, start_timeout_s
        self._name = f"job.{job}.trainer"
        self._ping: Any = None
        self._host: Any = None

    def find_or_start(self) -> None:
        """Find the trainer's process that an earlier master started, or start the first one."""
        try:
            self._host = ray.get_actor(self._name, namespace=RAY_NAMESPACE)
        except ValueError:  # the job is new
            self.start(0, None)

    def start(self, restarts: int, failure: str | None) -> None:
        """Start the trainer's process. `restarts`: number of earlier restarts; `failure`: id of the failure to recover
        from."""
        self._ping = None
        host = detached_actor(self._host_class, self._name, max_concurrency=2)
        self._host = host.remote(self._spec, restarts, failure)
        self._host.run.remote(self.directory, self._start_timeout_s)

    def lost(self) -> str | None:
        """The reason why the trainer's process is gone; None if it is not gone."""
        if self._ping is None or ray.wait([self._ping], timeout=0)[0]:
            before, self._ping = self._ping, self._host.outcome.remote()
            if before is not None:
                try:
                    self.outcome = ray.get(before)
                except ray.exceptions.RayActorError as error:
                    return str(error).strip().split("\n")[0]
        return None

    def log_paths(self) -> list[str]:
        """The files that the trainer prints to; empty if its process is gone."""
        with suppress(ray.exceptions.RayError):
            return list(ray.get(self._host.log_paths.remote(), timeout=5))
        return []

    def end(self) -> None:
        """Kill the trainer's process."""
        with suppress(Exception):  # it is gone already
            ray.kill(self._host)
