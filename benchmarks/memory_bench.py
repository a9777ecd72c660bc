"""Memory as `--dry-run` predicts it against what the processes of real runs take.

    python benchmarks/memory_bench.py [--configs tabletop_ppo_vla ...] [--steps 3]

Each run is the command that a user gives, at the config's own sizes, with few steps, one evaluation and one checkpoint.
Measured is the peak resident memory (VmHWM) of every worker, read from /proc while it lives; of several workers of a
component the largest counts. Pages that processes share count in each of them, in the prediction too. The runs of
`_LARGER` are the same with a model or micro-batch so large that what a constant says of interpreters matters little.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common import Comparison, Report, print_table, say

from rlinf_lite.config import load_config
from rlinf_lite.config.plan import plan_of
from rlinf_lite.preview.memory import estimate

MIB = 2**20
TOLERANCE = 0.2
CONFIGS: dict[str, list[str]] = {
    "tabletop_ppo_vla": [],
    "maniskill_pushcube_ppo_mlp": [],
    "math_arithmetic_ppo": ["sft.num_steps=20"],
}
LARGER = {
    "tabletop_ppo_vla, small": ["rollout.model_dir=null", "model.options.size=small", "actor.micro_batch_size=128"],
    "math_arithmetic_ppo, small": ["sft.num_steps=5", "model.size=small", "actor.max_tokens_per_micro_batch=8192"],
}
COMPONENTS = {
    "EnvWorker": "env",
    "MultiStepRolloutWorker": "rollout",
    "EmbodiedFSDPActor": "actor",
    "LanguageActor": "actor",
    "LanguageRollout": "rollout",
    "LanguageCritic": "critic",
    "LanguageReference": "reference",
    "RewardWorker": "reward",
}
"""By the class that Ray names a worker's process after; one of several roles has the name of the first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*CONFIGS, *LARGER]
    parser.add_argument("--configs", nargs="+", choices=known, default=known)
    parser.add_argument("--steps", type=int, default=3, help="training steps of each run")
    args = parser.parse_args()
    report = Report("memory", vars(args) | {"what": "peak resident bytes per process (VmHWM), CPU"})
    rows = []
    for title in args.configs:
        name, overrides = title.partition(",")[0], (CONFIGS | LARGER)[title]
        start = time.perf_counter()
        predicted = predict(name, overrides)
        report.measurements[f"{title}: s to predict"] = [time.perf_counter() - start]
        measured = run(name, overrides, args.steps)
        for component, peaks in measured.items():
            found, peak = predicted[component], max(peaks)
            report.measurements[f"{title}: {component}, MiB"] = [peak / MIB for peak in peaks]
            error = found / peak - 1
            rows.append([title, component, f"{found / MIB:.0f}", f"{peak / MIB:.0f}", f"{error:+.1%}"])
            what, off = f"{title}: {component}", abs(error)
            row = Comparison(what, found / MIB, "measured", peak / MIB, "MiB", off, TOLERANCE, at_least=False)
            report.comparisons.append(row)
        say(f"  {title}: {', '.join(f'{row[1]} {row[4]}' for row in rows if row[0] == title)}")
        report.write()  # what is measured stays where a later run fails
    columns = ["run", "component", "predicted, MiB", "measured, MiB", "error"]
    print_table("peak resident memory of a worker", columns, rows)


def predict(name: str, overrides: list[str]) -> dict[str, int]:
    """Bytes of a process by component; of roles that share one, by the first."""
    found = estimate(plan_of(load_config(name, overrides)))
    assert not found.unknown, found.unknown
    return {names.partition("+")[0]: sum(both) for names, both in found.processes.items()}


def run(name: str, overrides: list[str], steps: int) -> dict[str, list[int]]:
    """Train for `steps` steps. Peaks of every worker, bytes, by component."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = [
            f"runner.logger.log_path={scratch}",
            *(f"runner.{key}={steps}" for key in ("max_steps", "val_check_interval", "save_interval")),
            "runner.report=false",
            "cluster.forked_workers=false",  # a fork has pages of what all workers import
        ]
        log = Path(scratch) / "output"
        with log.open("w") as out:
            words = [sys.executable, "-m", "rlinf_lite.cli", "train", "--config-name", name, *settings, *overrides]
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
            peaks: dict[int, tuple[str, int]] = {}
            try:
                while process.poll() is None:
                    for pid, kind, peak in workers_below(process.pid):
                        peaks[pid] = (kind, max(peak, peaks.get(pid, ("", 0))[1]))
                    time.sleep(0.1)
            finally:
                process.terminate()  # where this ends early, the run does; a run that ended hears nothing
                process.wait()
        if process.returncode:
            raise SystemExit(f"{name} failed with {process.returncode}:\n{log.read_text()[-3000:]}")
    found: dict[str, list[int]] = {}
    for kind, peak in peaks.values():
        found.setdefault(kind, []).append(peak)
    return found


def workers_below(root: int) -> Iterator[tuple[int, str, int]]:
    """(pid, component, VmHWM in bytes) of the workers that descend from a process."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            stat = _read(f"/proc/{entry}/stat")
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1]) if stat else 0
    for pid in parents:
        above = pid
        while above in parents and above not in (root, 1):
            above = parents[above]
        title = re.match(r"ray::(\w+)", _read(f"/proc/{pid}/cmdline")) if above == root else None
        peak = re.search(r"VmHWM:\s+(\d+) kB", _read(f"/proc/{pid}/status")) if title else None
        if title and peak and title[1] in COMPONENTS:
            yield pid, COMPONENTS[title[1]], int(peak[1]) * 1024


def _read(path: str) -> str:
    """Empty where the process is gone."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    main()
