"""Who writes a directory: one process at a time, told by a file lock that ends with it, however it ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from rlinf_lite.runners.checkpoints import CheckpointError

log = logging.getLogger(__name__)

LOCK = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunInUseError(CheckpointError):
    """Another process writes this run."""


class RunLock:
    """An flock on `<directory>/.lock`, whose text says whose it is. Programs that are started do not inherit it (their
    descriptors close on exec), nor do forks.

    Raises:
        RunInUseError: where another holder lives, in this process or another, on this machine or on one that sees the
            same file system.
        CheckpointError: where the file cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK
        try:
            self._file = self.path.open("a+")
        except OSError as error:
            raise CheckpointError(f"{error.filename} cannot be written: {error.strerror}") from error
        try:
            _lock(self._file)
        except BlockingIOError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise RunInUseError(
                f"{directory} is in use: {holder} writes it. Wait for its end, stop it (Ctrl-C there, or `rlinf-lite "
                "job stop`), or start a run beside it with runner.resume=never"
            ) from error
        self._write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        _held.add(self)

    def release(self) -> None:
        """Let others write; the file stays, and says nobody."""
        if not self._file.closed:
            with suppress(OSError):  # closing is what counts
                self._write("")
            self._file.close()

    def _write(self, text: str) -> None:
        self._file.truncate(0)
        self._file.write(text)
        self._file.flush()


def _lock(file: TextIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        log.warning("%s: no locks on this file system; take care that no other process writes this run", file.name)


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_in_fork() -> None:
    for lock in _held:
        lock._file.close()


os.register_at_fork(after_in_child=_close_in_fork)
