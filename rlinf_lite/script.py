"""The frame of a command line program: what Ctrl-C and SIGTERM do while it starts and ends. Imports nothing heavy."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_script(main: Callable[[], int]) -> int:
    """The exit code of a program: what `main` returns, and 130 where Ctrl-C or SIGTERM ends it outside of `Runner.run`,
    which deals with them itself. Both raise KeyboardInterrupt, so that what was started is shut down in order, also
    where the shell that started us has it ignore SIGINT. 141 where nobody reads its output any more (`--help | head`),
    as of a program that SIGPIPE ends. Modules in the working directory can be imported, after all others."""
    with suppress(OSError):  # a directory that was deleted
        sys.path += [os.getcwd()] * (not {"", os.getcwd()} & set(sys.path))
    before, sys.unraisablehook = sys.unraisablehook, _raise_again
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler)
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        sys.unraisablehook = before


def own_command(program: str, module: str) -> str:
    """What to type to start `program` of this Python's: its name where a shell finds this very one, else its path, from
    the working directory where that is above; where it is not installed, as `module` of this Python."""
    path = Path(sys.executable).parent / program
    if not path.is_file():
        return f"{shlex.quote(sys.executable)} -m {module}"
    if shutil.which(program) == str(path):
        return program
    return shlex.quote(shown_path(path))


def shown_path(path: Path) -> str:
    """As it is typed here: from the working directory where that is above."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _output_is_closed() -> bool:
    output, events = sys.stdout.fileno(), select.poll()
    events.register(output, 0)
    if not any(event & select.POLLERR for _, event in events.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # Python flushes once more when it exits
    return True


def _raise_again(unraisable: Any) -> None:
    """What Python does with exceptions that it drops: those in destructors, and in what other packages have it call at
    a fork. A Ctrl-C that falls in there would be lost."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)
