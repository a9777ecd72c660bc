"""The three worker groups of a run, launched once, for benchmarks that drive the runner's phases one by one."""

from __future__ import annotations

from typing import Any, Self

from rlinf_lite.config import Config
from rlinf_lite.runners import AsyncEmbodiedRunner, EmbodiedRunner
from rlinf_lite.scheduler import Cluster, HybridComponentPlacement, WorkerGroup
from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker, MultiStepRolloutWorker

_WORKERS = {"actor": EmbodiedFSDPActor, "rollout": MultiStepRolloutWorker}


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
