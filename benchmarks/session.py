"""A run that keeps its worker groups, for benchmarks that train some steps at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from rlinf_lite.config import Config
from rlinf_lite.runners import EmbodiedRunner
from rlinf_lite.scheduler import Cluster, HybridComponentPlacement
from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker, MultiStepRolloutWorker


def undisturbed(scratch: str) -> list[str]:
    """Overrides for no evaluations, checkpoints or report, and a learning rate that stays above zero."""
    return [
        f"runner.logger.log_path={scratch}",
        "runner.val_check_interval=-1",
        "runner.save_interval=-1",
        "runner.max_steps=100000",
        "runner.max_epochs=100000",
        "runner.report=false",
    ]


def logged_steps(runner: EmbodiedRunner) -> list[dict[str, float]]:
    """The metrics of all steps that a runner has done."""
    lines = (json.loads(line) for line in (runner.run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "time/step" in line]


@contextmanager
def session(cfg: Config) -> Iterator[EmbodiedRunner]:
    """A context with the runner of a config's groups, ready to run. Cluster and groups end with the context."""
    with Cluster.from_config(cfg.cluster) as cluster:
        groups = cluster.launch(
            HybridComponentPlacement(cfg),
            actor=EmbodiedFSDPActor.create_group(cfg),
            rollout=MultiStepRolloutWorker.create_group(cfg),
            env=EnvWorker.create_group(cfg),
        )
        runner = EmbodiedRunner(cfg=cfg, **groups, supervisor=None, claim=None)
        runner.init_workers()
        yield runner
