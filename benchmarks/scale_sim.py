"""Where a run of 1 to 64 nodes becomes limited: a step's time in closed form, from costs that were measured here.

    python benchmarks/scale_sim.py --calibrate     # measures costs, checks the model, writes results/scale_sim.json
    python benchmarks/scale_sim.py --gbit 100      # a table for 1 to 64 nodes, from these costs, there as well

A step is: weights sent, T decisions of environments and policy, an update. Workers take as long as with one node (weak
scaling: every node brings its environments), and around them come, one after the other,
- the driver: seven group calls a step and worker, `call_s` each, one process's time;
- messages: `message_s` of processor time each on both sides; two per decision and worker on the critical path, all of a
  node's workers on its cores;
- the network: the bytes of `preview.traffic` at the rate of the busiest node, and there and back once per decision
  where env and rollout are apart; two stages hide that behind each other, as far as they compute for long enough.

Left out: stragglers (episodes of different length, slow nodes), the switch (every node has its rate at the same time),
collectives that overlap with computing, evaluations, checkpoints, failures. Costs of computing are arguments,
whose defaults are assumed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from common import RESULTS, Comparison, Report, median, print_table, say, timed
from pipeline_bench import fixed_time_config
from session import Session

from rlinf_lite.config import Config
from rlinf_lite.preview.traffic import Traffic
from rlinf_lite.scheduler import Cluster, Worker

ENVS_PER_WORKER = 16
CALIBRATED_ENV_S, CALIBRATED_POLICY_S = 0.02, 0.02
CHECKED = (1, 2, 4, 8)
CALLS = 7  # of a step: weights of both sides, env, rollout, three of the actor
NUM_NODES = (1, 2, 4, 8, 16, 32, 64)
TRAINS = ("LoRA, rank 32", "all weights")


@dataclass(frozen=True)
class Costs:
    """What was measured, in seconds."""

    call_s: float
    """Of the driver, for one worker of a group call."""
    message_s: float
    """Processor time of a message, encoding and answering included, on both sides together."""


@dataclass(frozen=True)
class Load:
    """A step of one node, in seconds."""

    decisions: int
    env_s: float
    """One decision in all environments of a worker."""
    policy_s: float
    update_s: float
    workers: int
    """Env workers of the node, with a rollout worker and an actor each."""
    cores: int
    stages: int = 1


def step_parts(
    load: Load, costs: Costs, nodes_per_role: int, sent: Traffic, rate_bytes: float, delay_s: float
) -> dict[str, float]:
    """Seconds of a step by what they are spent on. `delay_s`: of the network, one way."""
    compute_s = load.env_s + load.policy_s if load.stages == 1 else max(load.env_s, load.policy_s)
    # a worker's own two messages are in its way; those of others only as far as the cores are busy with them
    own_s = compute_s + 2 * costs.message_s
    busy_s = 2 * costs.message_s * load.stages * load.workers / load.cores
    rollout_s = load.decisions * max(own_s, busy_s)
    crosses = sum(sent.messages.values()) > 0 and sent.total("actions") > 0
    of_decisions = (sent.busiest("observations", "actions")) / rate_bytes
    trip_s = 2 * delay_s * load.decisions * crosses
    # several stages: messages of one travel while others are computed, as far as these take longer than its own turns
    slack_s = load.decisions * (compute_s - (load.env_s + load.policy_s) / load.stages)
    return {
        "computing": load.decisions * compute_s + load.update_s,
        "messages": rollout_s - load.decisions * compute_s,
        "driver": CALLS * load.workers * nodes_per_role * costs.call_s,
        "network": max(0.0, trip_s + of_decisions - slack_s)
        + sent.busiest("trajectories", "control") / rate_bytes
        + sent.busiest("weights") / rate_bytes
        + sent.busiest("gradients") / rate_bytes,
    }


class Idle(Worker):
    def nothing(self) -> None:
        pass


def config(workers: int, decisions: int, scratch: str) -> Config:
    """So many pairs of env and rollout workers that wait for a fixed time, and an actor."""
    rows = ENVS_PER_WORKER
    base = fixed_time_config(1, CALIBRATED_ENV_S / rows, CALIBRATED_POLICY_S / rows, decisions, scratch)
    line = f"0:0-{workers - 1}"
    return base.model_copy(
        update={
            "env": base.env.model_copy(
                update={"train": base.env.train.model_copy(update={"num_envs": rows * workers})}
            ),
            "cluster": base.cluster.model_copy(
                update={"component_placement": {"env": line, "rollout": line, "actor": "0"}}
            ),
        }
    )


def measure_call(cluster: Cluster, repeats: int) -> float:
    """Of one more worker in a group call that does nothing."""
    found = {}
    for workers in (1, 8):
        group = Idle.create_group().launch(cluster, f"0:0-{workers - 1}", name=f"idle{workers}")
        group.nothing().wait()
        found[workers] = median([timed(lambda group=group: group.nothing().wait()) for _ in range(20 * repeats)])
        group.shutdown()
    return (found[8] - found[1]) / 7


def measure_rollouts(cluster: Cluster, workers: int, decisions: int, repeats: int) -> list[float]:
    """Seconds of rollout phases of so many pairs of workers."""
    with tempfile.TemporaryDirectory() as scratch, Session(cluster, config(workers, decisions, scratch)) as session:
        runner = session.new_runner()
        runner.update_rollout_weights()
        runner.generate_rollouts(0)
        return [timed(lambda step=step: runner.generate_rollouts(step)) for step in range(1, repeats + 1)]


def calibrate(decisions: int, repeats: int) -> None:
    cores = len(os.sched_getaffinity(0))
    report = Report("scale_sim", {"decisions": decisions, "repeats": repeats, "cores": cores})
    with Cluster(num_gpus_per_node=1, accelerator="cpu", log_to_driver=False) as cluster:
        call_s = measure_call(cluster, repeats)
        measured = {}
        for workers in CHECKED:
            report.measurements[f"{workers} workers, s"] = found = measure_rollouts(
                cluster, workers, decisions, repeats
            )
            measured[workers] = median(found)
            say(f"{workers} workers: {measured[workers]:.3f} s")
    waiting_s = CALIBRATED_ENV_S + CALIBRATED_POLICY_S
    message_s = (measured[1] / decisions - waiting_s) / 2  # of one pair of workers; the others are predicted
    costs = Costs(call_s, message_s)
    for workers in CHECKED:
        load = Load(decisions, CALIBRATED_ENV_S, CALIBRATED_POLICY_S, 0.0, workers, cores)
        parts = step_parts(load, costs, 1, Traffic(), 1.0, 0.0)
        # of the seven calls, three are part of the phase that was timed
        predicted = parts["computing"] + parts["messages"] + parts["driver"] * 3 / CALLS
        error = abs(predicted / measured[workers] - 1)
        report.comparisons.append(
            Comparison(f"{workers} workers", predicted, "measured", measured[workers], "s", error, 0.2, at_least=False)
        )
    report.settings["costs"] = asdict(costs)
    report.write()


def simulate(load: Load, costs: Costs, method: str, gbit: float, delay_s: float) -> list[list[str]]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
    from make_memory_tables import ENVS_PER_NODE, LAYOUTS, sent  # the run of the table in docs/placement.md

    rows = []
    for layout in LAYOUTS:
        share = 1 if layout == next(iter(LAYOUTS)) else 2  # a role has all nodes, or half of them and twice the work
        times = {name: share * getattr(load, name) for name in ("env_s", "policy_s", "update_s")}
        for num_nodes in NUM_NODES[share - 1 :]:
            found = sent(method, layout, num_nodes)
            of_role = replace(load, **times)
            parts = step_parts(of_role, costs, num_nodes // share, found, gbit * 1e9 / 8, delay_s)
            step_s, most = sum(parts.values()), max(parts, key=parts.__getitem__)
            rate = ENVS_PER_NODE * num_nodes * load.decisions / step_s
            cells = [f"{seconds:.2f}" for seconds in (*parts.values(), step_s)]
            rows.append([layout, str(num_nodes), *cells, f"{rate:,.0f}", most])
    return rows


def _count(text: str) -> int:
    if int(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return int(text)


def _positive(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return float(text)


def _not_negative(text: str) -> float:
    return 0.0 if float(text) == 0 else _positive(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--calibrate", action="store_true", help="measure the costs, and check the model against real runs"
    )
    parser.add_argument("--decisions", type=_count, default=16)
    parser.add_argument("--repeats", type=_count, default=5)
    parser.add_argument("--gbit", type=_positive, default=100.0, help="of each node's network, Gbit/s")
    parser.add_argument("--delay-ms", type=_not_negative, default=0.1, help="one way")
    parser.add_argument(
        "--env-s", type=_positive, default=0.4, help="a chunk of actions in the environments of a worker"
    )
    parser.add_argument("--policy-s", type=_positive, default=0.3, help="the policy's answer for them")
    parser.add_argument("--update-s", type=_not_negative, default=30.0)
    parser.add_argument("--stages", type=_count, default=1)
    parser.add_argument("--trains", choices=TRAINS, default=TRAINS[0], help="of a 7B policy")
    args = parser.parse_args()
    path = RESULTS / "scale_sim.json"
    if args.calibrate:
        calibrate(args.decisions, args.repeats)
    content = json.loads(path.read_text())
    costs = Costs(**content["settings"]["costs"])
    load = Load(args.decisions, args.env_s, args.policy_s, args.update_s, workers=8, cores=64, stages=args.stages)
    title = f"7B, {args.trains}, 8 GPUs and 128 environments per node, {args.gbit:g} Gbit/s; seconds of a step"
    columns = ["slots", "nodes", "computing", "messages", "driver", "network", "step", "decisions/s", "most"]
    rows = simulate(load, costs, args.trains, args.gbit, args.delay_ms / 1e3)
    print_table(title, columns, rows)
    table = {"load": asdict(load), "delay_ms": args.delay_ms, "columns": columns, "rows": rows}
    content.setdefault("simulated", {})[title] = table
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
