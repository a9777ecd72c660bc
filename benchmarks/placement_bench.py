"""What `cluster.component_placement: auto` chooses, against placements that a person would write: seconds of a step.

    python benchmarks/placement_bench.py [--config embodiment/tabletop_ppo_vla] [--repeats 3]

A run searches first, as a user's would. Then its choice and the placements by hand are launched in turn, `--repeats`
times over, and train `--steps` steps each, of which the first two are left out; what several have in common is launched
once. The target: the best by hand is at most a tenth faster. They are meant for one slot: a machine of two cores.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from async_bench import ALL_STEPS_ALIKE, train
from common import Comparison, Report, median, say
from session import LanguageSession, Session, undisturbed

from rlinf_lite.config import Config, ReasoningConfig, load_config
from rlinf_lite.config.names import fused_roles
from rlinf_lite.runners.placed import CHOICE
from rlinf_lite.scheduler import Cluster

TARGET = 1.1
CHOSEN = "auto"
SEARCH_STEPS = 20


def placed(placement: str, *overrides: str) -> list[str]:
    """Overrides."""
    return [f"cluster.component_placement={placement}", *overrides]


ROBOTS = {
    "as shipped": [],
    "a process each, in turn": placed("{env: 0, rollout: 0, actor: 0}", "rollout.pipeline_stage_num=1"),
    "a process each, 2 stages": placed("{env: 0, rollout: 0, actor: 0}", "rollout.pipeline_stage_num=2"),
    "actor and policy in a process": placed("{env: 0, rollout: 0, actor: 0}", "cluster.fuse='actor,rollout'"),
    "2 env, in turn": placed("{env: '0:0-1', rollout: 0, actor: 0}", "rollout.pipeline_stage_num=1"),
    "2 env, 2 rollout, in turn": placed("{env: '0:0-1', rollout: '0:0-1', actor: 0}", "rollout.pipeline_stage_num=1"),
}
TOGETHER = "{actor: 0, rollout: 0, reference: 0, critic: 0, reward: 0}"
LANGUAGE = {
    "as shipped": [],
    "a process for all": placed(TOGETHER, "cluster.fuse='actor,rollout,reference,critic'"),
    "a process each": placed(TOGETHER, "cluster.fuse=null"),
    "2 rollout": placed("{actor: 0, rollout: '0:0-1', reference: 0, critic: 0, reward: 0}", "cluster.fuse=null"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="embodiment/tabletop_ppo_vla")
    parser.add_argument("--steps", type=int, default=7, help="runner steps of each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    report = Report(f"placement_{args.config.rpartition('/')[2]}", vars(args))
    with tempfile.TemporaryDirectory() as scratch:
        usual = [*undisturbed(scratch), *ALL_STEPS_ALIKE]
        is_language = load_config(args.config).runner.task_type == "reasoning"
        contestants = {CHOSEN: search(args.config, usual, Path(scratch))}
        if is_language:  # all from where the search ended, and not each from supervised training of its own
            start = max(Path(scratch).glob("*/checkpoints/step_*"))
            usual += ["sft.num_steps=0", f"actor.checkpoint_load_path={start}"]
        contestants |= LANGUAGE if is_language else ROBOTS
        report.settings["chosen"] = contestants[CHOSEN]
        configs = {name: load_config(args.config, [*usual, *more]) for name, more in contestants.items()}
        names = {what(cfg): name for name, cfg in reversed(configs.items())}  # the first of those that are the same
        report.settings["the same as"] = {name: names[what(cfg)] for name, cfg in configs.items()}
        configs = {name: cfg for name, cfg in configs.items() if names[what(cfg)] == name}
        first = configs[CHOSEN].cluster
        with Cluster(first.num_nodes, first.num_gpus_per_node, first.accelerator) as cluster:
            for repeat in range(args.repeats):
                for name, cfg in configs.items():
                    with (LanguageSession if is_language else Session)(cluster, cfg) as session:
                        took_s = train(session.new_runner(), args.steps)["step, s"]
                        report.measurements.setdefault(name, []).append(took_s)
                steps = (f"{name} {took[-1]:.3g} s" for name, took in report.measurements.items())
                say(f"  {repeat + 1}/{args.repeats}: {', '.join(steps)}")
    figures = {name: median(values) for name, values in report.measurements.items()}
    ours = figures.pop(CHOSEN)
    for name, by_hand in sorted(figures.items(), key=lambda found: found[1]):
        report.comparisons.append(Comparison(CHOSEN, ours, name, by_hand, "s a step", ours / by_hand, TARGET, False))
    report.write()


def what(cfg: Config | ReasoningConfig) -> str:
    """All that placements differ in."""
    where = {role: str(slots) for role, slots in cfg.cluster.component_placement.items()}
    return json.dumps([where, fused_roles(cfg), cfg.rollout.pipeline_stage_num], sort_keys=True)


def search(config: str, usual: list[str], scratch: Path) -> list[str]:
    """Overrides with the placement that a run chooses."""
    settings = [*usual, f"runner.max_steps={SEARCH_STEPS}", "runner.run_name=search"]
    command = [sys.executable, "-m", "rlinf_lite.cli", "train", config.rpartition("/")[2], *settings]
    subprocess.run([*command, "cluster.component_placement=auto"], check=True)
    found = json.loads(next(scratch.rglob(CHOICE)).read_text())
    best = next(one for one in found if one["outcome"] == "kept")
    return shlex.split(best["overrides"])


if __name__ == "__main__":
    main()
