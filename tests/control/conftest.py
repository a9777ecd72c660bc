"""Supervised training runs on the shared cluster, and ways to hurt their workers at a chosen moment."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.control import supervise
from rlinf_lite.runners import EmbodiedRunner
from rlinf_lite.scheduler import HybridComponentPlacement
from tests.runners.conftest import SMALL_PENDULUM, WORKERS


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    """Processes, which are what is tested here."""
    return ray_cluster


SUPERVISED = [
    "cluster.component_placement={actor: '0-1', rollout: '0-1', env: '0-1'}",
    "control.snapshot_interval=1",
    "control.backoff_s=0.1",
    "runner.max_steps=14",
]


@pytest.fixture
def start(cluster, tmp_path):
    """`start(*overrides)` gives an initialised, supervised runner; its groups and its master end with the test."""
    with ExitStack() as stack:

        def start(
            *overrides,
            root=tmp_path,
            runner_class=EmbodiedRunner,
            config="gym_pendulum_ppo_mlp",
            small=SMALL_PENDULUM,
            classes=WORKERS,
        ):
            paths = [f"runner.logger.log_path={root}"]
            cfg = load_config(f"embodiment/{config}", [*small, *SUPERVISED, *paths, *overrides])
            supervisor = stack.enter_context(supervise(cfg, cluster))
            placement = HybridComponentPlacement(cfg)
            workers = {name: worker.create_group(cfg) for name, worker in classes.items()}
            groups = cluster.launch(placement, **workers)
            for group in groups.values():
                stack.callback(group.shutdown)
            runner = runner_class(cfg=cfg, **groups, supervisor=supervisor)
            runner.init_workers()
            return runner

        start.stack, start.stop = stack, stack.close
        yield start


class Hurt:
    """Once a runner has completed `step` steps and `delay_s` have passed: a signal to some workers."""

    def __init__(self, runner, step: int, *victims: tuple[str, int], delay_s: float = 0.05, how=signal.SIGKILL) -> None:
        self.pids: list[int] = []
        self.at = 0.0
        self.victims = victims
        self._runner, self._step, self._delay_s, self._how = runner, step, delay_s, how
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._runner.completed_steps < self._step:
            time.sleep(0.002)
        time.sleep(self._delay_s)
        groups = {group.name: group for group in self._runner._groups}
        self.pids = [groups[name].members[rank].pid for name, rank in self.victims]
        self.at = time.time()
        for pid in self.pids:
            os.kill(pid, self._how)

    def join(self) -> None:
        self._thread.join(30)
        assert self.pids, "nobody was hurt"


def pids(runner) -> dict[str, int]:
    return {f"{group.name}[{m.rank}]": m.pid for group in runner._groups for m in group.members}


def changed(before: dict[str, int], runner) -> set[str]:
    after = pids(runner)
    return {name for name in before if before[name] != after[name]}


def events(run_dir: Path, *names: str) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if not names or line["event"] in names]


def wait_for(condition: Callable[[], bool], limit_s: float = 15.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)
