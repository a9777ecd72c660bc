"""Train a language model on problems with known answers.

python examples/math/train_math.py --config-name math_arithmetic_grpo actor.optim.lr=1e-4
python examples/math/train_math.py --config-name gsm8k_grpo_qwen2_5_0_5b rollout.model_dir=<dir> --dry-run
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rlinf_lite.cli import parse_cli
from rlinf_lite.cli.train import run_to_its_end
from rlinf_lite.config import ReasoningConfig
from rlinf_lite.script import run_script

if TYPE_CHECKING:
    from rlinf_lite.runners import RunResult


def main() -> int:
    about = "Train a language model by reinforcement learning on problems with known answers."
    cfg = parse_cli(sys.argv[1:], default_config="math/math_arithmetic_grpo", description=about, task_type="reasoning")
    return run_to_its_end(train, cfg)


def train(cfg: ReasoningConfig) -> RunResult:
    from rlinf_lite.control import supervise
    from rlinf_lite.data.problems import open_problems
    from rlinf_lite.preview.placements import check_room
    from rlinf_lite.runners import AsyncReasoningRunner, ReasoningRunner, check_rewards, claim_run, run_placed
    from rlinf_lite.scheduler import Cluster, HybridComponentPlacement
    from rlinf_lite.workers.reasoning import launch_roles

    trials = check_room(cfg)
    with claim_run(cfg) as claim:
        problems = open_problems(cfg)
        check_rewards(cfg, problems)
        with Cluster.from_config(cfg.cluster) as cluster, supervise(cfg, cluster) as supervisor:

            def run(cfg: ReasoningConfig, until: int | None = None) -> RunResult:
                placement = HybridComponentPlacement(cfg)
                roles = launch_roles(cfg, cluster, placement)  # actor, rollout, reward; reference, critic where needed
                print(placement.describe(list(roles)))
                runner_class = AsyncReasoningRunner if cfg.runner.mode == "async" else ReasoningRunner
                runner = runner_class(cfg, problems, **roles, supervisor=supervisor, claim=claim)
                runner.init_workers()
                return runner.run(until)

            result = run_placed(cfg, claim, supervisor, run, trials)  # runs, where the config says on which slots
        print(result.describe())
    return result


if __name__ == "__main__":
    sys.exit(run_script(main))
