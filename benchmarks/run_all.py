"""Every benchmark, one after the other, and one table of all targets.

    python benchmarks/run_all.py             # about 25 minutes on 2 cores; leave the machine alone meanwhile
    python benchmarks/run_all.py --quick     # few repeats: does everything still run?
    python benchmarks/run_all.py --table     # the table of the results that are there

Each benchmark is a process of its own. One that fails is reported and the others still run; the exit code is then 1.
A missed target is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from common import RESULTS, Comparison, print_comparisons, say

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Benchmark:
    """A script, and the arguments of a full and of a quick run."""

    script: str
    result: str
    full: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark("scheduler_bench.py", "scheduler", quick=("--repeats", "2", "--calls", "50", "--items", "5")),
    Benchmark("dataproto_bench.py", "dataproto", quick=("--repeats", "2", "--calls", "5")),
    Benchmark("generation_bench.py", "generation", quick=("--repeats", "2", "--batch", "8", "--tokens", "8")),
    Benchmark("weight_sync_bench.py", "weight_sync", quick=("--repeats", "3", "--mib", "64")),
    Benchmark("pipeline_bench.py", "pipeline", quick=("--repeats", "1", "--ratios", "1:1")),
    Benchmark("rollout_bench.py", "rollout", quick=("--repeats", "1", "--seconds", "2")),
    Benchmark("ppo_vs_sb3.py", "ppo_vs_sb3", quick=("--repeats", "1", "--steps", "2", "--variants", "dummy")),
    Benchmark("tabletop_bench.py", "tabletop", quick=("--repeats", "2", "--num-chunks", "10")),
    Benchmark("metaworld_bench.py", "metaworld", quick=("--repeats", "1", "--num-chunks", "4")),
    Benchmark("policy_bench.py", "policy", quick=("--repeats", "2", "--sizes", "tiny", "--batches", "8")),
    Benchmark("serve_bench.py", "serve", quick=("--repeats", "2", "--requests", "50")),
    Benchmark("loop_bench.py", "loop", quick=("--repeats", "1", "--steps", "2")),
    Benchmark("control_bench.py", "control", quick=("--blocks", "8", "--steps", "1")),
    Benchmark("memory_bench.py", "memory", quick=("--steps", "1", "--configs", "tabletop_ppo_vla")),
    Benchmark("lerobot_bench.py", "lerobot", quick=("--repeats", "2", "--frames", "400", "--batches", "10")),
    Benchmark("chunk_render_bench.py", "chunk_render", quick=("--repeats", "2", "--num-chunks", "2")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--only", nargs="+", choices=[benchmark.result for benchmark in BENCHMARKS], default=[])
    args = parser.parse_args()
    chosen = [b for b in BENCHMARKS if not args.only or b.result in args.only]
    failed: list[str] = []
    if not args.table:
        say(f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
        failed = [benchmark.result for benchmark in chosen if not run(benchmark, args.quick)]
    print_comparisons("all targets", [row for benchmark in chosen for row in read(benchmark)])
    if failed:
        say(f"failed: {', '.join(failed)}; their rows, if any, are of an earlier run")
    return 1 if failed else 0


def run(benchmark: Benchmark, quick: bool) -> bool:
    """Whether it ended well."""
    arguments = benchmark.quick if quick else benchmark.full
    say(f"\n== {benchmark.script} {' '.join(arguments)}")
    start = time.perf_counter()
    command = [sys.executable, "-W", "ignore", str(HERE / benchmark.script), *arguments]
    code = subprocess.run(command, check=False).returncode
    say(f"== {benchmark.script}: {'done' if code == 0 else f'exit code {code}'} in {time.perf_counter() - start:.0f} s")
    return code == 0


def read(benchmark: Benchmark) -> list[Comparison]:
    """The rows of its newest result."""
    path = RESULTS / f"{benchmark.result}.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text())["comparisons"]
    return [Comparison(**{name: value for name, value in row.items() if name != "met"}) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
