"""`rlinf-lite job`: list, inspect and stop the supervised jobs of this machine or of a Ray cluster."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from rlinf_lite.cli.tables import print_table
from rlinf_lite.control.context import ContextBackend, ContextError, DirectoryBackend, JobContext, KVBackend
from rlinf_lite.control.job import JobHandle, find_jobs
from rlinf_lite.registry import nearest
from rlinf_lite.report.axes import duration
from rlinf_lite.scheduler import ClusterError, SchedulerError
from rlinf_lite.scheduler.local_ray import KnownRay, find_local_rays, joined_ray
from rlinf_lite.scheduler.scratch import temp_root


@dataclass(frozen=True)
class Found:
    """A job. `ray` is the Ray in which its master runs; None if it has no master (any more)."""

    handle: JobHandle
    context: JobContext
    ray: KnownRay | None

    @property
    def stage(self) -> str:
        """Stage of its context, or `lost` if it has not ended but has no master."""
        return str(self.context.stage) if self.context.stage.is_final or self.ray else "lost"

    def joined(self) -> AbstractContextManager[None]:
        return nullcontext() if self.ray is None else joined_ray(self.ray)

    def to_json(self) -> dict[str, Any]:
        address = None if self.ray is None else self.ray.address
        return {**json.loads(self.context.to_json()), "stage": self.stage, "address": address}


def job(arguments: Sequence[str]) -> int:
    """Run one of the commands. Returns the exit code: 1 after an error. Exits with 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="rlinf-lite job", description="Supervised jobs (control.enabled=true).")
    commands = parser.add_subparsers(required=True, metavar="list | status | logs | stop")
    place = argparse.ArgumentParser(add_help=False)
    ray_help = (
        "address of a Ray cluster (default: RAY_ADDRESS, else all Rays that your scripts started on this machine)"
    )
    place.add_argument("--address", metavar="ADDR", help=ray_help)
    place.add_argument("--backend", metavar="DIR", help="directory of contexts (control.backend), if not in Ray")

    def add(name: str, run: Callable[[argparse.Namespace], None], about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[place], help=about, description=about, allow_abbrev=False)
        command.set_defaults(run=run)
        if run is not _list:
            command.add_argument("name", metavar="NAME", help="name of the job, or the beginning of it")
        if run in (_list, _status):
            command.add_argument("--json", action="store_true", help="print JSON")
        return command

    add("list", _list, "list all jobs")
    add("status", _status, "show one job: its workers, what they are doing, what has failed")
    logs = add("logs", _logs, "print the output of a running job's workers")
    logs.add_argument("--role", metavar="R", help="only workers of this role, or trainer")
    logs.add_argument("--rank", metavar="N", type=int, help="only the worker of this rank")
    logs.add_argument("--lines", metavar="N", type=int, default=30, help="number of last lines of each (default: 30)")
    add("stop", _stop, "stop a job; a training script then writes a checkpoint")

    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ContextError, SchedulerError, TimeoutError, RayError) as error:
        print(str(error).split("\n")[0], file=sys.stderr)
        return 1
    return 0


def _list(options: argparse.Namespace) -> None:
    jobs = _find(options)
    if options.json:
        print(json.dumps([found.to_json() for found in jobs], indent=2))
    elif not jobs:
        print("no jobs")
    else:
        rows = []
        for found in jobs:
            context = found.context
            restarts = sum(record.restarts for record in context.workers.values()) + context.trainer_restarts
            since = f"for {_age(context.started)}" if context.ended is None else f"ended {_clock(context.ended)}"
            workers = len(context.workers)
            rows.append((found.stage, _steps(context), workers, restarts, since, context.name, context.directory))
        print_table(("stage", "steps", "workers", "restarts", "since", "name", "directory"), rows)


def _status(options: argparse.Namespace) -> None:
    found = _pick(options)
    with found.joined():
        doing = found.handle.doing() if found.ray else {}
    if options.json:
        print(json.dumps({**found.to_json(), "doing": doing}, indent=2))
        return
    context = found.context
    reason = f": {context.reason.splitlines()[0]}" if context.reason else ""
    if context.ended is None:
        progress, end = f", last progress {_age(context.last_progress)} ago", f"{_age(context.started)} ago"
    else:
        progress, end = "", f"ended {_clock(context.ended)}, after {duration(context.ended - context.started)}"
    print(f"job        {context.name}")
    print(f"stage      {found.stage}{reason}")
    print(f"steps      {_steps(context)}{progress}")
    print(f"started    {_clock(context.started)}, {end}")
    print(f"trainer    pid {context.trainer_pid}, {context.trainer_node}, restarts: {context.trainer_restarts}")
    print(f"directory  {context.directory}")
    workers = [(r.name, r.node, r.pid, r.restarts, doing.get(r.name, "")) for r in context.workers.values()]
    print_table(("worker", "node", "pid", "restarts", "doing"), workers)
    failures = []
    for f in context.failovers:
        level = f.level if f.outcome == "done" else f"{f.level} ({f.outcome})"
        took, lost = "" if f.seconds is None else duration(f.seconds), "" if f.steps_lost is None else f.steps_lost
        failures.append((_clock(f.time), ", ".join(f.failed), f.kind, level, took, lost, f.evidence.split("\n")[0]))
    print_table(("failed at", "who", "kind", "again", "took", "steps lost", "evidence"), failures)
    if context.edges:
        print("\n" + ", ".join(f"{a} feeds {b}" for a, b in context.edges))


