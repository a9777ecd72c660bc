"""The rollout phase of PushCube (env and rollout workers, no training), against processes that only simulate.

    python benchmarks/rollout_bench.py --control-modes pd_joint_delta_pos pd_ee_delta_pos

Ours: the default config's workers, driven through the runner. The opponent: one process per env worker of ours, which
steps as many ManiSkill environments through `gymnasium.make` and does nothing else. Both live all the time and run in
turn. Figures are env steps/s over all processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from common import Comparison, Report, interleaved, median, say
from session import Session

from rlinf_lite.config import Config, load_config
from rlinf_lite.runners import EmbodiedRunner
from rlinf_lite.scheduler import Cluster

TARGETS = {"pd_joint_delta_pos": 0.85, "pd_ee_delta_pos": 0.85}


class BareSimulation:
    """Processes that only simulate, when told to."""

    def __init__(self, num_processes: int, num_envs: int, control_mode: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_simulate, args=(theirs, num_envs, control_mode), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()  # built

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def rate(self, seconds: float) -> float:
        """Env steps/s over all processes."""
        for pipe in self._pipes:
            pipe.send(seconds)
        return float(sum(pipe.recv() for pipe in self._pipes))


def _simulate(pipe: Connection, num_envs: int, control_mode: str) -> None:
    import gymnasium
    import torch

    from rlinf_lite.envs.maniskill.card import ManiSkillOptions
    from rlinf_lite.envs.maniskill.setup import import_maniskill, plan_backends

    torch.set_num_threads(1)
    import_maniskill()
    backends = plan_backends(ManiSkillOptions(sim_backend="physx_cpu"))
    envs: list[Any] = [
        gymnasium.make(
            "PushCube-v1",
            num_envs=1,
            obs_mode="state",
            control_mode=control_mode,
            reward_mode="normalized_dense",
            sim_backend=backends.sim,
            render_backend=backends.render,
        )
        for _ in range(num_envs)
    ]
    for i, env in enumerate(envs):
        env.action_space.seed(i)
        env.reset(seed=i)
    actions = [env.action_space.sample() for env in envs]
    pipe.send("built")
    while True:
        seconds = pipe.recv()
        start, num_steps = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            for env, action in zip(envs, actions, strict=True):
                _, _, _, truncated, _ = env.step(action)
                num_steps += 1
                if truncated[0]:
                    env.reset()
        pipe.send(num_steps / (time.perf_counter() - start))


def rollout_rate(runner: EmbodiedRunner) -> Callable[[float], float]:
    """Env steps/s of whole rollout phases, at least so many seconds of them."""
    step = 0

    def rate(seconds: float) -> float:
        nonlocal step
        start, num_steps = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            num_steps += sum(result["num_env_steps"] for result in runner.generate_rollouts(step)[0])
            step += 1
        return num_steps / (time.perf_counter() - start)

    return rate


def pushcube_config(control_mode: str, scratch: str, *overrides: str) -> Config:
    paths = [f"runner.logger.log_path={scratch}"]
    mode = f"env.options.control_mode={control_mode}"
    return load_config("embodiment/maniskill_pushcube_ppo_mlp", [mode, *paths, *overrides])


def measure(cluster: Cluster, cfg: Config, args: argparse.Namespace, report: Report) -> None:
    control_mode = str(cfg.env.options.control_mode)
    say(f"{control_mode}: building environments")
    with Session(cluster, cfg) as session:
        runner = session.new_runner()
        runner.update_rollout_weights()
        processes = runner.layout.num_env_workers
        with BareSimulation(processes, cfg.env.train.num_envs // processes, control_mode) as bare:
            rate = rollout_rate(runner)
            found = interleaved(
                {"rollout": lambda: rate(args.seconds), "bare": lambda: bare.rate(args.seconds)},
                args.repeats,
                unit="env steps/s",
            )
    ours, opponent = median(found["rollout"]), median(found["bare"])
    against = f"{processes} processes that only simulate"
    report.comparisons.append(
        Comparison(
            f"PushCube rollout phase, {control_mode}",
            ours,
            against,
            opponent,
            "env steps/s",
            ours / opponent,
            TARGETS[control_mode],
            at_least=True,
        )
    )
    report.measurements |= {f"{control_mode}, {name}, env steps/s": values for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--control-modes", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="first: of the default config")
    args = parser.parse_intermixed_args()
    report = Report("rollout", vars(args))
    with tempfile.TemporaryDirectory() as scratch:
        for control_mode in args.control_modes:
            cfg = pushcube_config(control_mode, scratch, *args.overrides)
            with Cluster(cfg.cluster.num_nodes, cfg.cluster.num_gpus_per_node, cfg.cluster.accelerator) as cluster:
                measure(cluster, cfg, args, report)
    report.write()


if __name__ == "__main__":
    main()
