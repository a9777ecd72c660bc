"""Writing to a disk that may be full: the run waits, with its state in memory, and tries again."""

from __future__ import annotations

import errno
import logging
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rlinf_lite.checksums import CheckpointError

T = TypeVar("T")
log = logging.getLogger(__name__)

RETRY_S = 5.0
_SAY_AGAIN_S = 60.0
_CODES = (errno.ENOSPC, errno.EDQUOT)
_IN_TEXT = re.compile(rf"\b(?:Errno|os error) (?:{'|'.join(map(str, _CODES))})\b")  # texts of shutil and safetensors


class DiskFullError(CheckpointError):
    """The disk had no room for a file of a run during the whole time that the run waits."""


def has_no_room(error: BaseException | None) -> bool:
    """Whether the cause of an error is a full disk or quota."""
    if error is None:
        return False
    return getattr(error, "errno", None) in _CODES or bool(_IN_TEXT.search(str(error))) or has_no_room(error.__cause__)


def room_at(path: Path, num_bytes: int = 0) -> str:
    """A text with the free space at a file or directory; `num_bytes`: the size of the file (0: not known)."""
    usage = shutil.disk_usage(next(place for place in (path, *path.absolute().parents) if place.exists()))
    needed = f"needs {num_bytes:,} bytes, and " if num_bytes else ""
    return f"{path} {needed}{usage.free:,} of {usage.total:,} bytes are free"


class Disk:
    """Writes files, and waits while the disk is full. A run's driver writes everything during training through it."""

    def __init__(self, limit_s: float, check: Callable[[], None], hint: Callable[[], str]) -> None:
        """`limit_s`: longest wait. `check` raises to end a wait early; `hint` returns a text on what the user can
        do."""
        self._limit_s, self._check, self._hint = limit_s, check, hint

    def write(self, path: Path, write: Callable[[], T], num_bytes: int = 0) -> T:
        """Call `write`, and repeat while there is no room for `path`; returns its result. `write` must remove its
        partial files if it fails. Raises DiskFullError after the limit; later calls do not wait."""
        began, say_at, waited_s = time.monotonic(), 0.0, 0.0
        while True:
            tried = time.monotonic()
            try:
                written = write()
            except (OSError, CheckpointError) as error:
                if not has_no_room(error):
                    raise
            else:
                if say_at:
                    log.warning("there is room again, after %.0f s: %s is written", waited_s, path)
                return written
            waited_s = time.monotonic() - began
            if waited_s >= self._limit_s:
                limit = f", for {waited_s:.0f} s (runner.phase_timeout_s)" if self._limit_s else ""
                self._limit_s = 0.0
                raise DiskFullError(f"the disk is full: {room_at(path, num_bytes)}{limit}")
            if waited_s >= say_at:
                say_at = max(_SAY_AGAIN_S, 2 * waited_s)
                text = "the disk is full: %s. Make room; the run has waited %.0f s of at most %g s. %s"
                log.warning(text, room_at(path, num_bytes), waited_s, self._limit_s, self._hint())
            pause_s = max(RETRY_S, 10 * (time.monotonic() - tried))  # a large checkpoint takes long to fail
            until = min(time.monotonic() + pause_s, began + self._limit_s)
            while time.monotonic() < until:
                self._check()
                time.sleep(min(0.2, RETRY_S))
