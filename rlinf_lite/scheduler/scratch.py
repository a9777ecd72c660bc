"""The directories of a cluster on one node: sockets and Ray's files in the temp directory, large data in shared memory.

Each directory has a lock file that its owner keeps locked until it ends. So the next start can distinguish the
directories of dead owners from those of living ones, also across containers that share the directories. Not filelock:
its locks are exclusive, and the check needs a shared lock, so that two checking processes do not look like owners.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress

SHM_ROOT = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
_PREFIX = "rlinf_lite-"
_WITHOUT_LOCK_S = 60.0  # a directory without a lock file may be removed at this age
_MAX_ROOT_LENGTH = 14  # a Unix socket's path has at most 107 characters; we append 25, and Ray another 68


class ScratchDirs:
    """The directories `temp` and `shm` of the cluster `uid` on this node; `remove()` deletes both."""

    def __init__(self, uid: str | None = None) -> None:
        roots = (temp_root(), SHM_ROOT)
        for root in dict.fromkeys(roots):
            remove_stale(root)
        self.uid = uid or secrets.token_hex(4)
        suffix = secrets.token_hex(2)  # two nodes of one cluster may share a machine
        self.temp, self.shm = (
            os.path.join(root, f"{_PREFIX}{kind}{self.uid}{suffix}") for root, kind in zip(roots, "ts", strict=True)
        )
        self._locks = [_create(path) for path in (self.temp, self.shm)]

    def remove(self) -> None:
        for path in (self.temp, self.shm):
            shutil.rmtree(path, ignore_errors=True)
        for lock in self._locks:
            os.close(lock)
        self._locks = []


def temp_root() -> str:
    """The temp directory, or /tmp if its path is too long for sockets."""
    root = tempfile.gettempdir()
    return root if len(root) <= _MAX_ROOT_LENGTH else "/tmp"


def living_temp_dirs() -> list[str]:
    """The `temp` directory of each cluster of this user that runs on this node."""
    with os.scandir(temp_root()) as entries:
        paths = sorted(entry.path for entry in entries if entry.name.startswith(f"{_PREFIX}t"))
    living = []
    for path in filter(_is_ours, paths):
        with suppress(OSError), open(os.path.join(path, "lock")) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                living.append(path)
    return living


def _is_ours(path: str) -> bool:
    """Whether the path belongs to this user: directories of other users are not trusted."""
    with suppress(FileNotFoundError):
        return os.lstat(path).st_uid == os.getuid()
    return False


def _create(path: str) -> int:
    os.mkdir(path, 0o700)
    lock = os.open(os.path.join(path, "lock"), os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def remove_stale(root: str) -> None:
    """Delete the directories of dead owners: those of this user whose lock no process holds."""
    with os.scandir(root) as entries:
        paths = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for path in paths:
        with suppress(OSError):  # another user's, locked, or deleted by another process meanwhile
            try:
                lock = os.open(os.path.join(path, "lock"), os.O_RDWR)
            except FileNotFoundError:  # it is being made, or Ray made it again after its removal
                if _is_ours(path) and time.time() - os.stat(path).st_mtime > _WITHOUT_LOCK_S:
                    shutil.rmtree(path, ignore_errors=True)
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
