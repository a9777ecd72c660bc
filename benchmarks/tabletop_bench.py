"""How fast Tabletop is on one core: env steps and pictures per second, bare and through the environment protocol.

    python benchmarks/tabletop_bench.py [--num-envs 128] [--chunk 4] [--repeats 7] [--tasks pick push place all]

Bare is the simulator alone: steps of random actions, and pictures of all rows. Through `chunk_step` come episodes,
resets, records and the observations at their ends, while the expert plays with noise, so that episodes are as short as
they get; choosing its actions is not counted. Seconds are of CPU time of the one thread that does it all. The targets
are numbers: 100,000 env steps/s without pictures and 10,000 pictures/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from common import Comparison, Report, interleaved, median, say

from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import ChunkedEnv, StepOutputs, make_env

TARGETS = {"env steps/s": 100_000, "pictures/s": 10_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=4)
    parser.add_argument("--num-chunks", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tasks", nargs="+", default=["pick", "all"])
    args = parser.parse_args()

    report = Report("tabletop", vars(args))
    for task in args.tasks:
        say(f"{task}: {args.num_envs} environments, chunks of {args.chunk}, one core; 1,000 per second")
        measured = interleaved(contestants(task, args), args.repeats, unit="k/s")
        for name, figures in measured.items():
            what, unit = f"{task}: {name}", "pictures/s" if "picture" in name else "env steps/s"
            report.measurements[what] = [1e3 * figure for figure in figures]
            rate, target = 1e3 * median(figures), TARGETS[unit]
            report.comparisons.append(Comparison(what, rate, "needed", target, unit, rate / target, 1.0, at_least=True))
    report.write()


def contestants(task: str, args: argparse.Namespace) -> dict[str, Callable[[], float]]:
    state, rgb = make(task, "state", args.num_envs), make(task, "rgb", args.num_envs)
    return {
        "steps, bare": lambda: bare_steps(state, args.chunk * args.num_chunks),
        "steps, chunk_step": lambda: chunks(state, args.chunk, args.num_chunks)[0],
        "pictures, bare": lambda: bare_pictures(rgb, args.num_chunks),
        "pictures, chunk_step": lambda: chunks(rgb, args.chunk, args.num_chunks)[1],
    }


def make(task: str, obs_mode: str, num_envs: int) -> ChunkedEnv:
    cfg = EnvConfig.model_validate({"id": "tabletop", "task": task, "options": {"obs_mode": obs_mode}})
    env = make_env(cfg, "train", num_envs)
    assert isinstance(env, ChunkedEnv)
    return env


def bare_steps(env: ChunkedEnv, num_steps: int) -> float:
    """1,000 env steps per second of `Simulator.step`, from fresh episodes every 10 steps (resets are not counted)."""
    rows, out = np.arange(env.num_envs), StepOutputs.empty(env.num_envs)
    actions = np.random.default_rng(0).uniform(-1, 1, (10, env.num_envs, env.action_dim)).astype(np.float32)
    took = 0.0
    for first in range(0, num_steps, 10):
        env.reset(seeds=range(first, first + env.num_envs))
        start = time.process_time()
        for step in range(10):
            env.simulator.step(rows, actions[step], out)
        took += time.process_time() - start
    return num_steps * env.num_envs / took / 1e3


def bare_pictures(env: ChunkedEnv, repeats: int) -> float:
    """1,000 observations per second of `Simulator.observe`."""
    env.reset(seeds=range(env.num_envs))
    rows = np.arange(env.num_envs)
    start = time.process_time()
    for _ in range(repeats):
        env.simulator.observe(rows)
    return repeats * env.num_envs / (time.process_time() - start) / 1e3


def chunks(env: ChunkedEnv, chunk: int, num_chunks: int) -> tuple[float, float]:
    """1,000 env steps, and observations, per second of `chunk_step`."""
    env.reset(seeds=range(env.num_envs))
    rng = np.random.default_rng(0)
    took, num_steps, num_observed = 0.0, 0, 0
    for _ in range(num_chunks):
        actions = env.expert_actions(chunk)
        actions += 0.25 * rng.normal(size=actions.shape).astype(np.float32)
        start = time.process_time()
        result = env.chunk_step(actions)
        took += time.process_time() - start
        num_steps += int(result.executed.sum())
        num_observed += env.num_envs + len(result.episodes)  # at the chunk's end, and at the end of episodes
    return num_steps / took / 1e3, num_observed / took / 1e3


if __name__ == "__main__":
    main()