def _logs(options: argparse.Namespace) -> None:
    found = _pick(options)
    if found.ray is None:
        raise SchedulerError(
            f"the job {found.context.name!r} is {found.stage}: logs can be read only while a job runs. "
            f"Its events are in {found.context.directory}"
        )
    with found.joined():
        logs = found.handle.logs(options.role, options.rank, options.lines)
    if not logs:
        raise SchedulerError(
            f"no such worker; those of the job {found.context.name!r} are {', '.join(found.context.workers)}"
        )
    print("\n\n".join(f"{worker}:\n{text.rstrip() or '(nothing)'}" for worker, text in logs.items()))


def _stop(options: argparse.Namespace) -> None:
    found = _pick(options)
    before = found.context
    if before.stage.is_final:
        print(f"{before.name} had already ended: {before.stage} after {_steps(before)} steps")
        return
    if found.ray is None:
        raise SchedulerError(f"the job {before.name!r} is lost: it was {before.stage}, but its master is gone")
    with found.joined():
        after = found.handle.stop("stopped by `rlinf-lite job stop`")
    print(f"{after.name} was {before.stage} and is now {after.stage}, after {_steps(after)} steps")


def _rays(options: argparse.Namespace) -> list[KnownRay]:
    """The Rays that are searched for jobs."""
    local = find_local_rays()
    if address := options.address or os.environ.get("RAY_ADDRESS"):
        return [next((known for known in local if known.address == address), KnownRay(address))]
    return local


def _find(options: argparse.Namespace) -> list[Found]:
    """All jobs of the searched Rays, or of the directory --backend, each with the Ray in which it runs."""
    if options.backend is None:
        return [found for known in _rays(options) for found in _read(KVBackend(), known)]
    if not Path(options.backend).is_dir():
        raise SchedulerError(f"--backend {options.backend}: there is no such directory")
    kept = DirectoryBackend(options.backend)
    jobs = {found.context.name: found for found in _read(kept, None)}
    over = all(found.context.stage.is_final for found in jobs.values())
    for known in [] if over else _rays(options):
        jobs |= {found.context.name: found for found in _read(kept, known) if found.ray is not None}
    return list(jobs.values())


def _read(backend: ContextBackend, known: KnownRay | None) -> list[Found]:
    """The jobs of a backend. `known` is the Ray in which they may be running; none are returned if it does not answer
    and is one of several."""
    found = []
    try:
        with nullcontext() if known is None else joined_ray(known):
            for handle in find_jobs(backend):
                try:
                    context = handle.status()
                except ContextError as error:
                    print(error, file=sys.stderr)
                    continue
                watched = known is not None and not context.stage.is_final and handle.has_master()
                found.append(Found(handle, context, known if watched else None))
    except ClusterError as error:
        if known is None or known.token is None:
            raise
        print(error, file=sys.stderr)  # others may answer
        return []
    return found


def _pick(options: argparse.Namespace) -> Found:
    """The job with the given name, or the only one whose name begins so. Raises SchedulerError where there is none, or
    more than one."""
    jobs, name = _find(options), options.name
    if not jobs and options.backend is None and not _rays(options):
        raise SchedulerError(
            f"no Ray of yours was found on this machine (in {temp_root()}): name one with --address, "
            "or a directory of contexts with --backend"
        )
    matching = [found for found in jobs if found.context.name == name]
    matching = matching or [found for found in jobs if found.context.name.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        which = ", ".join(f"{found.context.name} ({found.ray.address if found.ray else 'ended'})" for found in matching)
        raise SchedulerError(f"the names of several jobs begin with {name!r}: {which}; give more of it, or --address")
    names = sorted({found.context.name for found in jobs})
    near = nearest(name, names, count=3, cutoff=0.4) or names[:5]
    hint = f"The nearest: {', '.join(near)}" if near else "There are no jobs"
    raise SchedulerError(f"there is no job named {name!r}. {hint}")


def _steps(context: JobContext) -> str:
    return f"{context.step} of {context.total_steps}" if context.total_steps else str(context.step)


def _age(moment: float) -> str:
    return duration(max(time.time() - moment, 0.0))


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
