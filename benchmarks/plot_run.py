"""Draw the learning curve of one or more runs: each seed thin, their mean bold, over env steps.

python benchmarks/plot_run.py results/<run> [results/<run of another seed> ...] --out assets/pushcube_ppo.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

COLOUR = "#1f5fa8"
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


def draw(curves: list[Curve], mean: Curve, metric: str, title: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.8), dpi=150)
    for curve in curves:
        axes.plot(*_points(curve), color=COLOUR, linewidth=1.0, alpha=0.45)
    axes.plot(*_points(mean), color=COLOUR, linewidth=2.6)
    axes.plot([], [], color=COLOUR, linewidth=1.0, alpha=0.45, label="one seed")
    axes.plot([], [], color=COLOUR, linewidth=2.6, label=f"mean of {len(curves)}")
    if "success" in metric:
        axes.set_ylim(-0.02, 1.02)
        axes.axhline(0.95, color="0.6", linewidth=0.8, linestyle=(0, (4, 4)))
        axes.annotate("0.95", (0.995, 0.945), xycoords=("axes fraction", "data"), ha="right", va="top", color="0.45")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g} k" if value else "0")
    axes.set_xlabel("env steps")
    axes.set_ylabel(metric.removeprefix("eval/"))
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    steps = sorted(curve)
    return steps, [curve[step] for step in steps]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, one per seed")
    parser.add_argument("--out", type=Path, default=Path("assets/pushcube_ppo.png"), help="default: %(default)s")
    parser.add_argument("--metric", default="eval/success_once", help="default: %(default)s")
    parser.add_argument("--title", default="PushCube-v1 from state, PPO: 100 seeded greedy episodes per point")
    arguments = parser.parse_args()

    curves = [read_curve(run, arguments.metric) for run in arguments.runs]
    empty = [str(run) for run, curve in zip(arguments.runs, curves, strict=True) if not curve]
    if empty:
        print(f"no {arguments.metric} in {', '.join(empty)}: was runner.val_check_interval set?", file=sys.stderr)
        return 2
    for run, curve in zip(arguments.runs, curves, strict=True):
        last = max(curve)
        print(f"{run.name}: {curve[last]:.3f} after {last:,} env steps; best {max(curve.values()):.3f}")
    draw(curves, mean_curve(curves), arguments.metric, arguments.title, arguments.out)
    print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
