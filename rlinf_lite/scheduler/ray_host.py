"""The Ray actor around a process's workers: what a process of its own has besides a `Host`."""

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
    """What Ray runs. Workers' methods run in the process's main thread."""

    def _process(self) -> tuple[int, list[str], str]:
        """Its id, its logs, and Ray's id of the actor."""
        return *process_and_logs(), ray.get_runtime_context().get_actor_id() or ""

    def _build(
        self,
        identities: list[dict[str, Any]],
        context: bytes,
        env_vars: dict[str, str],
        epoch: int,
        payload: bytes,
    ) -> list[Address]:
        """Construct the workers. `context`: a pickled ProcessContext; `payload`: the driver's pickled
        `registry.of_main`, [(class, args, kwargs)]. Unpickling imports numpy, which reads the variables."""
        os.environ.update(THREADS | env_vars)
        here: ProcessContext = cloudpickle.loads(context)
        set_context(here)
        # SIGTERM is for the driver, which saves what the workers hold and ends them; SLURM sends it to all of a job. By
        # a handler, and unblocked, which programs started from here do not inherit; forks get the default back
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, DUMP_SIGNAL})
        faulthandler.register(DUMP_SIGNAL, file=2)  # by no Python code: C that holds Python's lock does not stop it
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

            def tell(beats: list[Beat]) -> None:  # a master that is being started again hears nothing meanwhile
                with suppress(Exception):  # it is gone, and with it whoever watched
                    ray.get_actor(monitor, namespace=RAY_NAMESPACE).beat.remote(beats)

            activities = zip(self._groups, self._workers, strict=True)
            Heartbeat([(group, self._rank, worker._activity) for group, worker in activities], tell)
        return addresses


def call_id() -> str:
    """Of the call under way."""
    return ray.get_runtime_context().get_task_id() or ""
