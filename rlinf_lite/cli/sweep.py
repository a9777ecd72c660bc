"""`rlinf-lite sweep NAME key=v1,v2 key2=a,b`: train once for every combination of the values, as `rlinf-lite train`
does, one run after the other or N at a time."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra.errors import HydraException

from rlinf_lite.cli.parse import names_and_overrides
from rlinf_lite.cli.tables import print_table
from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.config.loading import parse_override
from rlinf_lite.config.names import as_file_name
from rlinf_lite.config.schema import ClusterConfig
from rlinf_lite.report.page import measured
from rlinf_lite.report.run_files import RunFiles

COMMAND = (sys.executable, "-m", "rlinf_lite.cli")
PATIENCE = 2
"""How many times Ctrl-C is passed on to a run, which ends in order at the first and at once at the second."""

POLL_S = 0.1

MAX_NAME = 70
"""The most bytes of a run's name; longer names stay apart by their number."""


@dataclass(frozen=True)
class Trial:
    """One combination of the values."""

    values: tuple[str, ...]
    run_name: str
    log_path: Path
    words: tuple[str, ...]
    """The command, after `rlinf-lite`."""
    cluster: ClusterConfig

    def directories(self) -> set[Path]:
        """Directories of runs of this name."""
        return set(self.log_path.glob(f"{self.run_name}-*"))


@dataclass(frozen=True)
class Share:
    """The part of this machine that a run has while others run too."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()


@dataclass
class Running:
    trial: Trial
    share: Share | None
    process: subprocess.Popen[bytes]
    before: set[Path]
    """Directories of earlier runs of its name."""


def sweep(arguments: Sequence[str]) -> int:
    """Start all runs and print the table; returns 1 where one failed, 2 where a config is wrong, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="rlinf-lite sweep", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="+", metavar="NAME key=v1,v2", help="a config, what varies, other overrides")
    about = "runs at a time (default: 1), each with its share of the cores, or with GPUs of its own"
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help=about)
    parser.add_argument("--dry-run", action="store_true", help="list the commands; exit")
    options = parser.parse_intermixed_args(arguments)
    names, overrides = names_and_overrides(options.words)
    if len(names) != 1:
        listed = f": {', '.join(names)}" if names else ""
        parser.error(f"name one config; {len(names)} were given{listed}")
    try:
        keys, trials = trials_of(names[0], overrides)
        shares = shares_of(names[0], min(options.parallel, len(trials)), [trial.cluster for trial in trials])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.dry_run:
        print("\n".join(f"rlinf-lite {shlex.join(trial.words)}" for trial in trials))
        return 0

    titles = [key.rpartition(".")[2] for key in keys]
    titles = [title if titles.count(title) == 1 else key for title, key in zip(titles, keys, strict=True)]
    # a terminal that closes sends SIGHUP to this process alone: the runs are in other groups
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    rows, code = _run_all(keys, trials, shares)
    print()
    print_table([*titles, "status", "metric", "last", "95%", "directory"], [rows[i] for i in sorted(rows)])
    if len(rows) < len(trials):
        print(f"interrupted: {len(trials) - len(rows)} of {len(trials)} were not started")
    return code


def shares_of(name: str, number: int, clusters: Sequence[ClusterConfig]) -> list[Share | None]:
    """The share of each of `number` runs at a time; None: the whole machine, for a single one. Raises ConfigError where
    a share is less than a config needs."""
    if number == 1:
        return [None]
    if number < 1:
        raise ConfigError(name, [f"--parallel {number}: no run would start. Give a number from 1"])
    if os.environ.get("RAY_ADDRESS") or any(cluster.num_nodes > 1 for cluster in clusters):
        text = "each run has a Ray of its own on this machine, which RAY_ADDRESS and cluster.num_nodes above 1 rule out"
        raise ConfigError(name, [f"--parallel {number}: {text}. Leave --parallel out"])
    from rlinf_lite.scheduler.placement import detect_num_gpus, detect_slots

    found = [detect_slots(cluster.accelerator, cluster.num_gpus_per_node) for cluster in clusters]
    needed = max((slots for kind, slots in found if kind == "cuda"), default=0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(detect_num_gpus() if needed else 0)))
    gpus = [gpu for gpu in visible.split(",") if gpu] if needed else []
    if number * needed > len(gpus):
        text = f"each run has {needed} GPUs (cluster.num_gpus_per_node), {number} have {number * needed}, and "
        advice = f"Run {len(gpus) // needed} at a time, or set that key lower"
        raise ConfigError(name, [f"--parallel {number}: {text}this machine has {len(gpus)}. {advice}"])
    cores = sorted(os.sched_getaffinity(0))
    if number > len(cores):
        text = f"a run needs a CPU core, and this machine has {len(cores)}. Run {len(cores)} at a time"
        raise ConfigError(name, [f"--parallel {number}: {text}"])
    return [Share(tuple(cores[i::number]), tuple(gpus[i * needed : (i + 1) * needed])) for i in range(number)]


