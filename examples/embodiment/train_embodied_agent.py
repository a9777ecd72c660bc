"""Train a policy in a simulator.

python examples/embodiment/train_embodied_agent.py --config-name tabletop_ppo_vla actor.optim.lr=1e-4
python examples/embodiment/train_embodied_agent.py --config-name tabletop_ppo_vla --dry-run
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rlinf_lite.cli import parse_cli
from rlinf_lite.cli.train import run_to_its_end
from rlinf_lite.config import Config
from rlinf_lite.script import run_script

if TYPE_CHECKING:
    from rlinf_lite.runners import RunResult


def main() -> int:
    about = "Train a policy in a simulator by reinforcement learning."
    cfg = parse_cli(sys.argv[1:], default_config="embodiment/tabletop_ppo_vla", description=about)
    return run_to_its_end(train, cfg)


def train(cfg: Config) -> RunResult:
    from rlinf_lite.control import supervise
    from rlinf_lite.preview.placements import check_room
    from rlinf_lite.runners import AsyncEmbodiedRunner, EmbodiedRunner, claim_run, run_placed
    from rlinf_lite.scheduler import Cluster, HybridComponentPlacement
    from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker, MultiStepRolloutWorker

    trials = check_room(cfg)
    with (
        claim_run(cfg) as claim,
        Cluster.from_config(cfg.cluster) as cluster,
        supervise(cfg, cluster) as supervisor,
    ):

        def run(cfg: Config, until: int | None = None) -> RunResult:
            placement = HybridComponentPlacement(cfg)
            print(placement.describe())
            groups = cluster.launch(
                placement,
                actor=EmbodiedFSDPActor.create_group(cfg),
                rollout=MultiStepRolloutWorker.create_group(cfg),
                env=EnvWorker.create_group(cfg),
            )
            runner_class = AsyncEmbodiedRunner if cfg.runner.mode == "async" else EmbodiedRunner
            runner = runner_class(cfg=cfg, **groups, supervisor=supervisor, claim=claim)
            runner.init_workers()
            return runner.run(until)

        result = run_placed(cfg, claim, supervisor, run, trials)  # `run` once, unless placement is auto
        print(result.describe())
    return result


if __name__ == "__main__":
    sys.exit(run_script(main))
