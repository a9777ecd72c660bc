"""The whole loop on Tabletop: env steps/s of `tabletop_ppo_vla`, and where the time of a step goes.

    python benchmarks/loop_bench.py [--steps 12] [--repeats 5] [--config embodiment/tabletop_ppo_vla] [key=value ...]

Each repeat is some steps of training with the real workers, without evaluation and checkpoints; figures are medians
over its steps. The target is one number: 1,200 env steps/s on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile

from common import Comparison, Report, median, print_table, say
from session import Session, logged_steps, undisturbed

from rlinf_lite.config import load_config
from rlinf_lite.scheduler import Cluster

TARGET = 1_200
SPLIT = {
    "perf/env_steps_per_s": "env steps/s",
    "time/step": "step, s",
    "time/generate_rollouts": "env and rollout, s",
    "time/training": "training, s",
    "time/advantages": "advantages, s",
    "time/sync_weights": "weights to rollout, s",
    "perf/overlap_frac": "overlap of env and rollout",
    "perf/env_idle_frac": "env idle, of its phase",
    "perf/rollout_idle_frac": "rollout idle, of its phase",
    "perf/actor_idle_frac": "actor idle, of a step",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="first: of the config")
    parser.add_argument("--config", default="embodiment/tabletop_ppo_vla")
    parser.add_argument("--steps", type=int, default=12, help="runner steps of each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_intermixed_args()
    report = Report("loop", vars(args))
    with tempfile.TemporaryDirectory() as scratch:
        cfg = load_config(args.config, [*undisturbed(scratch), *args.overrides])
        with (
            Cluster(cfg.cluster.num_nodes, cfg.cluster.num_gpus_per_node, cfg.cluster.accelerator) as cluster,
            Session(cluster, cfg) as session,
        ):
            runner = session.new_runner()
            root = runner.run_dir
            runner.total_steps = 2  # the first steps allocate, map and only train the value head
            for repeat in range(args.repeats + 1):
                runner.run_dir = root.with_name(f"{root.name}-{repeat}")
                with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                    runner.run()
                if repeat > 0:
                    steps = logged_steps(runner)[-args.steps :]
                    for key, name in SPLIT.items():
                        report.measurements.setdefault(name, []).append(median([step[key] for step in steps]))
                    say(f"  {repeat}/{args.repeats}: {report.measurements['env steps/s'][-1]:,.0f} env steps/s")
                runner.total_steps += args.steps

    print_table(args.config, ["median", ""], [[name, f"{median(v):.4g}"] for name, v in report.measurements.items()])
    rate = median(report.measurements["env steps/s"])
    what = "Tabletop, end to end"
    report.comparisons.append(
        Comparison(what, rate, "needed", TARGET, "env steps/s", rate / TARGET, 1.0, at_least=True)
    )
    report.write()


if __name__ == "__main__":
    main()
