"""Starting a built job, and what its user holds: status, logs, wait, stop. Also how jobs are found again."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import ray

from rlinf_lite.config.schema import ControlConfig
from rlinf_lite.control.context import ContextBackend, JobContext, ask_master, load_context, master_name, open_backend
from rlinf_lite.control.master import create_master
from rlinf_lite.control.supervisor import JobFailedError
from rlinf_lite.jobs.exit_code import exit_with
from rlinf_lite.jobs.spec import JobSpec, JobSpecError
from rlinf_lite.jobs.trainer_host import JobManager, load_classes
from rlinf_lite.scheduler import SchedulerError
from rlinf_lite.scheduler.context import RAY_NAMESPACE
from rlinf_lite.scheduler.local_ray import local_ray, local_ray_has_ended, owns_ray
from rlinf_lite.scheduler.scratch import ScratchDirs

_POLL_S = 0.3
_LOST_S = 30.0
_SAY_S = 60.0  # between two lines of a script that waits for its job

_own_ray = ExitStack()
_unfinished: dict[str, JobHandle] = {}
"""Jobs on a Ray that ends with this script, by name, of whose end it has not heard yet."""


class JobHandle:
    """A job that was submitted, from any process of its Ray cluster."""

    def __init__(self, name: str, backend: ContextBackend) -> None:
        self.name, self._backend = name, backend

    def __repr__(self) -> str:
        return f"JobHandle({self.name!r})"

    def status(self) -> JobContext:
        """Stage, workers, restarts, steps. Raises SchedulerError where there is no such job, or it is lost."""
        context = load_context(self._backend, self.name)
        if context is None:
            raise SchedulerError(
                f"there is no job named {self.name!r} here; `rlinf-lite job list` shows those there are"
            )
        return context

    def doing(self) -> dict[str, str]:
        """What every worker was last seen doing; nothing where the job has ended, or its master does not
        answer."""
        try:
            doing: dict[str, str] = ask_master(self.name, "doing", limit_s=10.0)
        except SchedulerError:
            return {}
        return doing

    def logs(self, role: str | None = None, rank: int | None = None, num_lines: int = 30) -> dict[str, str]:
        """The last lines that workers (and the trainer) have printed, by worker. Raises SchedulerError for a job that
        has ended."""
        found: dict[str, str] = ask_master(self.name, "logs", role, rank, num_lines)
        return found

    def wait(self, timeout_s: float | None = None) -> JobContext:
        """Until the job has ended. Raises JobFailedError where it failed, TimeoutError, SchedulerError where it is
        lost, that is, without a master for long."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        seen = time.monotonic()
        while True:
            if self.name in _unfinished and (local_ray_has_ended() or not ray.is_initialized()):
                raise SchedulerError(f"the job {self.name!r} ended before it was done, with its Ray")
            context = self.status()
            if context.stage.is_final:
                break
            now = time.monotonic()
            seen = now if self.has_master() else seen
            if now - seen > _LOST_S:
                raise SchedulerError(
                    f"the job {self.name!r} is {context.stage}, but nobody has watched it for {now - seen:.0f} s"
                )
            if deadline is not None and now >= deadline:
                raise TimeoutError(
                    f"the job {self.name!r} is still {context.stage} after {timeout_s:g} s (step {context.step})"
                )
            time.sleep(_POLL_S)
        _unfinished.pop(self.name, None)
        if context.stage == "failed":
            raise JobFailedError(f"the job {self.name!r} failed after step {context.step}: {context.reason}")
        return context

    def stop(self, reason: str = "its user stopped it", timeout_s: float = 60.0) -> JobContext:
        """End the job and wait until nothing of it is left. One that has ended already is left as it is."""
        if not self.status().stage.is_final:
            ask_master(self.name, "stop", reason, limit_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        while not (context := self.status()).stage.is_final:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the job {self.name!r} is still {context.stage} {timeout_s:g} s after it was stopped"
                )
            time.sleep(_POLL_S)
        _unfinished.pop(self.name, None)
        return context

    def has_master(self) -> bool:
        """Whether Ray knows its master: it lives, or is being started again."""
        try:
            ray.get_actor(master_name(self.name), namespace=RAY_NAMESPACE)
        except ValueError:
            return False
        return True


def submit(
    spec: JobSpec,
    name: str,
    blocking: bool = False,
    *,
    directory: str | os.PathLike[str] | None = None,
    control: ControlConfig | None = None,
    start_timeout_s: float = 600.0,
) -> JobHandle | JobContext:
    """Launch a job on the Ray at RAY_ADDRESS, the one that this process is connected to, or one of its own. Where that
    Ray ends with this process, the process waits at its exit for the job, and exits with 1 where that failed.

    Its events are written to `directory` (default `results/jobs/<name>`). `control` has limits, back-off, the time
    after which a worker hangs, and where the context is kept; `enabled`, `snapshot_interval` and `max_bad_updates` are
    for training runs. `start_timeout_s` is what a new worker's `init` may take. Returns a JobHandle; with `blocking`,
    the context of the job when it has ended. Raises JobSpecError for classes that cannot be imported and a name that is
    taken, before anything starts.
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
    create_master(name, control, JobManager(name, spec, where, start_timeout_s))
    ask_master(name, "process_id")
    if owns_ray():
        _unfinished[name] = handle
    return handle.wait() if blocking else handle


def find_jobs(backends: Iterable[ContextBackend]) -> list[JobHandle]:
    """All jobs that these backends know of."""
    return [JobHandle(job, backend) for backend in backends for job in backend.jobs() if not job.endswith(".damaged")]


def _connect(spec: JobSpec) -> None:
    if not ray.is_initialized():
        if os.environ.get("RAY_ADDRESS") or spec.num_nodes > 1:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
            return
        dirs = ScratchDirs()
        _own_ray.callback(dirs.remove)
        gpus = 0 if spec.device_type == "CPU" else None
        _own_ray.enter_context(local_ray(dirs.temp, spec.devices_per_node, gpus, log_to_driver=False))
    if not _unfinished and owns_ray():
        atexit.unregister(_leave)
        atexit.register(_leave)  # runs before whatever ends a Ray that is there by now


def _leave() -> None:
    """The script is over: wait for its jobs, or stop them where an error or Ctrl-C has ended it; then end its Ray."""
    script_failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        for handle in list(_unfinished.values()):
            if script_failed:  # which is its exit code
                _stop(handle)
                continue
            try:
                exit_with(_see_out(handle))
            except KeyboardInterrupt:
                script_failed = True
                exit_with(130)
                _stop(handle)
    finally:
        _own_ray.close()


def _see_out(handle: JobHandle) -> int:
    """Wait for a job at the end of the script; returns the exit code."""
    what = f"the job {handle.name!r} runs on the Ray of this script, which stays until it has ended. Ctrl-C stops it."
    while True:
        _say(f"{what} What it prints: rlinf-lite job logs {handle.name}")
        try:
            context = handle.wait(_SAY_S)
        except TimeoutError as error:
            what = f"{error}."
            continue
        except SchedulerError as error:
            _say(f"{type(error).__name__}: {error}")
            return 1
        _say(f"the job {handle.name!r} is {context.stage} after step {context.step}")
        return 0 if context.stage == "finished" else 130


def _stop(handle: JobHandle) -> None:
    _say(f"stopping the job {handle.name!r}, whose Ray ends with this script")
    try:
        handle.stop("its script was stopped")
    except (KeyboardInterrupt, SchedulerError, TimeoutError) as error:  # what is left of it ends with its Ray
        _say(f"the job {handle.name!r} did not stop: {type(error).__name__}: {error}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
