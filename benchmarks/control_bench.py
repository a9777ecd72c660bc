"""What supervision costs: seconds per training step of one run while it is watched, and while it is not.

    python benchmarks/control_bench.py [--config tabletop_ppo_vla] [--blocks 160] [--steps 4] [key=value ...]

Steps of the same run differ by 20% and more from one start of its processes to the next, so that two runs cannot be
compared to within 2%. Here one supervised run is watched for some steps, and then for some not, in turn (on, off, off,
on): its workers and the trainer's process send no heartbeats, it takes no snapshots, and the master is stopped.
What is left then is what a run without `control.enabled` does. Every step counts, from the end of the one before it,
so that snapshots count as well, which are taken between steps. The target: 2%.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from common import Comparison, Report, say

from rlinf_lite.config import load_config
from rlinf_lite.control import Supervisor, supervise
from rlinf_lite.control.context import ask_master
from rlinf_lite.runners import EmbodiedRunner
from rlinf_lite.scheduler import Cluster, HybridComponentPlacement, Worker
from rlinf_lite.workers import EmbodiedFSDPActor, EnvWorker, MultiStepRolloutWorker

WARMUP = 8
"""Steps that are not measured: they allocate, map and only train the value head."""
TARGET = 1.02
ORDER = ("watched", "bare", "bare", "watched")


class Hushable:
    """A worker that can be told to be silent."""

    def hush(self, silent: bool) -> None:
        from rlinf_lite.scheduler.heartbeat import Heartbeat

        gate(Heartbeat, "beats", silent)


class Actor(Hushable, EmbodiedFSDPActor):
    pass


class Rollout(Hushable, MultiStepRolloutWorker):
    pass


class Env(Hushable, EnvWorker):
    pass


WORKERS: dict[str, type[Worker]] = {"actor": Actor, "rollout": Rollout, "env": Env}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the config")
    parser.add_argument("--config", default="tabletop_ppo_vla")
    parser.add_argument("--blocks", type=int, default=160, help="a multiple of 4")
    parser.add_argument("--steps", type=int, default=4, help="in a block")
    args = parser.parse_intermixed_args()
    report = Report("control", vars(args))
    with tempfile.TemporaryDirectory() as home:
        blocks = measure(args.config, args.overrides, home, args.blocks, args.steps)
    report.measurements |= {name: [step for block in found for step in block] for name, found in blocks.items()}
    ratio, low, high = compare(blocks["watched"], blocks["bare"])
    ours, bare = (statistics.mean(report.measurements[name]) for name in ("watched", "bare"))
    note = f"{ratio:.3f}, 95%: {low:.3f} to {high:.3f}"
    say(f"{args.config}: {ours:.4f} s per step watched, {bare:.4f} s bare; {note}")
    report.comparisons.append(
        Comparison(f"a step of {args.config}", ours, "unwatched", bare, "s", ratio, TARGET, False, note)
    )
    report.write()


def measure(
    config: str, overrides: Sequence[str], home: str, num_blocks: int, num_steps: int
) -> dict[str, list[list[float]]]:
    """Seconds of every step, by block."""
    settings = [f"runner.max_steps={WARMUP + num_blocks * num_steps}", "runner.val_check_interval=-1"]
    settings += ["runner.save_interval=-1", "runner.report=false", "runner.logger.backends=[]"]
    settings += [f"runner.logger.log_path={home}"]
    cfg = load_config(config, [*settings, *overrides])
    with Cluster.from_config(cfg.cluster) as cluster, supervise(cfg, cluster) as supervisor:
        assert isinstance(supervisor, Supervisor)
        placement = HybridComponentPlacement(cfg)
        groups = cluster.launch(placement, **{name: worker.create_group(cfg) for name, worker in WORKERS.items()})
        runner = SwitchingRunner(cfg=cfg, supervisor=supervisor, **groups, claim=None)
        runner.init_workers()
        runner.switch_every(num_steps, supervisor)
        runner.run()
    return runner.blocks


def gate(owner: Any, method: str, closed: bool) -> None:
    """Have calls of a method wait for as long as it is closed."""
    if not hasattr(owner, "_gate"):
        gate, original = threading.Event(), getattr(owner, method)

        def wait_and_call(*args: Any) -> Any:
            gate.wait()
            return original(*args)

        owner._gate = gate
        setattr(owner, method, wait_and_call)
    owner._gate.clear() if closed else owner._gate.set()


class SwitchingRunner(EmbodiedRunner):
    """Is watched in turn."""

    def switch_every(self, num_steps: int, supervisor: Supervisor) -> None:
        self.blocks: dict[str, list[list[float]]] = {"watched": [], "bare": []}
        self._num_steps, self._now, self._since, self._hushed = num_steps, "watched", 0.0, 0.0
        self._supervisor, self._master = supervisor, ask_master(supervisor.job, "process_id")

    def _after_step(self) -> None:
        if self._now == "watched":
            super()._after_step()
        block, within = divmod(self.completed_steps - WARMUP, self._num_steps)
        if block >= 0:
            if within or block:
                self.blocks[self._now][-1].append(time.perf_counter() - self._since)
            if not within and self.completed_steps < self.total_steps:
                self._switch(ORDER[block % len(ORDER)])
                self.blocks[self._now].append([])
            self._since = time.perf_counter()
        if self.completed_steps == self.total_steps:
            self._switch("watched")

    def _switch(self, to: str) -> None:
        if to == self._now:
            return
        self._now, silent = to, to == "bare"
        self._wait(*(group.hush(silent) for group in self._groups), what="silence")
        gate(self._supervisor, "_send_heartbeat", silent)
        if silent:
            time.sleep(0.1)  # for what is on its way
            os.kill(self._master, signal.SIGSTOP)
            self._hushed = time.monotonic()
        else:
            os.kill(self._master, signal.SIGCONT)
            assert self._snapshots is not None
            self._snapshots._began += time.monotonic() - self._hushed  # no snapshot has become due meanwhile


def compare(watched: list[list[float]], bare: list[list[float]]) -> tuple[float, float, float]:
    """How many times longer a watched step takes, from fours of blocks (on, off, off, on), in which slow changes of the
    machine cancel; with the limits that 95% of resampled fours lie in."""
    logs = [
        math.log(statistics.mean(watched[i] + watched[i + 1]) / statistics.mean(bare[i] + bare[i + 1]))
        for i in range(0, len(watched) - 1, 2)
    ]
    draw = random.Random(0)
    drawn = sorted(statistics.mean(draw.choices(logs, k=len(logs))) for _ in range(2000))
    return math.exp(statistics.mean(logs)), math.exp(drawn[50]), math.exp(drawn[-51])


if __name__ == "__main__":
    main()
