"""Measure a policy on the evaluation episodes of its run or of a config: `rlinf-lite eval`, on one page.

python examples/embodiment/eval_embodied_agent.py results/<run>
python examples/embodiment/eval_embodied_agent.py --config-name tabletop_ppo_vla rollout.model_dir=assets/tabletop_vla
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import rlinf_lite
from rlinf_lite.cli.eval import eval
from rlinf_lite.config import Config, ReasoningConfig
from rlinf_lite.script import run_script

if TYPE_CHECKING:
    from rlinf_lite.metrics import EvalSummary


def main() -> int:
    return eval(sys.argv[1:], evaluate)


def evaluate(cfg: Config | ReasoningConfig, films: Path | None = None) -> EvalSummary:
    if isinstance(cfg, ReasoningConfig):  # a language model, which has no simulator
        return rlinf_lite.evaluate(cfg)
    from rlinf_lite.runners import EmbodiedRunner
    from rlinf_lite.scheduler import Cluster, HybridComponentPlacement
    from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker, MultiStepRolloutWorker

    with Cluster.from_config(cfg.cluster) as cluster:
        placement = HybridComponentPlacement(cfg)
        groups = cluster.launch(
            placement,
            actor=EmbodiedFSDPActor.create_group(cfg),
            rollout=MultiStepRolloutWorker.create_group(cfg),
            env=EnvWorker.create_group(cfg),
        )
        runner = EmbodiedRunner(cfg=cfg, **groups, supervisor=None, claim=None)
        runner.init_workers()
        return runner.evaluate(films)


if __name__ == "__main__":
    sys.exit(run_script(main))
