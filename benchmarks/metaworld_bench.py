"""How fast MetaWorld is on one core, what fast pictures leave out, and which scripted experts succeed.

    python benchmarks/metaworld_bench.py [--num-envs 8] [--chunk 5] [--repeats 7] [--task reach-v3]
    python benchmarks/metaworld_bench.py --experts 20      # 20 episodes of each of the 50 tasks, and nothing else

Two contestants step the same simulations with the same actions, in turn: the library's own `step`, and `chunk_step`,
which adds episodes, checks, records and observations at the ends of chunks. Pictures are those of `observe`, and their
target is a number: 60 per second, fast. Seconds are of CPU time of the one thread that does it all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import Comparison, Report, interleaved, median, print_table, say

from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import ChunkedEnv, make_env
from rlinf_lite.envs.metaworld.tasks import DIFFICULTIES
from rlinf_lite.metrics.evaluation import wilson_interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="reach-v3")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=5)
    parser.add_argument("--num-chunks", type=int, default=20)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--experts", type=int, default=0, metavar="EPISODES")
    args = parser.parse_args()
    if args.experts:
        experts(args.experts)
        return

    report = Report("metaworld", vars(args))
    say(f"{args.task}: {args.num_envs} environments, chunks of {args.chunk}, one core")
    measured = report.measurements = interleaved(contestants(args), args.repeats, unit="/s")
    ours, bare = median(measured["steps, chunk_step"]), median(measured["steps, bare"])
    shares = [a / b for a, b in zip(measured["steps, chunk_step"], measured["steps, bare"], strict=True)]
    fast, exact = median(measured["pictures, fast"]), median(measured["pictures, exact"])
    report.comparisons = [
        Comparison("states", ours, "the library's step", bare, "env steps/s", median(shares), 0.85, at_least=True),
        Comparison("pictures, fast", fast, "needed", 60.0, "pictures/s", fast / 60, 1.0, at_least=True),
        Comparison("pictures, fast", fast, "pictures, exact", exact, "pictures/s", fast / exact, 1.0, at_least=True),
    ]
    report.measurements["mean difference of a fast pixel, of 255"] = [difference(args)]
    report.write()


def contestants(args: argparse.Namespace) -> dict[str, Callable[[], float]]:
    state = make(args.task, args.num_envs)
    fast, exact = (make(args.task, 1, obs_mode="rgb", render=mode, camera_size=[args.size] * 2) for mode in MODES)
    steps = args.chunk * args.num_chunks
    actions = np.random.default_rng(0).uniform(-1, 1, (args.num_envs, steps, 4)).astype(np.float32)
    return {
        "steps, bare": lambda: bare_steps(state, actions),
        "steps, chunk_step": lambda: chunked_steps(state, actions, args.chunk),
        "pictures, fast": lambda: pictures(fast, args.num_chunks),
        "pictures, exact": lambda: pictures(exact, 4),
    }


MODES = ("fast", "exact")


def make(task: str, num_envs: int, **options: Any) -> ChunkedEnv:
    env = make_env(EnvConfig.model_validate({"id": "metaworld", "task": task, "options": options}), "train", num_envs)
    assert isinstance(env, ChunkedEnv)
    return env


def bare_steps(env: ChunkedEnv, actions: np.ndarray) -> float:
    """Env steps per second of the library's own `step`."""
    env.reset(seeds=range(env.num_envs))
    worlds: Any = env.simulator
    envs = [world.env for world in worlds._worlds]
    start = time.process_time()
    for step in range(actions.shape[1]):
        for row, one in enumerate(envs):
            one.step(actions[row, step])
    return actions.shape[0] * actions.shape[1] / (time.process_time() - start)


def chunked_steps(env: ChunkedEnv, actions: np.ndarray, chunk: int) -> float:
    env.reset(seeds=range(env.num_envs))
    start, num_steps = time.process_time(), 0
    for first in range(0, actions.shape[1], chunk):
        num_steps += int(env.chunk_step(actions[:, first : first + chunk]).executed.sum())
    return num_steps / (time.process_time() - start)


def pictures(env: ChunkedEnv, repeats: int) -> float:
    env.reset(seeds=[1])
    start = time.process_time()
    for _ in range(repeats):
        env.simulator.observe(np.arange(1))
    return repeats / (time.process_time() - start)


def difference(args: argparse.Namespace) -> float:
    """Mean absolute difference between the pixels of fast and exact pictures of eight initial states."""
    seen = []
    for mode in MODES:
        env = make(args.task, 8, obs_mode="rgb", render=mode, camera_size=[args.size] * 2)
        seen.append(env.reset(seeds=range(8))["images"]["corner2"].astype(float))
        env.close()
    return float(np.abs(seen[0] - seen[1]).mean())


def experts(num_episodes: int) -> None:
    """A row per task: how many episodes its scripted expert solves within 500 env steps, and how soon."""
    report = Report("metaworld_experts", {"episodes_per_task": num_episodes, "seeds": f"0 to {num_episodes - 1}"})
    rows, failing = [], []
    for difficulty, tasks in DIFFICULTIES.items():
        for task in tasks:
            env = make(task, 1)
            records = [episode(env, seed) for seed in range(num_episodes)]
            env.close()
            solved = [record.length for record in records if record.success_once]
            report.measurements[f"{task}, env steps of episodes that were solved"] = solved
            low, high = wilson_interval(len(solved), num_episodes)
            mean = f"{np.mean(solved):.0f}" if solved else "-"
            rows.append([task, difficulty, f"{len(solved)}/{num_episodes}", f"[{low:.2f}, {high:.2f}]", mean])
            say("  ".join(rows[-1]))
            failing += [task] if len(solved) < num_episodes else []
    print_table("experts", ["task", "difficulty", "solved", "95%", "mean env steps"], rows)
    say(f"not always: {', '.join(failing) or 'none'}")
    report.write()


def episode(env: ChunkedEnv, seed: int) -> Any:
    env.reset(seeds=[seed])
    while True:
        records = env.chunk_step(env.expert_actions(1)).episodes
        if records:
            return records[0]


if __name__ == "__main__":
    main()
