"""What is learned, over env steps and over seconds: synchronous runs and asynchronous ones, every seed in turn.

    python benchmarks/async_learning.py runner.val_check_interval=25
    python benchmarks/async_learning.py --sync math_arithmetic_grpo --async math_arithmetic_async_grpo

Runs are whole ones, as `rlinf-lite train` makes them, and evaluated as their configs say. Seconds count from the first
step and without evaluations; in between two evaluations success is taken from the line through both. The success at the
end of asynchronous runs is to be at most two points below that of synchronous ones, on average.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

import numpy as np
from common import Comparison, Report, print_table, say

TARGET = -0.02
SHARES = (0.25, 0.5, 0.75, 1.0)
Curve = list[tuple[float, float, float]]
"""Env steps (of language models: runner steps), seconds and success of every evaluation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of both configs")
    parser.add_argument("--sync", default="tabletop_ppo_vla", metavar="CONFIG")
    parser.add_argument("--async", dest="asynchronous", default="tabletop_async_ppo_vla", metavar="CONFIG")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_intermixed_args()
    contestants = {"sync": [args.sync]}
    for bound in args.staleness:
        contestants[f"staleness {bound}"] = [args.asynchronous, f"runner.max_staleness={bound}"]
    report = Report(f"async_learning_{args.sync}", vars(args))
    curves: dict[str, list[Curve]] = {name: [] for name in contestants}
    for seed in args.seeds:
        for name, words in contestants.items():
            found = curve([*words, *args.overrides, f"runner.seed={seed}"])
            curves[name].append(found)
            for what, values in zip(("steps", "seconds", "success"), zip(*found, strict=True), strict=True):
                report.measurements[f"{name}, seed {seed}: {what}"] = list(values)
            shown = ", ".join(f"{success:.3f} ({steps:,.0f}, {seconds:.0f} s)" for steps, seconds, success in found)
            say(f"  seed {seed}, {name}: {shown}")

    for column, unit in ((1, "s"), (0, "steps")):
        end = min(found[-1][column] for group in curves.values() for found in group)
        where = [share * end for share in SHARES]
        rows = []
        for name, group in curves.items():
            columns = [np.array(found).T for found in group]
            success = np.mean([np.interp(where, own[column], own[2]) for own in columns], axis=0)
            rows.append([name, *(f"{100 * value:.1f}" for value in success)])
        print_table(f"{args.sync}: success", ["mean, %", *(f"{value:,.0f} {unit}" for value in where)], rows)
    final = {name: mean(found[-1][2] for found in group) for name, group in curves.items()}
    for name in contestants:
        if name != "sync":
            less = final[name] - final["sync"]
            figures = (final[name], "sync", final["sync"], "success at the end", less)
            report.comparisons.append(Comparison(name, *figures, TARGET, at_least=True, note="the difference"))
    report.write()


def curve(words: list[str]) -> Curve:
    with tempfile.TemporaryDirectory() as directory:
        settings = [f"runner.logger.log_path={directory}", "runner.save_interval=-1", "runner.report=false"]
        command = [sys.executable, "-m", "rlinf_lite.cli", "train", *words, *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(directory).glob("*/metrics.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    found, began, evaluated = [], None, 0.0
    for line in lines:
        if "eval/num_episodes" in line:
            evaluated += line["time/eval"]
            began = line["time"] if began is None else began
            seconds = line["time"] - began - (evaluated - lines[0]["time/eval"])
            found.append((line.get("env/num_steps", line["step"]), seconds, line["eval/success_once"]))
    return found


if __name__ == "__main__":
    main()
