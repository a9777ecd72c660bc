"""What rollouts beside training are worth: synchronous runs and asynchronous ones, in turn.

    python benchmarks/async_bench.py [--config embodiment/tabletop_ppo_vla] [--staleness 0 1 2] [--repeats 5]
    python benchmarks/async_bench.py --wait-ms 150      # a simulator that waits so long per chunk, as one on a GPU does
    python benchmarks/async_bench.py --config math/math_arithmetic_async_grpo

Each contestant in turn launches workers and trains `--steps` steps, of which the first two are left out. What can be
hoped for comes from the synchronous run: the longer of its rollouts and the rest of its step, instead of their sum.
Where both need the same cores there is nothing to overlap; with `--wait-ms` there is, and the target is 90% of what can
be hoped for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from typing import Any

from common import Comparison, Report, median, print_table, say
from session import LanguageSession, Session, logged_steps, undisturbed

from rlinf_lite.config import Config, load_config
from rlinf_lite.scheduler import Cluster
from rlinf_lite.workers import EnvWorker
from rlinf_lite.workers.layout import Layout

TARGET = 0.9
RATES = {"env steps/s": "perf/env_steps_per_s", "tokens/s": "perf/tokens_per_s"}
ALL_STEPS_ALIKE = ["runner.timeline=false", "algorithm.critic_warmup_steps=0"]


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
            name: load_config(args.config, [*undisturbed(scratch), *ALL_STEPS_ALIKE, *args.overrides, *more])
            for name, more in contestants.items()
        }
        first, is_language = configs["sync"].cluster, configs["sync"].runner.task_type == "reasoning"
        unit = "tokens/s" if is_language else "env steps/s"
        cluster = stack.enter_context(Cluster(first.num_nodes, first.num_gpus_per_node, first.accelerator))
        env = (WaitingEnvWorker, args.wait_ms / 1000) if args.wait_ms else (EnvWorker,)

        def session_of(cfg: Any) -> Session | LanguageSession:
            return LanguageSession(cluster, cfg) if is_language else Session(cluster, cfg, env)

        for repeat in range(args.repeats):
            for name, cfg in configs.items():
                with session_of(cfg) as session:
                    for what, value in train(session.new_runner(), args.steps).items():
                        report.measurements.setdefault(f"{name}: {what}", []).append(value)
            rates = (f"{name} {report.measurements[f'{name}: {unit}'][-1]:,.0f}" for name in configs)
            say(f"  {repeat + 1}/{args.repeats}: {unit}: {', '.join(rates)}")

    figures = {name: median(values) for name, values in report.measurements.items()}
    kinds = [name.partition(": ")[2] for name in figures if name.startswith("sync: ")]
    rows = [[kind, *(f"{figures[f'{name}: {kind}']:.4g}" for name in contestants)] for kind in kinds]
    print_table(args.config, ["median", *contestants], rows)
    rollouts, others = figures["sync: rollouts, s"], figures["sync: step, s"] - figures["sync: rollouts, s"]
    hoped = figures[f"sync: {unit}"] * figures["sync: step, s"] / max(rollouts, others)
    for bound in args.staleness:
        ours = figures[f"staleness {bound}: {unit}"]
        name, against = f"staleness {bound}", ("the longer of both, of sync", hoped)
        if not args.wait_ms or bound == 0:
            against = ("sync", figures[f"sync: {unit}"])
        target = TARGET if args.wait_ms and bound else 0.0
        ratio = ours / against[1]
        report.comparisons.append(Comparison(name, ours, *against, unit, ratio, target, at_least=True))
    report.write()


def train(runner: Any, num_steps: int) -> dict[str, float]:
    """Medians over the steps but the first two."""
    runner.total_steps = num_steps
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        runner.run()
    steps = logged_steps(runner)[2:]
    unit, rate = next((unit, rate) for unit, rate in RATES.items() if rate in steps[0])
    played = sum(line[rate] * line["time/step"] for line in steps)
    idle = [name for name in ("env", "rollout", "actor") if f"perf/{name}_idle_frac" in steps[0]]
    return {
        unit: played / sum(line["time/step"] for line in steps),
        "step, s": median([line["time/step"] for line in steps]),
        "rollouts, s": median([line["time/generate_rollouts"] for line in steps]),
        "training, s": median([line["time/training"] for line in steps]),
        **{f"{name} idle": median([line[f"perf/{name}_idle_frac"] for line in steps]) for name in idle},
    }


if __name__ == "__main__":
    main()
