"""A Python module in a process of its own, at the other end of a pipe."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO

_GRACE_S = 1.0


class ChildProcess:
    """Runs `python -m module fd log_fd *arguments`: `fd` is the child's end of `connection`, `log_fd` a file that
    `last_words` reads.

    The child and all processes that it started are killed when this object is deleted. Where this process is killed,
    the child's `connection` closes. multiprocessing is not used: its children import the user's `__main__` again, and
    killing one leaves the processes that it started.
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process runs)
        fds = (theirs.fileno(), self._log.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, fds), *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            process_group=0,  # so that what it starts can be killed with it, and no Ctrl-C reaches it
            env={
                **os.environ,
                **(environment or {}),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
        )
        theirs.close()
        self._last_words: tuple[int | None, str] | None = None
        self.close = weakref.finalize(self, _end, self._process, self.connection, self._log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def last_words(self) -> tuple[int | None, str]:
        """Exit code (None: the child has not ended by itself) and log of the child, which is closed."""
        if self._last_words is not None:
            return self._last_words
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed below
            self._process.wait(_GRACE_S)
        code = self._process.poll()
        self._log.seek(0)
        self._last_words = code, self._log.read().decode(errors="replace")
        self.close()
        return self._last_words


def sendable(error: Exception) -> Exception:
    """The error with its traceback as a note, or a RuntimeError with the same text if it cannot be pickled."""
    error.add_note("".join(traceback.format_exception(error)))
    error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a user's error class may fail in any way when it is pickled
        return RuntimeError(f"{type(error).__name__}: {error}\n{error.__notes__[-1]}")
    return error


def _end(process: subprocess.Popen[bytes], connection: Connection, log: IO[bytes]) -> None:
    connection.close()
    log.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
