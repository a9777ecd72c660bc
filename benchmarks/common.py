"""Code of all benchmarks: interleaved repeats, comparisons with a target, a description of the machine, tables,
JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlinf_lite.runners.protocol import gpu_names

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "ray", "numpy", "gymnasium", "mani_skill", "stable_baselines3")
_console = Console(width=140) if not os.isatty(1) else Console()


@dataclass(frozen=True)
class Comparison:
    """One row of the table of targets: a figure of this project and its opponent's, in one unit and from one run."""

    what: str
    ours: float
    against: str
    opponent: float
    unit: str
    ratio: float
    """The number that is compared with the target."""
    target: float
    at_least: bool
    """True: the ratio must be at least the target; False: at most."""
    note: str = ""

    @property
    def met(self) -> bool:
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target

    @property
    def target_text(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.target:g}"


@dataclass
class Report:
    """Results of one script. `write` prints the comparisons and writes everything to results/<name>.json."""

    name: str
    settings: dict[str, Any]
    comparisons: list[Comparison] = field(default_factory=list)
    measurements: dict[str, list[float]] = field(default_factory=dict)
    """All repeats of each figure, by name."""
    started: float = field(default_factory=time.time)
    load_at_start: tuple[float, ...] = field(default_factory=os.getloadavg)

    def write(self, directory: Path = RESULTS) -> Path:
        print_comparisons(self.name, self.comparisons)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        content = {
            "name": self.name,
            "machine": machine_record() | {"load_at_start": self.load_at_start, "load_at_end": os.getloadavg()},
            "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.started)),
            "took_s": time.time() - self.started,
            "settings": self.settings,
            "comparisons": [asdict(row) | {"met": row.met} for row in self.comparisons],
            "measurements": self.measurements,
        }
        path.write_text(json.dumps(rounded(content), indent=1, default=_shown) + "\n")
        say(f"written: {os.path.relpath(path)}")
        return path


def _shown(value: Any) -> str:
    """A value as text for JSON. Paths are relative to the root of the clone, to be the same for all users."""
    return os.path.relpath(value, RESULTS.parents[1]) if isinstance(value, Path) else str(value)


def interleaved(
    contestants: Mapping[str, Callable[[], float]], repeats: int, warmup: int = 1, unit: str = ""
) -> dict[str, list[float]]:
    """Measure all contestants in turn, `repeats` times, so that other load on the machine affects all of them equally.

    A contestant measures itself and returns the figure. The first `warmup` rounds are not kept.
    """
    measured: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(-warmup, repeats):
        for name, measure in contestants.items():
            figure = measure()
            if repeat >= 0:
                measured[name].append(figure)
        if repeat >= 0:
            say(f"  {repeat + 1}/{repeats}: " + ", ".join(f"{name} {v[-1]:.4g} {unit}" for name, v in measured.items()))
    return measured


def timed(function: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """A context during which `number` other processes run that never wait."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def available_bytes() -> int:
    """Bytes of memory that are available to new processes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def machine_record() -> dict[str, Any]:
    """Description of the machine and the versions of software, for a result."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "gpus": gpu_names(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; all columns except the first are right-aligned."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console.print(table)


def print_comparisons(title: str, comparisons: Sequence[Comparison]) -> None:
    rows = [
        [
            row.what,
            f"{row.ours:.4g} {row.unit}",
            f"{row.opponent:.4g} {row.unit} ({row.against})",
            f"{row.ratio:.3g}",
            row.target_text,
            "met" if row.met else "MISSED",
        ]
        for row in comparisons
    ]
    print_table(title, ["what", "ours", "against", "ratio", "target", ""], rows)


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, flush=True)


def rounded(value: Any) -> Any:
    """The value with floats rounded to six significant digits, also in lists and mappings."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None
