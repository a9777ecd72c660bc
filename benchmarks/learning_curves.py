"""Success against env steps, ours and Stable-Baselines3's: training both, JSONs of the same form, and a picture.

A JSON holds `system`, `seed`, `env_steps_per_s` (training alone) and `curve`: rows of `env_steps`, `success_once` and
`success_at_end` of the greedy policy over the same seeded episodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from common import median, print_table, say
from sb3_settings import sb3_arguments

from rlinf_lite.config import load_config

OURS, SB3 = "rlinf_lite", "stable_baselines3"
Curve = list[tuple[float, float]]
"""Env steps and the metric."""

COLOURS = ("#1f5fa8", "#c8661b", "#3b8a4a", "#7a4fa0")
HERE = Path(__file__).parent


def train_both(
    config: str, overrides: Sequence[str], seeds: Sequence[int], env_steps: int, eval_every: int, directory: Path
) -> None:
    """Train both systems for every seed, one run at a time, and write a JSON of each."""
    directory.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        say(f"seed {seed}: {OURS}")
        _train_ours(config, overrides, seed, env_steps, eval_every, directory)
        say(f"seed {seed}: {SB3}")
        _train_sb3(config, overrides, seed, env_steps, eval_every, directory)


def _train_ours(
    config: str, overrides: Sequence[str], seed: int, env_steps: int, eval_every: int, directory: Path
) -> None:
    cfg = load_config(config, overrides)
    per_step = cfg.env.train.num_envs * (cfg.rollout.num_chunks or 1) * cfg.model.num_action_chunks
    name, runs = f"learning_seed{seed}", directory / "runs"
    before = set(runs.glob(f"{name}-*"))
    settings = [
        f"runner.seed={seed}",
        f"runner.run_name={name}",
        f"runner.max_steps={-(-env_steps // per_step)}",
        f"runner.val_check_interval={max(eval_every // per_step, 1)}",
        "runner.save_interval=-1",
        f"runner.logger.log_path={runs}",
    ]
    script = HERE.parent / "examples" / "embodiment" / "train_embodied_agent.py"
    subprocess.run([sys.executable, str(script), "--config-name", config, *overrides, *settings], check=True)
    (run,) = set(runs.glob(f"{name}-*")) - before
    collect_run(run, directory)


def _train_sb3(
    config: str, overrides: Sequence[str], seed: int, env_steps: int, eval_every: int, directory: Path
) -> None:
    path = directory / f"{SB3}_seed{seed}.json"
    arguments = [*sb3_arguments(load_config(config, overrides), seed), "--total-steps", str(env_steps)]
    command = [sys.executable, "-W", "ignore", str(HERE / "sb3_worker.py"), *arguments]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--eval-every", str(eval_every), "--out", str(path)], check=True, env=one_thread)
    path.write_text(json.dumps({"system": SB3, "seed": seed} | json.loads(path.read_text()), indent=1) + "\n")


def collect_run(run: Path, directory: Path) -> Path:
    """The JSON of one of our run directories."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [line["perf/env_steps_per_s"] for line in lines if "perf/env_steps_per_s" in line]
    evaluations = [json.loads(path.read_text()) for path in sorted((run / "eval").glob("step_*.json"))]
    curve = [
        {
            "env_steps": evaluation["env_steps"],
            "success_once": evaluation["total"]["success_once"],
            "success_at_end": evaluation["total"]["success_at_end"],
        }
        for evaluation in evaluations
    ]
    seed = settings["runner"]["seed"]
    content = {"system": OURS, "seed": seed, "env_steps_per_s": median(rates), "settings": settings, "curve": curve}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{OURS}_seed{seed}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def plot(directory: Path, out: Path, metric: str = "success_once") -> None:
    """A picture of the JSONs in a directory, and a table of the ends."""
    curves = read_curves(directory, metric)
    groups = {system: list(by_seed.values()) for system, by_seed in curves.items()}
    draw(groups, f"{metric}, greedy", "PushCube-v1 from state, PPO with the same settings", out)
    print_summary(curves, metric)
    say(f"written: {out}")


def draw(groups: dict[str, list[Curve]], label: str, title: str, out: Path, target: float | None = None) -> None:
    """Every seed's curve thin and each group's mean thick, over env steps; `target` as a dashed line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.8), dpi=150)
    for colour, (name, curves) in zip(COLOURS, groups.items(), strict=False):
        for curve in curves:
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=1.0, alpha=0.4)
        named = f"{name}, mean of {len(curves)} seeds" if len(curves) > 1 else f"{name}, one seed"
        axes.plot(*zip(*mean_curve(curves), strict=True), color=colour, linewidth=2.6, label=named.lstrip(", "))
    if "success" in label:
        axes.set_ylim(-0.02, 1.02)
    if target is not None:
        axes.axhline(target, color="0.6", linewidth=0.8, linestyle=(0, (4, 4)))
        place = (0.995, target - 0.005)
        axes.annotate(f"{target:g}", place, xycoords=("axes fraction", "data"), ha="right", va="top", color="0.45")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g} k" if value else "0")
    axes.set_xlabel("env steps")
    axes.set_ylabel(label)
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    plt.close(figure)


def print_summary(curves: dict[str, dict[int, Curve]], metric: str) -> None:
    """Ends, and means over the env steps that all curves cover."""
    every = [curve for by_seed in curves.values() for curve in by_seed.values()]
    first, last = max(curve[0][0] for curve in every), min(curve[-1][0] for curve in every)
    rows = [
        [system, str(seed), f"{curve[-1][0]:,}", f"{curve[-1][1]:.2f}", f"{_mean_between(curve, first, last):.2f}"]
        for system, by_seed in curves.items()
        for seed, curve in sorted(by_seed.items())
    ]
    common = f"mean from {first / 1000:.0f} k to {last / 1000:.0f} k"
    print_table(metric, ["system", "seed", "env steps", "at the end", common], rows)


def read_curves(directory: Path, metric: str) -> dict[str, dict[int, Curve]]:
    """Curves by system and seed of the JSONs in a directory. `sb3_worker.py`'s own output is read too."""
    curves: dict[str, dict[int, Curve]] = {OURS: {}, SB3: {}}
    for path in sorted(directory.glob("*.json")):
        content: dict[str, Any] = json.loads(path.read_text())
        if "curve" not in content:
            continue
        system = content.get("system", SB3)
        seed = content["seed"] if "seed" in content else content["settings"]["seed"]
        curves[system][seed] = [(row["env_steps"], row[metric]) for row in content["curve"]]
    found = {system: by_seed for system, by_seed in curves.items() if by_seed}
    if not found:
        raise FileNotFoundError(f"{directory} holds no learning curves: run ppo_vs_sb3.py --learning or --collect")
    return found


def mean_curve(curves: list[Curve]) -> Curve:
    """The mean of interpolated curves, over the env steps that all of them reach."""
    import numpy as np

    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    grid = sorted({steps for curve in curves for steps, _ in curve if first <= steps <= last})
    values = [np.interp(grid, *np.array(curve).T) for curve in curves]
    return [(steps, float(value)) for steps, value in zip(grid, np.mean(values, axis=0), strict=True)]


def _mean_between(curve: Curve, first: float, last: float) -> float:
    import numpy as np

    grid = np.linspace(first, last, 1000)
    return float(np.interp(grid, *np.array(curve).T).mean())
