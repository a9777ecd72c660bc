"""Short runs on the shared cluster."""

import json
from pathlib import Path

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.runners import EmbodiedRunner
from rlinf_lite.scheduler import HybridComponentPlacement
from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker, MultiStepRolloutWorker

WORKERS = {"actor": EmbodiedFSDPActor, "rollout": MultiStepRolloutWorker, "env": EnvWorker}

SMALL_PENDULUM = [
    "env.train.num_envs=8",
    "env.train.max_episode_steps=10",
    "env.eval.num_envs=4",
    "env.eval.num_episodes=6",
    "env.eval.max_episode_steps=10",
    "rollout.num_chunks=8",
    "rollout.pipeline_stage_num=1",
    "algorithm.update_epochs=2",
    "actor.global_batch_size=16",
    "actor.micro_batch_size=16",
    "actor.optim.lr_scheduler=constant",  # else the learning rate depends on max_steps
    "runner.max_steps=3",
    "runner.val_check_interval=-1",
    "runner.save_interval=-1",
    "runner.phase_timeout_s=60",
    "cluster.num_gpus_per_node=2",
    "cluster.component_placement={actor: '0', rollout: '0', env: '0'}",
]


@pytest.fixture
def start(cluster, tmp_path):
    """`start(*overrides, config=...)` launches three groups and returns an initialised runner; they end with it."""
    launched = []

    def start(
        *overrides,
        config="gym_pendulum_ppo_mlp",
        workers=WORKERS,
        small=SMALL_PENDULUM,
        root=tmp_path,
        runner_class=EmbodiedRunner,
    ):
        paths = [f"runner.logger.log_path={root}", f"actor.checkpoint_save_path={root}"]
        cfg = load_config(f"embodiment/{config}", [*small, *paths, *overrides])
        placement = HybridComponentPlacement(cfg)
        groups = cluster.launch(placement, **{name: worker.create_group(cfg) for name, worker in workers.items()})
        launched.extend(groups.values())
        runner = runner_class(cfg=cfg, **groups)
        runner.init_workers()
        return runner

    def stop():
        while launched:
            launched.pop().shutdown()

    start.stop = stop
    yield start
    stop()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
