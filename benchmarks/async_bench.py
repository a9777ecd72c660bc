"""What rollouts beside training are worth: synchronous runs and asynchronous ones, in turn.

    python benchmarks/async_bench.py [--config embodiment/tabletop_ppo_vla] [--staleness 0 1 2] [--repeats 5]
    python benchmarks/async_bench.py --wait-ms 150      # a simulator that waits so long per chunk, as one on a GPU does

Each contestant in turn launches workers and trains `--steps` steps, of which the first two are left out. What can be
hoped for comes from the synchronous run: the longer of its rollouts and the rest of its step, instead of their sum.
Where both need the same cores there is nothing to overlap; with `--wait-ms` there is, and the target is 90% of what can
be hoped for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from typing import Any

from common import Comparison, Report, median, print_table, say
from session import Session

from rlinf_lite.config import Config, load_config
from rlinf_lite.scheduler import Cluster
from rlinf_lite.workers import EnvWorker
from rlinf_lite.workers.layout import Layout

TARGET = 0.9


class WaitingEnv:
    """An environment whose chunks take `wait_s` longer, in which no processor is used."""

    def __init__(self, env: Any, wait_s: float) -> None:
        self._env, self._wait_s = env, wait_s

    def chunk_step(self, actions: Any) -> Any:
        time.sleep(self._wait_s)
        return self._env.chunk_step(actions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class WaitingEnvWorker(EnvWorker):
    wait_s = 0.0

    def __init__(self, cfg: Config, wait_s: float) -> None:
        super().__init__(cfg)
        self.wait_s = wait_s

    def _build_stages(self, split: Any, layout: Layout) -> Any:
        stages = super()._build_stages(split, layout)
        for stage in stages:
            stage.env = WaitingEnv(stage.env, self.wait_s)
        return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the config")
    parser.add_argument("--config", default="embodiment/tabletop_ppo_vla")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--wait-ms", type=float, default=0.0, help="that the simulator waits per chunk of a stage")
    parser.add_argument("--steps", type=int, default=8, help="runner steps of each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_intermixed_args()
    report = Report("async_waiting" if args.wait_ms else f"async_{args.config.rpartition('/')[2]}", vars(args))
    contestants = {"sync": ["runner.mode=sync"]}
    for bound in args.staleness:
        asynchronous = ["runner.mode=async", f"runner.max_staleness={bound}", "algorithm.correction.kind=decoupled"]
        contestants[f"staleness {bound}"] = asynchronous
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        configs = {
            name: load_config(args.config, [*quiet(scratch), *args.overrides, *more])
            for name, more in contestants.items()
        }
        first = configs["sync"].cluster
        cluster = stack.enter_context(Cluster(first.num_nodes, first.num_gpus_per_node, first.accelerator))
        env = (WaitingEnvWorker, args.wait_ms / 1000) if args.wait_ms else (EnvWorker,)
        for repeat in range(args.repeats):
            for name, cfg in configs.items():
                with Session(cluster, cfg, env) as session:
                    for what, value in train(session.new_runner(), args.steps).items():
                        report.measurements.setdefault(f"{name}: {what}", []).append(value)
            rates = (f"{name} {report.measurements[f'{name}: env steps/s'][-1]:,.0f}" for name in configs)
            say(f"  {repeat + 1}/{args.repeats}: env steps/s: {', '.join(rates)}")

    figures = {name: median(values) for name, values in report.measurements.items()}
    kinds = [name.partition(": ")[2] for name in figures if name.startswith("sync: ")]
    rows = [[kind, *(f"{figures[f'{name}: {kind}']:.4g}" for name in contestants)] for kind in kinds]
    print_table(args.config, ["median", *contestants], rows)
    rollouts, others = figures["sync: rollouts, s"], figures["sync: step, s"] - figures["sync: rollouts, s"]
    hoped = figures["sync: env steps/s"] * figures["sync: step, s"] / max(rollouts, others)
    for bound in args.staleness:
        ours = figures[f"staleness {bound}: env steps/s"]
        name, against = f"staleness {bound}", ("the longer of both, of sync", hoped)
        if not args.wait_ms or bound == 0:
            against = ("sync", figures["sync: env steps/s"])
        target = TARGET if args.wait_ms and bound else 0.0
        ratio = ours / against[1]
        report.comparisons.append(Comparison(name, ours, *against, "env steps/s", ratio, target, at_least=True))
    report.write()


def quiet(scratch: str) -> list[str]:
    return [
        f"runner.logger.log_path={scratch}",
        f"actor.checkpoint_save_path={scratch}",
        "runner.val_check_interval=-1",
        "runner.save_interval=-1",
        "runner.max_steps=100000",
        "runner.max_epochs=100000",
        "runner.report=false",
        "runner.timeline=false",
        "algorithm.critic_warmup_steps=0",
    ]


def train(runner: Any, num_steps: int) -> dict[str, float]:
    """Medians over the steps but the first two."""
    runner.total_steps = num_steps
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        runner.run()
    lines = [json.loads(line) for line in (runner.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line][2:]
    played = sum(line["perf/env_steps_per_s"] * line["time/step"] for line in steps)
    return {
        "env steps/s": played / sum(line["time/step"] for line in steps),
        "step, s": median([line["time/step"] for line in steps]),
        "rollouts, s": median([line["time/generate_rollouts"] for line in steps]),
        "training, s": median([line["time/training"] for line in steps]),
        "env idle": median([line["perf/env_idle_frac"] for line in steps]),
        "rollout idle": median([line["perf/rollout_idle_frac"] for line in steps]),
        "actor idle": median([line["perf/actor_idle_frac"] for line in steps]),
    }


if __name__ == "__main__":
    main()
