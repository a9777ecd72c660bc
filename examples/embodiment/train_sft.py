"""Collect demonstrations and train a policy on them. Reinforcement learning can start from the checkpoint.

python examples/embodiment/train_sft.py --config-name tabletop_sft_vla data.num_episodes=2000
python examples/embodiment/train_sft.py --config-name tabletop_sft_vla data.source=folder data.demos_dir=<folder>
python examples/embodiment/train_sft.py --config-name tabletop_sft_vla --dry-run
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
    about = "Collect demonstrations and train a policy on them."
    cfg = parse_cli(sys.argv[1:], default_config="embodiment/tabletop_sft_vla", description=about, task_type="sft")
    return run_to_its_end(train, cfg)


def train(cfg: Config) -> RunResult:
    from rlinf_lite.data.demonstrations import check_demonstrations
    from rlinf_lite.runners import SFTRunner, claim_run
    from rlinf_lite.scheduler import Cluster, HybridComponentPlacement
    from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker, MultiStepRolloutWorker

    check_demonstrations(cfg)
    with claim_run(cfg) as claim, Cluster.from_config(cfg.cluster) as cluster:
        placement = HybridComponentPlacement(cfg)
        print(placement.describe())
        groups = cluster.launch(
            placement,
            actor=EmbodiedFSDPActor.create_group(cfg),
            rollout=MultiStepRolloutWorker.create_group(cfg),
            env=EnvWorker.create_group(cfg),
        )
        runner = SFTRunner(cfg=cfg, **groups, supervisor=None, claim=claim)
        runner.init_workers()
        result = runner.run()
        print(result.describe())
    return result


if __name__ == "__main__":
    sys.exit(run_script(main))
