"""Starting a job. A script that owns its Ray waits for its jobs when it exits."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import ray

from rlinf_lite.config.schema import ControlConfig
from rlinf_lite.control.context import JobContext, ask_master, open_backend
from rlinf_lite.control.job import JobHandle
from rlinf_lite.control.job_manager import JobManager
from rlinf_lite.control.master import create_master
from rlinf_lite.jobs.exit_code import exit_with
from rlinf_lite.jobs.spec import JobSpec, JobSpecError
from rlinf_lite.jobs.trainer_host import TrainerHost, load_classes
from rlinf_lite.scheduler import SchedulerError
from rlinf_lite.scheduler.local_ray import local_ray, owns_ray
from rlinf_lite.scheduler.scratch import ScratchDirs

_REMIND_S = 60.0  # interval of lines of a script that waits for its job

_own_ray = ExitStack()
_jobs: list[JobHandle] = []
"""The jobs on the Ray that this script owns, and that ends with it."""


def submit(
    spec: JobSpec,
    name: str,
    blocking: bool = False,
    *,
    directory: str | os.PathLike[str] | None = None,
    control: ControlConfig | None = None,
    start_timeout_s: float = 600.0,
) -> JobHandle | JobContext:
    """Start a job on the Ray at RAY_ADDRESS, on the one that this process is connected to, or on a new one of its own.
    A process with its own Ray waits at its exit for the job, and exits with 1 if the job failed.

    `directory`: for events, by default `results/jobs/<name>`. `control`: limits, back-off, the hang limit, and the
    place of the context; its `enabled`, `snapshot_interval` and `max_bad_updates` are only for training runs.
    `start_timeout_s`: limit for `init` of a new worker. Returns a JobHandle; with `blocking`, the context of the job
    after its end. Raises JobSpecError for classes that cannot be used and for a name that is taken, before anything
    starts.
    """
    if not re.fullmatch(r"[\w.-]{1,80}", name):
        raise JobSpecError([f"submit({name!r}): not a name. Use letters, digits, '.', '_' and '-', 80 at most."])
    load_classes(spec)
    _connect(spec)
    control = control or ControlConfig()
    handle = JobHandle(name, open_backend(control.backend))
    if handle.has_master():
        raise JobSpecError([f"submit({name!r}): a job of that name runs. Stop it, or choose another name."])
    where = str(Path(directory or Path("results") / "jobs" / name).absolute())
    create_master(name, control, JobManager(name, TrainerHost, replace(spec, name=name), where, start_timeout_s))
    ask_master(name, "process_id")
    if owns_ray():
        _jobs.append(handle)
    return handle.wait() if blocking else handle


def _connect(spec: JobSpec) -> None:
    if not ray.is_initialized():
        if os.environ.get("RAY_ADDRESS") or spec.num_nodes > 1:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
            return
        dirs = ScratchDirs()
        _own_ray.callback(dirs.remove)
        gpus = 0 if spec.device_type == "CPU" else None
        _own_ray.enter_context(local_ray(dirs.temp, spec.devices_per_node, gpus, log_to_driver=False))
    if owns_ray() and all(handle.seen_ended for handle in _jobs):
        atexit.unregister(_finish_jobs)
        atexit.register(_finish_jobs)  # registered last, so it runs before the functions that end Ray


def _finish_jobs() -> None:
    """At the script's exit, wait for its jobs, or stop them if an error or Ctrl-C ended the script; then end its
    Ray."""
    has_raised = getattr(sys, "last_value", None) is not None  # Python then sets the exit code itself
    must_stop = has_raised and not hasattr(sys, "ps1")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with _own_ray:
        for handle in [handle for handle in _jobs if not handle.seen_ended]:
            try:
                if not must_stop:
                    exit_with(_wait_at_exit(handle))
                    continue
            except KeyboardInterrupt:
                must_stop = True
                exit_with(130)
            _print(f"stopping the job {handle.name!r}, whose Ray ends with this script")
            try:
                handle.stop("its script was stopped")
            except (KeyboardInterrupt, SchedulerError, TimeoutError) as error:  # the rest of the job ends with Ray
                _print(f"the job {handle.name!r} did not stop: {type(error).__name__}: {error}")


def _wait_at_exit(handle: JobHandle) -> int:
    """Wait for a job at the end of the script; returns the exit code."""
    text = f"the job {handle.name!r} runs on the Ray of this script, which stays until it has ended. Ctrl-C stops it."
    while True:
        _print(f"{text} What it prints: rlinf-lite job logs {handle.name}")
        try:
            context = handle.wait(_REMIND_S)
            _print(f"the job {handle.name!r} is {context.stage} after step {context.step}")
            return 0 if context.stage == "finished" else 130
        except TimeoutError as error:
            text = f"{error}."
        except SchedulerError as error:
            _print(f"{type(error).__name__}: {error}")
            return 1


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