def trials_of(name: str, overrides: Sequence[str]) -> tuple[list[str], list[Trial]]:
    """The keys that vary, and a run for each combination of their values; the last key varies fastest. Raises
    ConfigError, also for problems of any run's config."""
    keys, choices, fixed = list[str](), list[list[str]](), list[str]()
    for text in overrides:
        try:
            item = parse_override(text)
        except HydraException:
            fixed.append(text)  # load_config reports the problem
            continue
        if item.is_sweep_override():
            keys.append(item.key_or_group)
            choices.append([str(value) for value in item.sweep_string_iterator()])
        else:
            fixed.append(text)
    if not keys:
        raise ConfigError(name, ["nothing varies. Give a key several values, for example runner.seed=0,1,2"])
    trials, problems, seen = [], list[str](), dict[str, str]()
    for number, values in enumerate(itertools.product(*choices), start=1):
        chosen = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        try:
            config = load_config(name, [*fixed, *chosen])
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
            continue
        content, said = config.model_dump_json(), " ".join(chosen)
        if content in seen:
            problems.append(f"{said} is the same run as {seen[content]}. Give each value once")
            continue
        seen[content] = said
        parts = [f"{key.rpartition('.')[2]}{value.strip('[{}]')}" for key, value in zip(keys, values, strict=True)]
        kept = as_file_name(str(config.runner.run_name), MAX_NAME - 4)
        run_name = as_file_name("-".join([kept, f"{number:02d}", *parts]), MAX_NAME)
        if config.runner.task_type == "eval":
            raise ConfigError(name, ["runner.task_type: is eval, which trains nothing. Name a config that trains"])
        words = ("train", name, *fixed, *chosen, f"runner.run_name={run_name}")
        trials.append(Trial(values, run_name, Path(config.runner.logger.log_path), words, config.cluster))
    if problems:
        raise ConfigError(name, problems)
    return keys, trials


def _run_all(
    keys: Sequence[str], trials: Sequence[Trial], shares: Sequence[Share | None]
) -> tuple[dict[int, tuple[str, ...]], int]:
    """Run all trials. Returns the rows of the table by the index of their trial, and the exit code. Ctrl-C is passed on
    to the running ones, and no more start."""
    rows, running = dict[int, tuple[str, ...]](), dict[int, Running]()
    free, waiting, code, requests = list(shares), list(range(len(trials))), 0, 0
    while running or (waiting and code != 130):
        try:
            while free and waiting and code != 130:
                place = waiting.pop(0)
                said = ", ".join(f"{key}={value}" for key, value in zip(keys, trials[place].values, strict=True))
                running[place] = _start(trials[place], free.pop(0), f"{place + 1} of {len(trials)}: {said}")
            time.sleep(POLL_S)
            for place, one in list(running.items()):
                if (ended := one.process.poll()) is None:
                    continue
                ended = 130 if ended == -signal.SIGINT else ended  # it had no handler yet
                rows[place] = _row(one.trial, one.before, ended)
                code = 130 if ended == 130 or code == 130 else 1 if ended else code
                free.append(running.pop(place).share)
                if len(shares) > 1:
                    print(f"{place + 1} of {len(trials)}: {rows[place][len(keys)]}", flush=True)
        except KeyboardInterrupt:
            code, requests = 130, requests + 1
            for one in running.values():
                one.process.send_signal(signal.SIGINT if requests <= PATIENCE else signal.SIGKILL)
    return rows, code


def _start(trial: Trial, share: Share | None, said: str) -> Running:
    """Start a run. If others run at the same time, its output goes to its own file."""
    before, environment = trial.directories(), dict(os.environ)
    if share is None:
        print(said, flush=True)
        process = subprocess.Popen([*COMMAND, *trial.words], process_group=0)  # else Ctrl-C reaches it twice
        return Running(trial, share, process, before)
    if share.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    trial.log_path.mkdir(parents=True, exist_ok=True)
    output = trial.log_path / f"{trial.run_name}.log"
    print(f"{said}  (output: {output})", flush=True)
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*COMMAND, *trial.words], process_group=0, stdout=file, stderr=subprocess.STDOUT, env=environment
        )
    os.sched_setaffinity(process.pid, share.cores)  # its threads and processes inherit it
    return Running(trial, share, process, before)


def _row(trial: Trial, before: set[Path], code: int) -> tuple[str, ...]:
    status = {0: "finished", 130: "stopped"}.get(code, f"failed ({code})")
    new = max((path for path in trial.directories() - before if path.is_dir()), default=None)
    if new is None:
        return (*trial.values, status, "-", "-", "-", "-")
    try:
        evals = [content for content in RunFiles(new).evals if content["step"] > 0]
    except (OSError, ValueError, yaml.YAMLError):
        evals = []
    last = measured(evals[-1]["total"]) if evals else None
    reached = ("success" if last.is_success else "return", last.number, last.interval) if last else ("-", "-", "-")
    return (*trial.values, status, *reached, str(new))
