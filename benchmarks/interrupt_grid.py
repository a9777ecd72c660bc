"""Check of runs that are stopped from outside at many moments, also during start-up, and then resumed.

A run of the real script gets a signal after a time from a grid: Ctrl-C, SIGTERM, SIGTERM to all processes of its group,
or SIGKILL to the driver. It has to end in time, without a traceback and without remaining processes. The resumed run
has to end with the weights of an undisturbed run, bit for bit.

python benchmarks/interrupt_grid.py                           # all kinds, all signals, 12 moments each: over an hour
python benchmarks/interrupt_grid.py --kinds embodied --signals term group --moments 40
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from common import RESULTS, Report, say
from safetensors.torch import load_file

from rlinf_lite.runners.checkpoints import CheckpointError, find_checkpoint

REPO = Path(__file__).resolve().parents[1]
SIGNALS = {"int": signal.SIGINT, "term": signal.SIGTERM, "group": signal.SIGTERM, "kill": signal.SIGKILL}
ENDS_WITHIN_S = 10.0
_COMMON = [
    "runner.val_check_interval=2",
    "runner.save_interval=2",
    "runner.report=false",
    "cluster.num_gpus_per_node=1",
]
KINDS = {
    "embodied": [
        "embodiment/train_embodied_agent.py",
        "--config-name=gym_pendulum_ppo_mlp",
        "runner.max_steps=6",
        "env.train.num_envs=8",
        "env.train.max_episode_steps=40",
        "env.eval.num_envs=4",
        "env.eval.num_episodes=4",
        "rollout.num_chunks=32",
        "rollout.pipeline_stage_num=1",
        "actor.global_batch_size=64",
        "actor.micro_batch_size=64",
        "actor.optim.lr_scheduler=constant",
        "cluster.component_placement={actor: '0', rollout: '0', env: '0'}",
    ],
    "imitation": [
        "embodiment/train_sft.py",
        "--config-name=tabletop_sft_mlp",
        "runner.max_steps=60",
        "data.num_episodes=64",
        "env.eval.num_episodes=32",
        "actor.optim.lr_scheduler=constant",
        "runner.save_interval=20",
        "runner.val_check_interval=30",
    ],
    "language": [
        "math/train_math.py",
        "--config-name=math_arithmetic_ppo",
        "runner.max_steps=4",
        "sft.num_steps=20",
        "data.num_prompts=8",
        "data.max_val_prompts=16",
        "algorithm.group_size=2",
        "actor.global_batch_size=8",
        "actor.optim.lr_scheduler=constant",
        "cluster.component_placement={actor: '0', rollout: '0', reference: '0', critic: '0', reward: '0'}",
        "cluster.fuse='actor,rollout,reference,critic'",
    ],
}


@dataclass
class Outcome:
    """Result of one run that was stopped, and of the run that resumed it."""

    kind: str
    signal: str
    after_s: float
    code: int
    took_s: float
    """Seconds from the signal to the end of the last process."""
    saved_step: int
    """Step of the newest checkpoint; -1: no checkpoint."""
    problems: list[str]


def command(kind: str, home: Path, *more: str) -> list[str]:
    script, *overrides = KINDS[kind]
    paths = [f"runner.logger.log_path={home}"]
    return [sys.executable, str(REPO / "examples" / script), *_COMMON, *overrides, *paths, *more]


def weights(home: Path) -> dict[str, torch.Tensor]:
    (run,) = {path.parents[1] for path in home.glob("*/checkpoints/step_*")}
    return load_file(find_checkpoint(run) / "policy" / "model.safetensors")


def stop_one(kind: str, name: str, after_s: float, expected: dict[str, torch.Tensor]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="grid-") as directory:
        home, problems = Path(directory), []
        log = home / "stopped.log"
        with log.open("w") as file:
            process = subprocess.Popen(command(kind, home), stdout=file, stderr=file, start_new_session=True)
            time.sleep(after_s)
            below = [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
            stopped = time.monotonic()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM) if name == "group" else process.send_signal(SIGNALS[name])
            code = process.wait(timeout=120)
            _, left = psutil.wait_procs(below, timeout=90)  # Ray's own agents notice the kill of their node late
        took_s = time.monotonic() - stopped
        output = log.read_text()
        if left:
            problems.append(f"left: {[psutil.Process(p.pid).name() for p in left]}")
        if took_s > ENDS_WITHIN_S and name != "kill":
            problems.append(f"ended after {took_s:.1f} s")
        if name != "kill" and "Traceback" in output:
            problems.append("a traceback")
        if name != "kill" and code not in (0, 130):
            problems.append(f"exit code {code}")
        saved_step = -1
        try:
            for run in {path.parents[1] for path in home.glob("*/checkpoints")}:
                saved_step = int(find_checkpoint(run / "checkpoints").name.rpartition("_")[2])
        except (CheckpointError, IndexError):
            pass
        resumed = subprocess.run(command(kind, home, "runner.resume=auto"), capture_output=True, text=True, check=False)
        if resumed.returncode:
            problems.append(f"the resumed run: {(resumed.stdout + resumed.stderr)[-600:]}")
        else:
            newest = max(home.glob("*/checkpoints/last"), key=lambda path: path.lstat().st_mtime).resolve()
            got = load_file(newest / "policy" / "model.safetensors")
            if any(not torch.equal(got[name], expected[name]) for name in expected):
                problems.append("other weights at the end")
    return Outcome(kind, name, after_s, code, took_s, saved_step, problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--moments", type=int, default=12, help="number of moments for each kind and signal")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of interrupt_grid.json")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory(prefix="grid-") as directory:
            began = time.monotonic()
            subprocess.run(command(kind, Path(directory)), check=True, capture_output=True)
            whole_s, expected = time.monotonic() - began, weights(Path(directory))
        say(f"{kind}: {whole_s:.1f} s when left alone")
        for moment in range(arguments.moments):
            for name in arguments.signals:
                outcome = stop_one(kind, name, whole_s * (moment + 0.5) / arguments.moments, expected)
                outcomes.append(outcome)
                say(
                    f"{kind} {name:5} after {outcome.after_s:5.1f} s: code {outcome.code}, {outcome.took_s:4.1f} s, "
                    f"step {outcome.saved_step}: {'; '.join(outcome.problems) or 'fine'}"
                )
    report = Report("interrupt_grid", {"kinds": arguments.kinds, "signals": arguments.signals})
    report.settings["outcomes"] = [asdict(outcome) for outcome in outcomes]
    report.measurements["took_s"] = [outcome.took_s for outcome in outcomes if outcome.signal != "kill"]
    report.write(arguments.out)
    failed = [outcome for outcome in outcomes if outcome.problems]
    say(f"{len(outcomes) - len(failed)} of {len(outcomes)} stops were fine")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
