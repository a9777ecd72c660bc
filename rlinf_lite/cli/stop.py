"""`rlinf-lite stop RUN`: stop a run as Ctrl-C in its terminal would. Imports neither torch nor ray, but for `--now`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlinf_lite.cli.runs import read_run, writer_of
from rlinf_lite.script import own_command, shown_path


def stop(arguments: Sequence[str]) -> int:
    """Stop a run and wait until it has ended. Returns the exit code: 0; 1 if it does not run here, or goes on."""
    parser = argparse.ArgumentParser(
        prog="rlinf-lite stop", description="Stop a run of this machine as Ctrl-C would: its last step is saved."
    )
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--now", action="store_true", help="as a second Ctrl-C: end at once, without saving")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="longest wait in seconds (120)")
    options = parser.parse_args(arguments)
    directory, command = options.run, own_command("rlinf-lite", "rlinf_lite.cli")
    writer = writer_of(directory / ".lock")
    if writer is None or not writer.is_alive:
        if writer is not None and not writer.is_here:
            text = f"is written by process {writer.process} of {writer.host}. Stop it there"
        elif (found := read_run(directory) if directory.is_dir() else None) is None:
            text = f"no run. `{command} runs` lists those of results/"
        else:
            text = f"does not run: {found.status} after {found.step} steps"
        print(f"{shown_path(directory)}: {text}", file=sys.stderr)
        return 1
    os.kill(writer.process, signal.SIGTERM)
    if options.now:
        from rlinf_lite.runners.stopping import SAME_REQUEST_S  # takes a second to import

        time.sleep(SAME_REQUEST_S + 0.2)
        if writer.is_alive:
            os.kill(writer.process, signal.SIGTERM)
    end = time.monotonic() + options.timeout
    while writer.is_alive:
        if time.monotonic() > end:
            text = f"process {writer.process} still runs after {options.timeout:.0f} s"
            print(f"{text}. {command} stop --now {shown_path(directory)} ends it without saving", file=sys.stderr)
            return 1
        time.sleep(0.1)
    found = read_run(directory)
    if found is None:
        print("stopped before its first step: it left nothing to go on from")
        return 0
    print(f"{'finished' if found.status == 'finished' else 'stopped'} after {found.step} steps")
    print(f"go on: {command} train {shown_path(directory)}")
    return 0
