"""`rlinf-lite train --detach`: a run in a process of its own, which goes on when its terminal is closed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rlinf_lite.cli.runs import writer_of
from rlinf_lite.script import own_command, shown_path

_WAIT_S = 120.0
_LOOK_EVERY_S = 0.1


def detach(arguments: Sequence[str], root: Path) -> int:
    """Start `rlinf-lite train` with these arguments, which have been checked, and return once its run has a directory
    below `root`. What it prints goes to `console.log` there (`console_2.log` of a run that goes on).

    Returns 0, or the exit code of a run that ended before, whose output is printed.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=root, prefix="console_", suffix=".log", delete=False) as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "rlinf_lite.cli", "train", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    output, end = Path(file.name), time.monotonic() + _WAIT_S
    while (directory := _directory_of(run.pid, root)) is None and time.monotonic() < end:
        if (code := run.poll()) is not None:
            print(output.read_text(), end="", file=sys.stderr if code else sys.stdout)
            output.unlink()
            return code
        time.sleep(_LOOK_EVERY_S)
    print(f"detached: process {run.pid}")
    if directory is None:
        print(f"  it has no directory in {shown_path(root)} yet, after {_WAIT_S:.0f} s\n  output: {shown_path(output)}")
        return 0
    names = ["console.log", *(f"console_{number}.log" for number in range(2, 1000))]
    output = output.rename(next(path for name in names if not (path := directory / name).exists()))
    command = own_command("rlinf-lite", "rlinf_lite.cli")
    print(f"  output: {shown_path(output)}\n  progress: {command} runs {shown_path(root)}")
    print(f"  stop: {command} stop {shown_path(directory)}")
    return 0


def _directory_of(process: int, root: Path) -> Path | None:
    """The directory of the run that a process of this machine writes."""
    for lock in root.glob("*/.lock"):
        writer = writer_of(lock)
        if writer is not None and writer.process == process and writer.is_alive:
            return lock.parent
    return None
