"""Training while a random worker is killed every 20 to 40 s; the run must end like an undisturbed one.

python benchmarks/soak.py --steps 450                 # both runs at the same time; a table, results/soak.json
python benchmarks/soak.py --steps 450 --alone         # only the run whose workers are killed
python benchmarks/soak.py --config tabletop_async_ppo_vla --alone runner.max_staleness=2
python benchmarks/soak.py --config math_arithmetic_async_grpo --alone --steps 200

For asynchronous runs it also reports how stale data was, and how many steps were admitted between two versions of the
weights (`async/admitted_steps`), undisturbed and after kills. More than runner.max_staleness + 1 would be a burst.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from common import RESULTS, machine_record, rounded, say

from rlinf_lite.scheduler.processes import is_ray_process

REPO = Path(__file__).resolve().parents[1]
SAMPLE_S = 5.0
UNLIMITED = "1000000"


@dataclass
class Run:
    """One training script, observed from outside: its job's context, memory and events."""

    name: str
    overrides: list[str]
    home: Path
    killed: list[dict[str, Any]] = field(default_factory=list)
    memory: list[Counter[str]] = field(default_factory=list)
    """Memory of all its processes in bytes, by their name, every SAMPLE_S seconds."""
    seen: set[int] = field(default_factory=set)
    """Ids of all its processes."""
    took_s: float = 0.0
    returncode: int | None = None

    def start(self) -> None:
        is_math = any(override.startswith("math_") for override in self.overrides)
        script = REPO / "examples" / ("math/train_math.py" if is_math else "embodiment/train_embodied_agent.py")
        paths = [f"runner.logger.log_path={self.home}"]
        settings = [f"control.backend={self.home / 'context'}", f"runner.run_name={self.name}", *paths]
        self._log = (self.home / f"{self.name}.log").open("w")
        self._began = time.time()
        self._process = subprocess.Popen(
            [sys.executable, str(script), *self.overrides, *settings], stdout=self._log, stderr=subprocess.STDOUT
        )

    def watch(self) -> None:
        """Sample its memory until it ends."""
        while self._process.poll() is None:
            driver = psutil.Process(self._process.pid)
            below = driver.children(recursive=True)
            self.seen |= {*(process.pid for process in below), *self.pids().values()}
            self.memory.append(sum(map(resident_bytes, [driver, *below]), Counter()))
            time.sleep(SAMPLE_S)
        self.took_s, self.returncode = time.time() - self._began, self._process.returncode
        self._log.close()

    def hurt(self, rng: random.Random, every: tuple[float, float]) -> None:
        """Kill a random worker at random intervals (within `every`, seconds), from the start of training to its end."""
        while self._process.poll() is None:
            if not self.context().get("workers"):
                time.sleep(1)
                continue
            time.sleep(rng.uniform(*every))
            pids = self.pids()
            worker = rng.choice(sorted(pids))
            if self._process.poll() is None and is_ray_process(pids[worker]):
                os.kill(pids[worker], signal.SIGKILL)
                self.killed.append({"time": time.time(), "worker": worker})

    def context(self) -> dict[str, Any]:
        found = list((self.home / "context").glob(f"{self.name}-*.json"))
        context: dict[str, Any] = json.loads(found[0].read_text()) if found else {}
        return context

    def pids(self) -> dict[str, int]:
        return {name: record["pid"] for name, record in self.context().get("workers", {}).items()}

    def summary(self) -> dict[str, Any]:
        """Results of the run, after its end."""
        context = self.context()
        rows = [json.loads(line) for line in (Path(context["directory"]) / "metrics.jsonl").read_text().splitlines()]
        steps = [row["step"] for row in rows if "time/step" in row]
        evals = [row for row in rows if "eval/success_once" in row]
        time.sleep(10)  # processes may need that long to end
        return {
            "returncode": self.returncode,
            "minutes": self.took_s / 60,
            "stage": context["stage"],
            "completed_steps": context["step"],
            "every_step_once": steps == list(range(1, context["step"] + 1)),
            **self._admission(rows),
            "success_once": evals[-1]["eval/success_once"] if evals else None,
            "num_episodes": evals[-1].get("eval/num_episodes") if evals else None,
            "memory_mib": self._memory(),
            "orphans": len([pid for pid in self.seen if is_ray_process(pid)]),
            **self._failovers(Path(context["directory"])),
        }

    def _admission(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Staleness and admitted steps of an asynchronous run; empty for other runs. Steps that were logged before the
        first kill count as undisturbed."""
        steps = [row for row in rows if "async/admitted_steps" in row]
        if not steps:
            return {}
        first_kill = min((kill["time"] for kill in self.killed), default=float("inf"))
        admitted: dict[str, Counter[int]] = {"undisturbed": Counter(), "after kills": Counter()}
        for row in steps:
            when = "undisturbed" if row["time"] < first_kill else "after kills"
            admitted[when][int(row["async/admitted_steps"])] += 1
        return {
            "largest_staleness": max(row.get("async/staleness_max", 0) for row in steps),
            "most_admitted_between_versions": {when: max(counts, default=0) for when, counts in admitted.items()},
            "admitted_between_versions": {when: dict(sorted(counts.items())) for when, counts in admitted.items()},
        }

    def _memory(self) -> dict[str, list[float]]:
        """Median memory in MiB in the first and in the last quarter of the run, without its first eighth."""
        settled = self.memory[len(self.memory) // 8 :]
        quarter = max(len(settled) // 4, 1)
        parts = [settled[:quarter], settled[-quarter:]]
        kinds = sorted({kind for sample in settled for kind in sample})
        found = {kind: [statistics.median(s[kind] for s in part) / 2**20 for part in parts] for kind in kinds}
        return {"all": [statistics.median(s.total() for s in part) / 2**20 for part in parts], **found}

    def _failovers(self, directory: Path) -> dict[str, Any]:
        if not self.killed:
            return {}
        events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
        detected = [event for event in events if event["event"] == "detected"]
        recovered = [event for event in events if event["event"] == "recovered"]
        delays = []
        for kill in self.killed:
            same = (e["time"] for e in detected if f"{e['group']}[{e['rank']}]" == kill["worker"])
            delays += [min(after)] if (after := [at - kill["time"] for at in same if at >= kill["time"]]) else []
        by_level: dict[str, list[float]] = {}
        for event in recovered:
            by_level.setdefault(event["level"], []).append(event["seconds"])
        return {
            "kills": len(self.killed),
            "killed": dict(Counter(kill["worker"] for kill in self.killed)),
            "detected": len(delays),
            "detection_s": spread(delays),
            "recovered": len(recovered),
            "recovery_s": {level: spread(seconds) for level, seconds in by_level.items()},
            "steps_lost": sum(event["steps_lost"] for event in recovered),
            "failed_recoveries": len([event for event in events if event["event"] == "recovery_failed"]),
        }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "max": max(values), "num": len(values)} if values else {}


def resident_bytes(process: psutil.Process) -> Counter[str]:
    """Memory of a process in bytes, by its name. Pages that it shares with others count in proportion."""
    try:
        return Counter({process.name().split(".")[0]: int(process.memory_full_info().pss)})
    except psutil.Error:  # the process has ended
        return Counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tabletop_ppo_vla")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--every", type=float, nargs=2, default=(20.0, 40.0), metavar="S", help="seconds between kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills")
    parser.add_argument("--alone", action="store_true", help="without the undisturbed run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the result")
    parser.add_argument("overrides", nargs="*", help="overrides for both runs")
    args = parser.parse_args()
    limits = ["max_restarts", "max_role_restarts", "max_job_restarts"]
    overrides = ["--config-name", args.config, f"runner.max_steps={args.steps}", "actor.num_threads=1"]
    overrides += [f"runner.val_check_interval={args.steps}", "runner.save_interval=50", "control.snapshot_interval=1"]
    overrides += ["control.max_backoff_s=0", *(f"control.{limit}={UNLIMITED}" for limit in limits), *args.overrides]
    with tempfile.TemporaryDirectory() as home:
        disturbed = Run("disturbed", overrides, Path(home))
        runs = [disturbed] if args.alone else [disturbed, Run("undisturbed", overrides, Path(home))]
        for run in runs:
            run.start()
        threads = [threading.Thread(target=run.watch) for run in runs]
        threads.append(threading.Thread(target=disturbed.hurt, args=(random.Random(args.seed), tuple(args.every))))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = {run.name: run.summary() for run in runs}
        for run in runs:
            if run.returncode:
                say((Path(home) / f"{run.name}.log").read_text()[-3000:])
    for name, summary in found.items():
        say(name)
        for key, value in rounded(summary).items():
            say(f"  {key:28} {value}")
    args.out.mkdir(parents=True, exist_ok=True)
    name = "soak" if args.config == parser.get_default("config") else f"soak_{args.config}"
    content = {"name": name, "machine": machine_record(), "settings": {**vars(args), "out": None}, "runs": found}
    (args.out / f"{name}.json").write_text(json.dumps(rounded(content), indent=1, default=str) + "\n")
    good = all(run["returncode"] == 0 and run["orphans"] == 0 and run["every_step_once"] for run in found.values())
    return 0 if good and found["disturbed"].get("steps_lost") == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
