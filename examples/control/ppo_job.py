"""PPO of a language model as a job: the run of train_math.py, built by RLJobBuilder. Its roles are in ppo_roles.py.

python examples/control/ppo_job.py runner.max_steps=2 sft.num_steps=20
python examples/control/ppo_job.py

Policy, critic and rollout are two workers each on two virtual devices; with GPUs, change DEVICES and `device_type`.
While it runs, `rlinf-lite job status ppo` in another terminal shows the ids of their processes: kill one.
"""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path
from typing import cast

from rlinf_lite.config import ConfigError, ReasoningConfig, load_config
from rlinf_lite.config.loading import as_override
from rlinf_lite.config.names import roles_of
from rlinf_lite.jobs import RLJobBuilder
from rlinf_lite.scheduler import SchedulerError

CONFIG = "math/math_arithmetic_ppo"
DEVICES = 2


def main() -> int:
    name = f"ppo-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    directory = Path("results").absolute() / "jobs" / name
    try:
        # each role of a job has its own processes
        settings = ["cluster.fuse=null", as_override("runner.logger.log_path", str(directory))]
        cfg = cast(ReasoningConfig, load_config(CONFIG, [*settings, *sys.argv[1:]]))

        builder = RLJobBuilder().device_per_node(DEVICES).device_type("CPU").config(cfg.model_dump(mode="json"))
        builder.trainer("ppo_roles", "Trainer")  # Ray's workers, too, import from this script's directory
        for role in roles_of(cfg):  # actor, rollout, critic, reward; a reference if there is a KL
            builder.role(role, "ppo_roles", role.title()).total(1 if role == "reward" else DEVICES).per_node(DEVICES)
        job = builder.with_collocation_all().build()

        handle = job.submit(name, directory=directory, control=cfg.control)
        try:
            print(f"{name}: {', '.join(roles_of(cfg))}; its output: rlinf-lite job logs {name}", flush=True)
            context = handle.wait()  # raises if the job failed
        finally:
            handle.stop()  # for Ctrl-C; does nothing if the job has ended
    except (ConfigError, SchedulerError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    for failover in context.failovers:
        who, seconds = ", ".join(failover.failed), failover.seconds or 0.0
        print(f"{who} {failover.kind}: {failover.level} started again in {seconds:.1f} s")
    print(f"{context.stage} after step {context.step} of {context.total_steps}: {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
