"""Measure a saved policy on the fixed, seeded evaluation episodes of its run.

python examples/embodiment/eval_embodied_agent.py --checkpoint results/<run>/checkpoints/last
python examples/embodiment/eval_embodied_agent.py --checkpoint results/<run> env.eval.num_episodes=400
python examples/embodiment/eval_embodied_agent.py --checkpoint results/<run> --suite metaworld-mt10
"""

import argparse
import sys
from pathlib import Path

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.registry import PartError, suite_overrides, suites
from rlinf_lite.script import run_script


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, type=Path, help="a checkpoint or a run directory")
    parser.add_argument("--suite", metavar="NAME", help=f"a published evaluation: {', '.join(suites())}")
    parser.add_argument("--out", type=Path, help="where to write the JSON (default: <run>/eval_<checkpoint>.json)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the run's config")
    arguments = parser.parse_intermixed_args()

    from rlinf_lite.runners.checkpoints import CheckpointError, find_checkpoint, verify

    try:
        checkpoint = find_checkpoint(arguments.checkpoint)
        verify(checkpoint)
        config_file = checkpoint / "training_state" / "config.yaml"
        overrides = [f"actor.checkpoint_load_path={checkpoint}", "runner.resume=never"]
        if arguments.suite:
            overrides += suite_overrides(arguments.suite, load_config(str(config_file)).env.id)
        cfg = load_config(str(config_file), [*overrides, *arguments.overrides])
    except (CheckpointError, ConfigError, PartError) as error:
        print(error, file=sys.stderr)
        return 2

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
        summary = runner.evaluate()
    print("\n".join([summary.headline(), *summary.task_lines()]))
    suite = summary.protocol["suite"]
    if arguments.suite and suite != arguments.suite:
        print(f"settings of {arguments.suite} were changed: this is {suite or 'an evaluation of its own'}")
    name = f"eval_{checkpoint.name}" + (f"_{suite}" if arguments.suite and suite else "")
    out = arguments.out or checkpoint.parent.parent / f"{name}.json"
    out.write_text(summary.to_json())
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
