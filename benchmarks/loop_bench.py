"""The whole loop on Tabletop: env steps/s of `tabletop_ppo_vla`, and the times of the parts of a step.

    python benchmarks/loop_bench.py [--steps 12] [--repeats 5] [--config embodiment/tabletop_ppo_vla] [key=value ...]
    python benchmarks/loop_bench.py --busy 1    # each repeat twice, the second time with a busy process running

Each repeat trains some steps with the real workers, without evaluation and checkpoints; figures are medians over its
steps. The targets: 1,200 env steps/s on two cores, and 60% of that with one busy process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile

from common import Comparison, Report, busy_processes, median, print_table, say
from session import logged_steps, session, undisturbed

from rlinf_lite.config import load_config

TARGET, BUSY_TARGET = 1_200, 0.6
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
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config; give them first")
    parser.add_argument("--config", default="embodiment/tabletop_ppo_vla")
    parser.add_argument("--steps", type=int, default=12, help="runner steps of each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, help="number of busy processes during every second repeat")
    args = parser.parse_intermixed_args()
    report = Report("loop", vars(args))
    with tempfile.TemporaryDirectory() as scratch:
        cfg = load_config(args.config, [*undisturbed(scratch), *args.overrides])
        with session(cfg) as runner:
            runner.total_steps = 2  # the first steps allocate and map memory, and train only the value head
            for repeat in range(args.repeats + 1):
                for busy in sorted({0, args.busy}):
                    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), busy_processes(busy):
                        runner.run()
                    runner.total_steps += args.steps
                    if repeat == 0:
                        continue
                    steps = logged_steps(runner)[-args.steps :]
                    beside = f", beside {busy} busy" if busy else ""
                    for key, name in SPLIT.items():
                        figures = report.measurements.setdefault(f"{name}{beside}", [])
                        figures.append(median([step[key] for step in steps]))
                    rate = report.measurements[f"env steps/s{beside}"][-1]
                    say(f"  {repeat}/{args.repeats}: {rate:,.0f} env steps/s{beside}")

    print_table(args.config, ["median", ""], [[name, f"{median(v):.4g}"] for name, v in report.measurements.items()])
    rate = median(report.measurements["env steps/s"])
    what = "Tabletop, end to end"
    report.comparisons.append(
        Comparison(what, rate, "needed", TARGET, "env steps/s", rate / TARGET, 1.0, at_least=True)
    )
    if args.busy:
        beside = median(report.measurements[f"env steps/s, beside {args.busy} busy"])
        what = f"the same, beside {args.busy} busy"
        report.comparisons.append(
            Comparison(what, beside, "alone", rate, "env steps/s", beside / rate, BUSY_TARGET, at_least=True)
        )
    report.write()


if __name__ == "__main__":
    main()
