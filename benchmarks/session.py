"""The worker groups of a run, launched once, for benchmarks that drive the runner's phases one by one."""

from __future__ import annotations

import json
from typing import Any, Self

from rlinf_lite.config import Config, ReasoningConfig
from rlinf_lite.data.problems import open_problems
from rlinf_lite.runners import AsyncEmbodiedRunner, AsyncReasoningRunner, EmbodiedRunner, ReasoningRunner
from rlinf_lite.scheduler import Cluster, HybridComponentPlacement, WorkerGroup
from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker, MultiStepRolloutWorker
from rlinf_lite.workers.reasoning import launch_roles

_WORKERS = {"actor": EmbodiedFSDPActor, "rollout": MultiStepRolloutWorker}


def undisturbed(scratch: str) -> list[str]:
    """Overrides: no evaluation, checkpoint or report, and a learning rate that does not reach zero in between."""
    return [
        f"runner.logger.log_path={scratch}",
        "runner.val_check_interval=-1",
        "runner.save_interval=-1",
        "runner.max_steps=100000",
        "runner.max_epochs=100000",
        "runner.report=false",
    ]


def logged_steps(runner: EmbodiedRunner | ReasoningRunner) -> list[dict[str, float]]:
    """The metrics of every step that a runner has made."""
    lines = (json.loads(line) for line in (runner.run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "time/step" in line]


class Session:
    """A `with` block in which the groups run."""

    def __init__(self, cluster: Cluster, cfg: Config, env: tuple[Any, ...] = (EnvWorker,)) -> None:
        """`env`: the class of the env workers, and what it is given besides the config."""
        self._cluster, self._cfg, self._env = cluster, cfg, env
        self._groups: dict[str, WorkerGroup] = {}

    def __enter__(self) -> Self:
        placement = HybridComponentPlacement(self._cfg)
        workers = {name: worker.create_group(self._cfg) for name, worker in _WORKERS.items()}
        workers["env"] = self._env[0].create_group(self._cfg, *self._env[1:])
        self._groups = self._cluster.launch(placement, **workers)
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups.values():
            group.shutdown()

    def new_runner(self, cfg: Config | None = None) -> EmbodiedRunner:
        """A runner that has initialised the workers (anew, where they were). Workers keep the config of the launch;
        what `cfg` changes is the driver's part: the number of stages, steps and paths.
        """
        cfg = cfg or self._cfg
        runner_class = AsyncEmbodiedRunner if cfg.runner.mode == "async" else EmbodiedRunner
        runner = runner_class(cfg=cfg, **self._groups, supervisor=None, claim=None)
        runner.init_workers()
        return runner


class LanguageSession:
    """The same for language models."""

    def __init__(self, cluster: Cluster, cfg: ReasoningConfig) -> None:
        self._cluster, self._cfg = cluster, cfg
        self._roles: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._roles = launch_roles(self._cfg, self._cluster, HybridComponentPlacement(self._cfg))
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._roles.values():
            group.shutdown()

    def new_runner(self) -> ReasoningRunner:
        """A runner whose workers hold the model that the run starts from."""
        runner_class = AsyncReasoningRunner if self._cfg.runner.mode == "async" else ReasoningRunner
        runner = runner_class(self._cfg, open_problems(self._cfg), **self._roles)
        runner.init_workers()
        return runner
