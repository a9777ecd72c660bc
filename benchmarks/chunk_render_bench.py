"""What it saves to render only at chunk ends: ManiSkill images, against the same with every step rendered.

    python benchmarks/chunk_render_bench.py [--task PickCube-v1] [--chunk 4] [--num-envs 2] [--repeats 5]

Two contestants play the same actions from the same seeds, in turn: chunks of C; and the same as C chunks of one step,
so that every step is observed. The second also adds up the time that its observations take: chunks leave out
(C - 1) / C of it. What they save, divided by that, is the share really saved. Needs a Vulkan device
(docs/environments.md).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from common import Comparison, Report, interleaved, median, say

from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import ChunkedEnv, Obs, make_env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="PickCube-v1")
    parser.add_argument("--chunk", type=int, default=4)
    parser.add_argument("--num-envs", type=int, default=2)
    parser.add_argument("--num-chunks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--size", type=int, default=128)
    args = parser.parse_args()

    env = make(args)
    steps = args.chunk * args.num_chunks
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (args.num_envs, steps, env.action_dim)).astype(np.float32)
    observing = timed_observations(env)
    left_out: list[float] = []

    def ms_per_step(chunk: int) -> float:
        env.reset(seeds=range(args.num_envs))
        observing.clear()
        start = time.perf_counter()
        for first in range(0, steps, chunk):
            env.chunk_step(actions[:, first : first + chunk])
        took = time.perf_counter() - start
        if chunk == 1:
            left_out.append(1e3 * sum(observing) * (1 - 1 / args.chunk) / (steps * args.num_envs))
        return 1e3 * took / (steps * args.num_envs)

    say(
        f"{args.task}, {args.num_envs} environments, {args.size} x {args.size}, chunks of {args.chunk}; ms per env step"
    )
    measured = interleaved(
        {"chunk ends": lambda: ms_per_step(args.chunk), "every step": lambda: ms_per_step(1)}, args.repeats, unit="ms"
    )
    measured["renders left out"] = left_out[-args.repeats :]
    rounds = zip(measured["chunk ends"], measured["every step"], measured["renders left out"], strict=True)
    shares = [(every - ends) / left for ends, every, left in rounds]
    row = Comparison(
        what="observation at chunk end only",
        ours=1e3 / median(measured["chunk ends"]),
        against="every step rendered",
        opponent=1e3 / median(measured["every step"]),
        unit="env steps/s",
        ratio=median(shares),
        target=0.95,
        at_least=True,
        note="ratio: time saved / time of the renders left out, median over rounds",
    )
    Report("chunk_render", vars(args), [row], measured | {"saved share": shares}).write()


def timed_observations(env: ChunkedEnv) -> list[float]:
    """A list that grows by the seconds of every observation from now on."""
    seconds: list[float] = []
    observe = env.simulator.observe

    def timed(rows: Any) -> Obs:
        start = time.perf_counter()
        obs = observe(rows)
        seconds.append(time.perf_counter() - start)
        return obs

    env.simulator.observe = timed  # type: ignore[method-assign]
    return seconds


def make(args: argparse.Namespace) -> ChunkedEnv:
    cfg = EnvConfig.model_validate(
        {
            "task": args.task,
            "options": {"obs_mode": "rgb", "camera_size": [args.size, args.size]},
            "train": {"ignore_terminations": True, "max_episode_steps": 100_000},
        }
    )
    env = make_env(cfg, "train", args.num_envs)
    assert isinstance(env, ChunkedEnv)
    return env


if __name__ == "__main__":
    main()
