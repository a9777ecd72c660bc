"""A job with user-defined roles (roles.py, in this folder), which a master keeps alive.

python examples/control/own_roles.py

Two rollout workers and an actor, on two virtual devices, find a target by policy gradient. While the job runs,
`rlinf-lite job status own_roles` in another terminal shows the ids of its processes: kill one, and see that it is
started again.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path

from rlinf_lite.jobs import RLJobBuilder
from rlinf_lite.scheduler import SchedulerError

POLL_S = 0.5


def main() -> int:
    name = f"own_roles-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    directory = Path("results").absolute() / "jobs" / name
    config = {
        "num_steps": 200,
        "num_samples": 256,
        "std": 0.3,
        "lr": 0.05,
        "seed": 1,
        "target": [1.0, -2.0],
        "simulation_s": 0.1,
        "state": str(directory / "state.json"),
    }
    builder = RLJobBuilder().node_num(1).device_per_node(2).device_type("CPU").config(config)
    builder.trainer("roles", "Trainer")  # Ray's workers, too, import from this script's directory
    builder.actor("roles", "Actor")
    builder.rollout("roles", "Rollout").total(2).per_node(2).share(1 / 2)

    directory.mkdir(parents=True)
    try:
        handle = builder.build().submit(name, directory=directory)
        try:
            seen = None
            while not (context := handle.status()).stage.is_final:
                if (context.stage, context.step) != seen:
                    seen = context.stage, context.step
                    print(f"{context.stage}: step {context.step}, {len(context.failovers)} failures so far", flush=True)
                time.sleep(POLL_S)
            context = handle.wait()  # raises if the job failed
        finally:
            handle.stop()  # for Ctrl-C; does nothing if the job has ended
    except SchedulerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1

    for failover in context.failovers:
        who, seconds = ", ".join(failover.failed), failover.seconds or 0.0
        print(f"{who} {failover.kind}: {failover.level} started again in {seconds:.1f} s")
    mean = json.loads((directory / "state.json").read_text())["mean"]
    print(f"{context.stage} after step {context.step}: mean {mean[0]:.2f}, {mean[1]:.2f}; target {config['target']}")
    print(f"events: {directory / 'events.jsonl'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
