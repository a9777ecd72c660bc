"""Draw the learning curve of one or more runs: each seed thin, their mean bold, over env steps.

python benchmarks/plot_run.py results/<run> [results/<run of another seed> ...] --out curve.png
python benchmarks/plot_run.py --group PPO results/<run> ... --group GRPO results/<run> ... --out curves.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from learning_curves import Curve, draw


def read_curve(run_dir: Path, metric: str) -> Curve:
    """`metric` of every evaluation in `metrics.jsonl`, by the env steps done until then."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    env_steps = {line["step"]: int(line["env/num_steps"]) for line in lines if "env/num_steps" in line} | {0: 0}
    return sorted((env_steps[line["step"]], line[metric]) for line in lines if line.get(metric) is not None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="run directories, one per seed")
    parser.add_argument(
        "--group", nargs="+", action="append", default=[], metavar=("NAME", "RUN"), help="of one colour"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--metric", default="eval/success_once", help="default: %(default)s")
    parser.add_argument("--target", type=float, help="a dashed line")
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()

    named = {name: runs for name, *runs in [*([["", *arguments.runs]] if arguments.runs else []), *arguments.group]}
    groups: dict[str, list[Curve]] = {}
    for name, runs in named.items():
        groups[name] = [read_curve(Path(run), arguments.metric) for run in runs]
        for run, curve in zip(runs, groups[name], strict=True):
            if not curve:
                print(f"no {arguments.metric} in {run}: was runner.val_check_interval set?", file=sys.stderr)
                return 2
            env_steps, value = curve[-1]
            print(f"{name} {run}: {value:.3f} after {env_steps:,} env steps; best {max(v for _, v in curve):.3f}")
    draw(groups, arguments.metric.removeprefix("eval/"), arguments.title, arguments.out, arguments.target)
    print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
