"""Draw the learning curve of one or more runs: each seed thin, their mean bold, over env steps.

python benchmarks/plot_run.py results/<run> [results/<run of another seed> ...] --out curve.png
python benchmarks/plot_run.py --group PPO results/<run> ... --group GRPO results/<run> ... --out curves.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

COLOURS = ("#1f5fa8", "#c8661b", "#3b8a4a", "#7a4fa0")
Curve = dict[int, float]  # env steps: value


def read_curve(run_dir: Path, metric: str) -> Curve:
    """`metric` of every evaluation in `metrics.jsonl`, by the env steps done until then."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    env_steps = {line["step"]: int(line["env/num_steps"]) for line in lines if "env/num_steps" in line} | {0: 0}
    return {env_steps[line["step"]]: line[metric] for line in lines if line.get(metric) is not None}


def mean_curve(curves: list[Curve]) -> Curve:
    """The mean wherever every run was evaluated."""
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {steps: sum(curve[steps] for curve in curves) / len(curves) for steps in common}


def draw(groups: dict[str, list[Curve]], metric: str, title: str, target: float | None, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.8), dpi=150)
    for colour, (name, curves) in zip(COLOURS, groups.items(), strict=False):
        for curve in curves:
            axes.plot(*_points(curve), color=colour, linewidth=1.0, alpha=0.45)
        label = f"{name} {f'mean of {len(curves)} seeds' if len(curves) > 1 else 'one seed'}".strip()
        axes.plot(*_points(mean_curve(curves)), color=colour, linewidth=2.6, label=label)
    if "success" in metric:
        axes.set_ylim(-0.02, 1.02)
    if target is not None:
        axes.axhline(target, color="0.6", linewidth=0.8, linestyle=(0, (4, 4)))
        place = (0.995, target - 0.005)
        axes.annotate(f"{target:g}", place, xycoords=("axes fraction", "data"), ha="right", va="top", color="0.45")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g} k" if value else "0")
    axes.set_xlabel("env steps")
    axes.set_ylabel(metric.removeprefix("eval/"))
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    steps = sorted(curve)
    return steps, [curve[step] for step in steps]


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
            last = max(curve)
            print(f"{name} {run}: {curve[last]:.3f} after {last:,} env steps; best {max(curve.values()):.3f}")
    draw(groups, arguments.metric, arguments.title, arguments.target, arguments.out)
    print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
