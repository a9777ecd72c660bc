"""`rlinf-lite sweep NAME key=v1,v2 key2=a,b`: every combination as a run of its own, one after the other, as
`rlinf-lite train` (or sft, math) would run it. Imports neither torch nor ray."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rlinf_lite.cli.parse import COMMAND_OF, names_and_overrides
from rlinf_lite.cli.tables import print_table
from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.report.page import measured
from rlinf_lite.report.run_files import RunFiles

COMMAND = (sys.executable, "-m", "rlinf_lite.cli")
PATIENCE = 2
"""Ctrl-C's that a run gets, the first of which it obeys in order; the next one kills it."""


MAX_NAME = 70
"""Characters of a run's name; its number keeps it apart."""


@dataclass(frozen=True)
class Trial:
    """One combination of the values."""

    values: tuple[str, ...]
    run_name: str
    log_path: Path
    words: tuple[str, ...]
    """Of the command, after `rlinf-lite`."""

    def directories(self) -> set[Path]:
        """Of runs of this name."""
        return set(self.log_path.glob(f"{self.run_name}-*"))


def sweep(arguments: Sequence[str]) -> int:
    """Run all and print the table; returns 1 where one failed, 2 where a config is wrong, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="rlinf-lite sweep", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="+", metavar="NAME key=v1,v2", help="a config, what varies, other overrides")
    parser.add_argument("--dry-run", action="store_true", help="list the commands; exit")
    options = parser.parse_intermixed_args(arguments)
    names, overrides = names_and_overrides(options.words)
    if len(names) != 1:
        parser.error(f"name one config, here are {len(names)}{': ' * bool(names)}{', '.join(names)}")
    try:
        keys, trials = trials_of(names[0], overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.dry_run:
        print("\n".join(f"rlinf-lite {shlex.join(trial.words)}" for trial in trials))
        return 0

    titles = [key.rpartition(".")[2] for key in keys]
    titles = [title if titles.count(title) == 1 else key for title, key in zip(titles, keys, strict=True)]
    signal.signal(
        signal.SIGHUP, signal.default_int_handler
    )  # of a terminal that is closed: the run is not in its group
    rows, code = list[tuple[str, ...]](), 0
    for number, trial in enumerate(trials, start=1):
        said = ", ".join(f"{key}={value}" for key, value in zip(keys, trial.values, strict=True))
        print(f"{number} of {len(trials)}: {said}", flush=True)
        before = trial.directories()
        ended, interrupted = _run(trial)
        rows.append(_row(trial, before, ended))
        code = 130 if interrupted or ended == 130 else 1 if ended else code
        if code == 130:
            break
    print()
    print_table([*titles, "status", "metric", "last", "95%", "directory"], rows)
    if len(rows) < len(trials):
        print(f"interrupted: {len(trials) - len(rows)} of {len(trials)} were not started")
    return code


def trials_of(name: str, overrides: Sequence[str]) -> tuple[list[str], list[Trial]]:
    """The keys that vary, and a run for each combination of their values, the last key's varying fastest. Raises
    ConfigError, also for what is wrong with the config of any of them."""
    keys, choices, fixed = list[str](), list[list[str]](), list[str]()
    for text in overrides:
        try:
            item = OverridesParser.create().parse_override(text)
        except HydraException:
            fixed.append(text)  # load_config says what is wrong with it
            continue
        if item.is_sweep_override():
            keys.append(item.key_or_group)
            choices.append([str(value) for value in item.sweep_string_iterator()])
        else:
            fixed.append(text)
    if not keys:
        raise ConfigError(name, ["nothing varies. Give a key several values, for example runner.seed=0,1,2"])
    trials, problems = [], list[str]()
    for number, values in enumerate(itertools.product(*choices), start=1):
        chosen = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        try:
            config = load_config(name, [*fixed, *chosen])
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
            continue
        parts = [f"{key.rpartition('.')[2]}{value.strip('[{}]')}" for key, value in zip(keys, values, strict=True)]
        parts = [f"{config.runner.run_name}-{number:02d}", *parts]
        run_name = "-".join(re.sub(r"[^\w.-]+", "_", part, flags=re.ASCII) for part in parts)[:MAX_NAME]
        command = COMMAND_OF[config.runner.task_type]
        if command == "eval":
            raise ConfigError(name, ["runner.task_type: is eval, which trains nothing. A sweep is of training runs"])
        words = (command, name, *fixed, *chosen, f"runner.run_name={run_name}")
        trials.append(Trial(values, run_name, Path(config.runner.logger.log_path), words))
    if problems:
        raise ConfigError(name, problems)
    return keys, trials


def _run(trial: Trial) -> tuple[int, bool]:
    """Start it and wait for its end: its exit code, and whether Ctrl-C came, which is passed on."""
    requests = 0
    with subprocess.Popen([*COMMAND, *trial.words], process_group=0) as process:  # else a terminal asks it as well
        while True:
            try:
                return process.wait(), requests > 0
            except KeyboardInterrupt:
                requests += 1
                process.send_signal(signal.SIGINT if requests <= PATIENCE else signal.SIGKILL)


def _row(trial: Trial, before: set[Path], code: int) -> tuple[str, ...]:
    status = {0: "finished", 130: "stopped"}.get(code, f"failed ({code})")
    new = max(trial.directories() - before, default=None)
    if new is None:
        return (*trial.values, status, "-", "-", "-", "-")
    try:
        evals = [content for content in RunFiles(new).evals if content["step"] > 0]
    except (OSError, ValueError, yaml.YAMLError):
        evals = []
    last = measured(evals[-1]["total"]) if evals else None
    reached = ("success" if last.is_success else "return", last.number, last.interval) if last else ("-", "-", "-")
    return (*trial.values, status, *reached, str(new))
