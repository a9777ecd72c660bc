"""The command line program `rlinf-lite`. Its commands work from any directory; each is a module of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from rlinf_lite import __version__
from rlinf_lite.cli.parse import parse_cli
from rlinf_lite.registry import did_you_mean
from rlinf_lite.script import run_script

__all__ = ["COMMANDS", "main", "parse_cli"]

COMMANDS = [
    *("train", "eval", "sweep", "collect", "reward", "serve", "export", "configs", "init"),
    *("report", "compare", "runs", "stop", "job", "doctor", "info", "completion"),
]
_ABOUT = """commands, each with a --help of its own:
  train       train a policy by reinforcement learning or imitation, or a
              language model, as a config says; continue a run
  eval        measure a saved policy, or a language model, as its run did
  sweep       train with every combination of several values
  collect     write episodes of an expert or a policy as a LeRobotDataset
  reward      train a success classifier on such episodes, as a reward
  serve       serve a policy over a WebSocket, to openpi's clients
  export      write a policy with a model card for the Hugging Face Hub
  configs     list the configs that come with rlinf_lite: task, time, hardware
  init        write a file with an environment or a policy of your own
  report      write a run's report.html
  compare     write one page about several runs, with their curves
  runs        list the runs in results/: status, steps, success
  stop        stop a run, as Ctrl-C in its terminal would
  job         list, inspect or stop supervised jobs
  doctor      check this machine and name the fix for each failure
  info        list versions, extras, slots, configs, environments, policies
  completion  print a script that completes all of this in bash or zsh
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_script(lambda: _run(words))


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rlinf-lite", epilog=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", help="see below")
    parser.add_argument("arguments", nargs="*", metavar="...", help="arguments of that command")
    parser.add_argument("--version", action="version", version=f"rlinf_lite {__version__}")
    command, arguments = parser.parse_args(words[:1]).command, words[1:]
    if command not in COMMANDS:
        advice = (
            "`rlinf-lite train` trains these too" if command in ("math", "sft") else did_you_mean(command, COMMANDS)
        )
        parser.error(f"there is no command {command}. {advice}")
    sys.argv = [f"rlinf-lite {command}", *arguments]  # shown by help and by the run's record of its command
    run: Callable[[Sequence[str]], int] = getattr(import_module(f"rlinf_lite.cli.{command}"), command)
    return run(arguments)  # only this command's module is imported
