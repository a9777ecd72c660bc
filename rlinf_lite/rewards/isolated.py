"""A function in a process of its own, which ends where a call takes too long and is started again for the next."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

from rlinf_lite.rewards.registry import RewardError

START_TIMEOUT_S = 120.0
_GRACE_S = 1.0  # the process ends itself at its limit; after so much more it is killed


class CallFailedError(Exception):
    """A call raised, returned no finite number, took too long or brought its process down. Its text is a traceback."""


class IsolatedFunction:
    """`pkg.module:function`, called with a limit of `timeout_s` seconds per call.

    Raises RewardError where the function cannot be imported.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path, self.timeout_s = path, timeout_s
        self._start()

    def __call__(self, *arguments: Any) -> float:
        """Its score. Raises CallFailedError."""
        if self._process.poll() is not None:
            self._start()
        try:
            self._connection.send(arguments)
            if not self._connection.poll(self.timeout_s + _GRACE_S):
                raise CallFailedError(self._ended(f"took longer than {self.timeout_s} s and was killed"))
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise CallFailedError(self._ended("ended its process")) from error
        if isinstance(answer, str):
            raise CallFailedError(answer)
        return float(answer)

    def close(self) -> None:
        self._stop()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process runs)
        fds = (theirs.fileno(), self._log.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlinf_lite.rewards.child", *map(str, fds), self.path, str(self.timeout_s)],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            process_group=0,  # so that what it starts can be killed with it, and no Ctrl-C reaches it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        theirs.close()
        self._stop = weakref.finalize(self, _end, self._process, self._connection, self._log)
        try:
            problem = self._connection.recv() if self._connection.poll(START_TIMEOUT_S) else "it takes too long"
        except (EOFError, OSError):
            problem = self._ended("ended its process")
        if problem is not None:
            self._stop()
            raise RewardError(f"reward function {self.path!r} cannot be imported. Correct reward.fn.\n{problem}")

    def _ended(self, how: str) -> str:
        """What is known about a process that did not answer, once it is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed below
            self._process.wait(_GRACE_S)
        code = self._process.poll()
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")
        self._stop()
        if log.startswith("Timeout"):
            return f"{self.path} took longer than {self.timeout_s} s and was stopped.\n{log}"
        return f"{self.path} {how} (exit code {code}).\n{log}"


def _end(process: subprocess.Popen[bytes], connection: Connection, log: IO[bytes]) -> None:
    connection.close()
    log.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
