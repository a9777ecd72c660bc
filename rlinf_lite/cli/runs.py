"""`rlinf-lite runs`: list the runs of a directory, with their progress and results. Imports neither torch nor ray."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from rlinf_lite.cli.tables import print_table
from rlinf_lite.report.run_files import ReportError, RunFiles

ENDS = ("finished", "failed", "stopped")


@dataclass(frozen=True)
class Run:
    """A row of the table. `metric` is `success` where the environment reports it, else `return`; `before` and `last`
    are its values in the evaluation before training and in the last one, None where there was none."""

    directory: str
    status: str
    """running (on this machine), finished, failed, stopped; ended: before its last step, for an unknown reason."""
    step: int
    max_steps: int | None
    """Planned number of steps; None where the run's directory does not say."""
    metric: str
    before: float | None
    last: float | None
    episodes: int
    """Number of episodes of the last evaluation."""
    changed: float
    """Unix time of the last write to its log."""


def runs(arguments: Sequence[str]) -> int:
    """Print the list. Returns the exit code: 2 where the named directory does not exist."""
    parser = argparse.ArgumentParser(
        prog="rlinf-lite runs", description="List the runs of a directory, with status, steps and results."
    )
    parser.add_argument("directory", nargs="?", type=Path, help="directory of runs (default: results)")
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    options = parser.parse_args(arguments)
    directory = options.directory or Path("results")
    if options.directory is not None and not directory.is_dir():
        print(f"{directory}: no such directory. Name a directory of runs", file=sys.stderr)
        return 2
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    found = [run for path in paths if (run := read_run(path)) is not None]
    found.sort(key=lambda run: run.changed)
    if options.json:
        print(json.dumps([asdict(run) for run in found], indent=2))
        return 0
    titles = ("status", "steps", "metric", "before", "last", "episodes", "changed", "directory")
    print_table(titles, [_row(run) for run in found])
    if not found:
        print(f"no runs in {directory}: `rlinf-lite train tabletop_ppo_vla` makes one")
    return 0


def read_run(directory: Path) -> Run | None:
    """The run of a directory; None if it holds no run, or one whose files cannot be read (a line on stderr says so)."""
    writer = writer_of(directory / ".lock")
    is_running = writer is not None and writer.is_alive
    try:
        files = RunFiles(directory)
    except ReportError:
        if writer is None or not is_running:
            return None
        began = writer.lock.stat().st_mtime  # it has not written anything else yet
        return Run(str(directory), "running", 0, None, "success", None, None, 0, began)
    except (OSError, ValueError, yaml.YAMLError) as error:
        print(f"{directory}: cannot be read ({' '.join(str(error).split())})", file=sys.stderr)
        return None
    others = {content["step"] for content in files.other_evals}  # not comparable with the last one
    evaluated = [line for line in files.lines if "eval/num_episodes" in line and line["step"] not in others]
    metric = "success" if any(line.get("eval/success_once") is not None for line in evaluated) else "return"
    key = "eval/success_once" if metric == "success" else "eval/return"
    values = [line.get(key) for line in evaluated]
    return Run(
        str(directory),
        "running" if is_running else _end_of(files),
        files.completed_steps,
        files.total_steps,
        metric,
        values[0] if values and evaluated[0]["step"] == 0 else None,
        values[-1] if values else None,
        int(evaluated[-1]["eval/num_episodes"]) if evaluated else 0,
        (directory / "metrics.jsonl").stat().st_mtime,
    )


def _end_of(files: RunFiles) -> str:
    ends = [event["event"] for event in files.events if event.get("event") in (*ENDS, "running")]
    if ends and ends[-1] in ENDS:
        return str(ends[-1])
    wanted = files.total_steps
    return "finished" if wanted is not None and files.completed_steps >= wanted else "ended"


@dataclass(frozen=True)
class Writer:
    """The process that a run's lock file names."""

    lock: Path
    process: int
    host: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether it is on this machine and has the lock open. (Locking it, even briefly, could make a run fail.)"""
        with suppress(OSError):
            opened = Path(f"/proc/{self.process}/fd").iterdir()
            return self.is_here and any(os.path.realpath(one) == str(self.lock.resolve()) for one in opened)
        return False


def writer_of(lock: Path) -> Writer | None:
    """Who writes, or last wrote, the run of a lock file; None if it names nobody."""
    with suppress(OSError, ValueError, IndexError):
        _, process, _, host = lock.read_text().split()[:4]
        return Writer(lock, int(process), host.rstrip(","))
    return None


def _row(run: Run) -> tuple[str, ...]:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}" if run.metric == "success" else f"{value:.4g}"

    steps = f"{run.step} of {run.max_steps}" if run.max_steps else str(run.step)
    changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed))
    name = os.path.relpath(run.directory)
    return run.status, steps, run.metric, shown(run.before), shown(run.last), str(run.episodes or "-"), changed, name
