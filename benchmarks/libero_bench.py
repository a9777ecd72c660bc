"""How fast LIBERO is on one core: env steps, pictures, resets, another task; and what a process of it takes.

    python benchmarks/libero_bench.py --assets DIR [--task turn_on_the_stove] [--size 128] [--repeats 5]

`tests/envs/libero_assets.py DIR` writes stand-ins for the assets, which have a hundredth of the real ones' faces: say
which were used. Two contestants step the same environment with the same actions, in turn: the library's own `step`, in
this process, and `chunk_step`, which sends each action to the row's process. Seconds are of the clock: the machine has
to be left alone meanwhile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import Comparison, Report, interleaved, median, say

from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import ChunkedEnv
from rlinf_lite.envs.libero.card import LiberoOptions
from rlinf_lite.envs.libero.package import find_assets
from rlinf_lite.envs.libero.simulator import LiberoSimulator
from rlinf_lite.envs.libero.world import Row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets")
    parser.add_argument("--task", default="turn_on_the_stove")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=8)
    parser.add_argument("--num-chunks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    report = Report("libero", vars(args))
    say(f"{args.task}: two cameras of {args.size} x {args.size}")
    measured = report.measurements = interleaved(contestants(args), args.repeats, unit="/s")
    ours, bare = median(measured["steps, chunk_step"]), median(measured["steps, bare"])
    shares = [a / b for a, b in zip(measured["steps, chunk_step"], measured["steps, bare"], strict=True)]
    fast, exact = median(measured["pictures, fast"]), median(measured["pictures, exact"])
    report.comparisons = [
        Comparison("states", ours, "the library's step", bare, "env steps/s", median(shares), 0.85, at_least=True),
        Comparison("pictures, fast", fast, "pictures, exact", exact, "pictures/s", fast / exact, 1.0, at_least=True),
    ]
    report.write()


def contestants(args: argparse.Namespace) -> dict[str, Callable[[], float]]:
    actions = np.random.default_rng(0).uniform(-1, 1, (1, args.chunk * args.num_chunks, 7)).astype(np.float32)
    blind = environment(args, cameras=[])
    painting = {render: environment(args, render=render) for render in ("fast", "exact")}
    row = Row(LiberoOptions(cameras=[]), find_assets(args.assets))
    return {
        "steps, bare": lambda: per_second(actions.shape[1], lambda: bare(row, args.task, actions[0])),
        "steps, chunk_step": lambda: per_second(actions.shape[1], lambda: chunks(blind, actions, args.chunk)),
        "resets with 10 steps": lambda: per_second(3, lambda: [blind.reset([number]) for number in range(3)]),
        **{
            f"pictures, {render}": lambda env=env: per_second(
                20, lambda: [env.simulator.observe(ROWS) for _ in range(10)]
            )  # type: ignore[misc]
            for render, env in painting.items()
        },
    }


ROWS = np.array([0])


def environment(args: argparse.Namespace, **options: Any) -> ChunkedEnv:
    options = {"assets": args.assets, "camera_size": [args.size] * 2} | options
    env = ChunkedEnv(
        LiberoSimulator(1, EnvConfig.model_validate({"id": "libero", "task": args.task, "options": options})),
        ignore_terminations=True,
    )
    env.reset([0])
    (process,) = env.simulator._processes  # type: ignore[attr-defined]
    resident = Path(f"/proc/{process._child.pid}/status").read_text().split("VmRSS:")[1].split()[0]
    say(f"its process, {options.get('render', 'without pictures')}: {int(resident) >> 10} MiB")
    return env


def bare(row: Row, task: str, actions: np.ndarray) -> None:
    if row._world is None:
        row.reset(task, 0)
    assert row._world is not None
    for action in actions:
        row._world.env.step(action.astype(np.float64))


def chunks(env: ChunkedEnv, actions: np.ndarray, length: int) -> None:
    for first in range(0, actions.shape[1], length):
        env.chunk_step(actions[:, first : first + length])


def per_second(count: int, call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return count / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
