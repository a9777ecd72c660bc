"""`rlinf-lite`: the examples as commands that work from any directory, and what this machine and installation have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from rlinf_lite import __version__
from rlinf_lite.cli.examples import load_example
from rlinf_lite.cli.parse import EXAMPLES, parse_cli
from rlinf_lite.script import run_script

__all__ = ["COMMANDS", "EXAMPLES", "main", "parse_cli"]

COMMANDS = [
    *(*EXAMPLES, "sweep", "collect", "serve", "export", "configs", "init"),
    *("report", "compare", "runs", "job", "doctor", "info", "completion"),
]
_ABOUT = """commands, each with a --help of its own:
  train       train a policy by reinforcement learning
  eval        measure a saved policy on the evaluation episodes of its run
  sft         collect demonstrations and train a policy on them
  math        train a language model on problems with known answers
  sweep       train with every combination of some values, one after the other
  collect     write episodes of an expert or a policy as a LeRobotDataset
  serve       a policy behind a WebSocket, for openpi's clients
  export      a policy with a model card, as the Hugging Face Hub expects it
  configs     the configs that come with rlinf_lite: what, task, time, hardware
  init        write a file with an environment or a policy of your own, which trains
  report      write a run's report.html
  compare     one page about several runs, their curves over each other
  runs        what there is in results/: status, steps, success
  job         supervised jobs: list them, look at one, stop one
  doctor      check this machine and name the fix for each failure
  info        versions, extras, slots, configs, environments, policies
  completion  what makes bash or zsh complete all of this
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. The training commands are the scripts in examples/."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_script(lambda: _run(words))


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rlinf-lite", epilog=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="see below")
    parser.add_argument("arguments", nargs="*", metavar="...", help="what that command takes")
    parser.add_argument("--version", action="version", version=f"rlinf_lite {__version__}")
    command, arguments = parser.parse_args(words[:1]).command, words[1:]
    if command not in EXAMPLES:  # a module each: what one imports, the others do without
        run: Callable[[Sequence[str]], int] = getattr(import_module(f"rlinf_lite.cli.{command}"), command)
        return run(arguments)
    sys.argv = [f"rlinf-lite {command}", *arguments]
    code: int = load_example(command).main()
    return code
