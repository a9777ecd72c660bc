"""Success against env steps for this project and Stable-Baselines3: training of both, JSON files, and a plot.

A JSON file has `system`, `seed`, `env_steps_per_s` (of training without evaluations) and `curve`: rows with
`env_steps`, and `success_once` and `success_at_end` of the greedy policy over the same seeded episodes.
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
from common import median, say
from sb3_settings import sb3_arguments

from rlinf_lite.config import load_config

OURS, SB3 = "rlinf_lite", "stable_baselines3"
Curve = list[tuple[float, float]]
"""Pairs of env steps and the metric."""

COLOURS = ("#1f5fa8", "#c8661b")
HERE = Path(__file__).parent


def train_both(
    config: str, overrides: Sequence[str], seeds: Sequence[int], env_steps: int, eval_every: int, directory: Path
) -> None:
    """Train both systems for each seed, one run at a time, and write a JSON file of each run."""
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
    """Write the JSON file of a run directory of this project; returns its path."""
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
    """Plot the JSON files of a directory over env steps: each seed thin, each system's mean thick. Prints last
    values."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.8), dpi=150)
    for colour, (name, by_seed) in zip(COLOURS, read_curves(directory, metric).items(), strict=False):
        curves = list(by_seed.values())
        for seed, curve in by_seed.items():
            say(f"{name}, seed {seed}: {metric} {curve[-1][1]:.2f} after {curve[-1][0]:,} env steps")
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=1.0, alpha=0.4)
        label = f"{name}, mean of {len(curves)} seeds"
        axes.plot(*zip(*mean_curve(curves), strict=True), color=colour, linewidth=2.6, label=label)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g} k" if value else "0")
    axes.set_xlabel("env steps")
    axes.set_ylabel(f"{metric}, greedy")
    axes.set_title("PushCube-v1 from state, PPO with the same settings", loc="left", fontsize=11)
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    plt.close(figure)
    say(f"written: {out}")


def read_curves(directory: Path, metric: str) -> dict[str, dict[int, Curve]]:
    """Curves, by system and seed, from the JSON files of a directory. Files of `sb3_worker.py` are read, too."""
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
        raise FileNotFoundError(f"{directory} holds no learning curves: run ppo_vs_sb3.py --learning")
    return found


def mean_curve(curves: list[Curve]) -> Curve:
    """The mean of the interpolated curves, over the range of env steps that all of them cover."""
    import numpy as np

    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    grid = sorted({steps for curve in curves for steps, _ in curve if first <= steps <= last})
    values = [np.interp(grid, *np.array(curve).T) for curve in curves]
    return [(steps, float(value)) for steps, value in zip(grid, np.mean(values, axis=0), strict=True)]
