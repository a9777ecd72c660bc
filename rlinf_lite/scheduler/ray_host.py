"""RayHost: the Ray actor that hosts the workers of a process, with the process's variables, signals and heartbeat."""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from typing import Any

import ray
from ray import cloudpickle

from rlinf_lite.lazy import imports_without_gc
from rlinf_lite.registry import take_of_main
from rlinf_lite.scheduler.context import RAY_NAMESPACE, Address, ProcessContext, set_context
from rlinf_lite.scheduler.heartbeat import Beat, Heartbeat
from rlinf_lite.scheduler.host import DUMP_SIGNAL, Host, process_and_logs
from rlinf_lite.threads import THREADS


class RayHost(Host):
    """A Host as a Ray actor. Workers' methods run in the main thread of the process."""

    def _process(self) -> tuple[int, list[str], str]:
        """The process id, the log files, and Ray's id of the actor."""
        return *process_and_logs(), ray.get_runtime_context().get_actor_id() or ""

    def _build(
        self,
        identities: list[dict[str, Any]],
        context: bytes,
        env_vars: dict[str, str],
        epoch: int,
        payload: bytes,
    ) -> list[Address]:
        """Construct the workers. `context`: a pickled ProcessContext; `payload`: the pickled pair of the driver's
        `registry.of_main()` and [(class, args, kwargs)]. Variables are set first: unpickling imports numpy, which reads
        them."""
        os.environ.update(THREADS | env_vars)
        here: ProcessContext = cloudpickle.loads(context)
        set_context(here)
        # SLURM sends SIGTERM to all processes of a job; only the driver should act on it: it saves the workers' state
        # and ends them. Workers ignore it with a handler, which programs that they start do not inherit (an ignored or
        # blocked signal would be); forks get the default back
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, DUMP_SIGNAL})
        faulthandler.register(DUMP_SIGNAL, file=2)  # runs no Python code, so it works while C code holds the GIL
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        try:
            with imports_without_gc():
                of_main, definitions = cloudpickle.loads(payload)
            take_of_main(of_main)
        except Exception as error:  # anything that a user's module raises
            raise self._failure(self._name, "__init__", error) from None
        addresses = self._construct(identities, epoch, definitions)
        monitor = here.monitor
        if monitor is not None:

            def report(beats: list[Beat]) -> None:  # beats are lost while the master restarts
                with suppress(Exception):  # the master is gone
                    ray.get_actor(monitor, namespace=RAY_NAMESPACE).beat.remote(beats)

            activities = zip(self._groups, self._workers, strict=True)
            Heartbeat([(group, self._rank, worker._activity) for group, worker in activities], report)
        return addresses


def call_id() -> str:
    """The id of the running call."""
    return ray.get_runtime_context().get_task_id() or ""
