"""`rlinf-lite`: commands that work from any directory, each a module of this package."""

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
    *("train", "eval", "sweep", "collect", "serve", "export", "configs", "init"),
    *("report", "compare", "runs", "job", "doctor", "info", "completion"),
]
_ABOUT = """commands, each with a --help of its own:
  train       train what a config is about: a policy, by reinforcement learning
              or imitation, or a language model; go on with a run
  eval        measure a saved policy, or a language model, as its run did
  sweep       train with every combination of some values
  collect     write episodes of an expert or a policy as a LeRobotDataset
  serve       a policy behind a WebSocket, for openpi's clients
  export      a policy with a model card, as the Hugging Face Hub expects it
  configs     the configs that come with rlinf_lite: what, task, time, hardware
  init        write an environment or a policy of your own: a file that trains
  report      write a run's report.html
  compare     one page about several runs, their curves over each other
  runs        what there is in results/: status, steps, success
  job         supervised jobs: list them, look at one, stop one
  doctor      check this machine and name the fix for each failure
  info        versions, extras, slots, configs, environments, policies
  completion  what makes bash or zsh complete all of this
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
    parser.add_argument("arguments", nargs="*", metavar="...", help="what that command takes")
    parser.add_argument("--version", action="version", version=f"rlinf_lite {__version__}")
    command, arguments = parser.parse_args(words[:1]).command, words[1:]
    if command not in COMMANDS:
        advice = (
            "`rlinf-lite train` trains these too" if command in ("math", "sft") else did_you_mean(command, COMMANDS)
        )
        parser.error(f"there is no command {command}. {advice}")
    sys.argv = [f"rlinf-lite {command}", *arguments]  # what help, and the run's record of its command, show
    run: Callable[[Sequence[str]], int] = getattr(import_module(f"rlinf_lite.cli.{command}"), command)
    return run(arguments)  # a module each: what one imports, the others do without
