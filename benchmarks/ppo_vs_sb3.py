"""Speed and learning of PPO on PushCube-v1, compared with Stable-Baselines3's PPO with the same settings.

    python benchmarks/ppo_vs_sb3.py                                # env steps/s of both, measured in turn
    python benchmarks/ppo_vs_sb3.py --busy 1                       # each twice, the second time with a busy process
    python benchmarks/ppo_vs_sb3.py --learning --seeds 1 2 3       # success against env steps: trains both, takes hours
    python benchmarks/ppo_vs_sb3.py --plot benchmarks/results/learning --out assets/pushcube_ppo.png

Network, environments, rollout length, epochs, minibatches, learning rate, discount and treatment of success are equal;
all come from our config. Rates are measured over whole steps after a warm-up: rollout, update, and all between them.
Stable-Baselines3 is tried in three variants: its in-process environments with torch's default threads or with one, and
one process per environment. The fastest variant in a first round is the opponent.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from common import Comparison, Report, available_bytes, busy_processes, interleaved, median, say
from learning_curves import plot, train_both
from sb3_settings import sb3_arguments
from session import logged_steps, session, undisturbed

from rlinf_lite.config import Config, load_config
from rlinf_lite.runners import EmbodiedRunner

TARGET, BUSY_TARGET = 1.3, 1.5
CONFIG = "embodiment/maniskill_pushcube_ppo_mlp"
HERE = Path(__file__).parent
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "dummy": ("dummy", {}),
    "dummy-1-thread": ("dummy", {"OMP_NUM_THREADS": "1"}),
    "subproc": ("subproc", {}),
}
SUBPROC_BYTES = 400 * 2**20
"""Memory of one environment process of SubprocVecEnv, in bytes."""


class SB3:
    """Stable-Baselines3 in a separate process, which learns on request."""

    def __init__(self, cfg: Config, variant: str) -> None:
        vec_env, environment = VARIANTS[variant]
        command = [sys.executable, "-W", "ignore", str(HERE / "sb3_worker.py"), *sb3_arguments(cfg, cfg.runner.seed)]
        self._process = subprocess.Popen(
            [*command, "--vec-env", vec_env, "--in-turn"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_without_thread_limits() | environment,
        )
        self._read()  # ready

    def rate(self, num_rollouts: int) -> float:
        """Let it learn for `num_rollouts` rollouts with their updates; returns env steps/s."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_rollouts}\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # so that its loop ends and its environments are closed
        self._process.wait(timeout=60)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"Stable-Baselines3's process ended with exit code {self._process.wait()}")
        return line.strip()


def _without_thread_limits() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


def training_rate(runner: EmbodiedRunner) -> Callable[[int], float]:
    """A function that trains `num_steps` whole steps and returns env steps/s, by the times at which steps were
    logged."""
    runner.total_steps = 0

    def rate(num_steps: int) -> float:
        runner.total_steps += num_steps + 1  # time is measured from the end of the first one
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            runner.run()
        steps = logged_steps(runner)[-num_steps - 1 :]
        return float((steps[-1]["env/num_steps"] - steps[0]["env/num_steps"]) / (steps[-1]["time"] - steps[0]["time"]))

    return rate


def fastest_variant(cfg: Config, names: Sequence[str], num_rollouts: int, report: Report) -> tuple[str, SB3]:
    """The fastest of the variants, by name and process, after one warm-up rollout each; the others are closed."""
    best: tuple[float, str, SB3] | None = None
    for name in names:
        say(f"Stable-Baselines3, {name}: starting")
        opponent = SB3(cfg, name)
        opponent.rate(1)
        rate = opponent.rate(num_rollouts)
        say(f"Stable-Baselines3, {name}: {rate:.0f} env steps/s")
        report.measurements[f"Stable-Baselines3 ({name}) alone, env steps/s"] = [rate]
        if best is None or rate > best[0]:
            if best is not None:
                best[2].close()
            best = (rate, name, opponent)
        else:
            opponent.close()
    assert best is not None
    return best[1], best[2]


def measure_speed(args: argparse.Namespace) -> None:
    report = Report("ppo_vs_sb3", vars(args))
    variants = [name for name in args.variants if _fits(name, args.overrides)]
    with tempfile.TemporaryDirectory() as scratch:
        cfg = load_config(CONFIG, [*undisturbed(scratch), *args.overrides])
        name, opponent = fastest_variant(cfg, variants, max(args.steps // 2, 1), report)
        try:
            with session(cfg) as runner:
                rate = training_rate(runner)
                rate(1)  # the first steps import modules, and allocate and map memory

                def beside(busy: int, measured: Callable[[int], float]) -> float:
                    with busy_processes(busy):
                        return measured(args.steps)

                levels = sorted({0, args.busy})
                found = interleaved(
                    {
                        f"{who}{_beside(busy)}": partial(beside, busy, measured)
                        for busy in levels
                        for who, measured in (("rlinf_lite", rate), ("sb3", opponent.rate))
                    },
                    args.repeats,
                    warmup=0,
                    unit="env steps/s",
                )
        finally:
            opponent.close()
    for busy in levels:
        ours, theirs = (median(found[f"{who}{_beside(busy)}"]) for who in ("rlinf_lite", "sb3"))
        against, what = f"Stable-Baselines3, {name}", f"PPO on PushCube, end to end{_beside(busy)}"
        target = BUSY_TARGET if busy else TARGET
        report.comparisons.append(Comparison(what, ours, against, theirs, "env steps/s", ours / theirs, target, True))
    report.measurements |= {f"{who}, env steps/s": values for who, values in found.items()}
    report.write()


def _beside(busy: int) -> str:
    return f", beside {busy} busy" if busy else ""


def _fits(variant: str, overrides: Sequence[str]) -> bool:
    if VARIANTS[variant][0] != "subproc":
        return True
    needed = load_config(CONFIG, overrides).env.train.num_envs * SUBPROC_BYTES
    available = available_bytes()
    if needed > available:
        say(f"Stable-Baselines3, {variant}: left out, needs {needed / 2**30:.0f} GiB of {available / 2**30:.0f} free")
    return needed <= available


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides of our config, for both; give them first",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="runner steps of each measurement")
    parser.add_argument("--busy", type=int, default=0, help="number of busy processes during every second measurement")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    learning = parser.add_argument_group("learning curves")
    learning.add_argument("--learning", action="store_true", help="train both, one after the other")
    learning.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    learning.add_argument("--env-steps", type=int, default=500_000)
    learning.add_argument("--eval-every", type=int, default=25_000, help="env steps between evaluations")
    learning.add_argument(
        "--directory", type=Path, default=HERE / "results" / "learning", help="directory of the JSON files"
    )
    learning.add_argument("--plot", type=Path, metavar="DIR", help="plot the JSON files of a directory")
    learning.add_argument("--out", type=Path, default=Path("learning_curves.png"), help="image file of --plot")
    return parser.parse_intermixed_args()


def main() -> None:
    args = parse_args()
    if args.plot:
        plot(args.plot, args.out)
    elif args.learning:
        train_both(CONFIG, args.overrides, args.seeds, args.env_steps, args.eval_every, args.directory)
        plot(args.directory, args.directory / "learning_curves.png")
    else:
        measure_speed(args)


if __name__ == "__main__":
    main()
