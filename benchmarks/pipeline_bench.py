"""Env and rollout in two stages that take turns, against the ideal speed-up (E + P) / max(E, P).

    python benchmarks/pipeline_bench.py --ratios 1:1 2:1 1:2 4:1

E is the time in which an env worker steps its environments once, P the time in which the policy answers for all of
them; half of both for a stage of half the environments. The workers, the runner and the messages are the real ones; the
environment and the policy (`fixed_time.py`) wait for a fixed time. Timed is the rollout phase, 1 and 2 stages in turn.
Held against the target is the share of the ideal speed-up over one stage. Beside it stands the share of the ideal time
T * max(E, P), which counts against us also what one stage loses.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable

from common import Comparison, Report, interleaved, median, print_table, say, timed
from session import Session

from rlinf_lite.config import Config, load_config
from rlinf_lite.scheduler import Cluster

TARGET = 0.9
NUM_ENVS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", nargs="+", default=["1:1", "2:1", "1:2", "4:1"], help="E:P")
    parser.add_argument("--total-ms", type=float, default=40.0, help="E + P")
    parser.add_argument("--decisions", type=int, default=50, help="T: decisions of a rollout phase")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    report = Report("pipeline", vars(args))
    rows = []
    with (
        Cluster(num_nodes=1, num_gpus_per_node=1, accelerator="cpu") as cluster,
        tempfile.TemporaryDirectory() as scratch,
    ):
        for ratio in args.ratios:
            env_share, policy_share = (float(part) for part in ratio.split(":"))
            unit_s = args.total_ms / 1e3 / (env_share + policy_share)
            rows.append(measure(cluster, scratch, env_share * unit_s, policy_share * unit_s, args, report))
    print_table(
        "rollout phase, s",
        ["E, P", "1 stage", "2 stages", "speed-up", "ideal", "of ideal speed-up", "of ideal time"],
        rows,
    )
    report.write()


def measure(
    cluster: Cluster, scratch: str, env_s: float, policy_s: float, args: argparse.Namespace, report: Report
) -> list[str]:
    def cfg(num_stages: int) -> Config:
        return fixed_time_config(num_stages, env_s / NUM_ENVS, policy_s / NUM_ENVS, args.decisions, scratch)

    name = f"E {env_s * 1e3:.3g} ms, P {policy_s * 1e3:.3g} ms"
    say(name)
    with Session(cluster, cfg(1)) as session:

        def phase(num_stages: int) -> Callable[[], float]:
            def run() -> float:
                runner = session.new_runner(cfg(num_stages))
                runner.update_rollout_weights()
                return timed(lambda: runner.generate_rollouts(0))

            return run

        found = interleaved({"1 stage": phase(1), "2 stages": phase(2)}, args.repeats, unit="s")
    one, two = median(found["1 stage"]), median(found["2 stages"])
    ideal = (env_s + policy_s) / max(env_s, policy_s)
    of_speed_up, of_time = one / two / ideal, args.decisions * max(env_s, policy_s) / two
    report.comparisons.append(
        Comparison(
            f"pipelining, {name}",
            one / two,
            "ideal",
            ideal,
            "x",
            of_speed_up,
            TARGET,
            at_least=True,
            note=f"of ideal time {of_time:.3f}",
        )
    )
    report.measurements |= {f"{name}, {stages}, s": values for stages, values in found.items()}
    return [
        name,
        f"{one:.3f}",
        f"{two:.3f}",
        f"{one / two:.3f}",
        f"{ideal:.3f}",
        f"{of_speed_up:.1%}",
        f"{of_time:.1%}",
    ]


def fixed_time_config(num_stages: int, env_row_s: float, policy_row_s: float, decisions: int, scratch: str) -> Config:
    return load_config(
        "embodiment/gym_pendulum_ppo_mlp",
        [
            "env.id=fixed_time:make_env",
            f"env.options={{row_s: {env_row_s}}}",
            f"env.train.num_envs={NUM_ENVS}",
            "env.train.max_episode_steps=1000000",
            "model.id=fixed_time:FixedTimePolicy",
            f"+model.options={{row_s: {policy_row_s}}}",
            "model.options.hidden_sizes=[16]",
            f"rollout.num_chunks={decisions}",
            f"rollout.pipeline_stage_num={num_stages}",
            f"actor.global_batch_size={NUM_ENVS}",
            f"actor.micro_batch_size={NUM_ENVS}",
            "cluster.component_placement={env: '0', rollout: '0', actor: '0'}",
            f"runner.logger.log_path={scratch}",
        ],
    )


if __name__ == "__main__":
    main()
