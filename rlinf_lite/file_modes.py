"""Files that are written whole or not at all, and the modes of those that others write: safetensors makes its files
0600, whatever the umask."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def write_whole(path: Path, text: str) -> None:
    """Write a text, which readers see all of or nothing."""
    unfinished = path.with_name(f".{path.name}.partial")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


Patience = Callable[[Path, Callable[[], Any], int], Any]
"""`runners.full_disk.Disk.write`."""


def write_once(path: Path, write: Callable[[], Any], num_bytes: int = 0) -> Any:
    """Writes without patience."""
    return write()


class AppendedFile:
    """A file that grows by whole records. What it had no room for is written before the next record, or when it is
    closed."""

    def __init__(self, path: Path, patiently: Patience = write_once) -> None:
        self.path, self._patiently = path, patiently
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def append(self, record: bytes) -> None:
        self._unwritten += record
        self._patiently(self.path, self._write, len(self._unwritten))

    def close(self) -> None:
        try:
            self._write()
        except OSError as error:
            log.warning("%s lacks its last %d bytes: %s", self.path, len(self._unwritten), error.strerror)
        self._file.close()

    def _write(self) -> None:
        size, rest = os.fstat(self._file.fileno()).st_size, memoryview(self._unwritten)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size)
            error.filename = str(self.path)  # "No space left on device" alone does not say where
            raise
        self._unwritten = b""


def follow_umask(files: Iterable[Path]) -> None:
    """Give files the mode that `open` would have given them."""
    mode = 0o666 & ~_umask()
    for file in files:
        with suppress(OSError):  # file systems without modes; a file of another user's worker
            file.chmod(mode)


def _umask() -> int:
    """Read where that is possible: to ask for it by setting it would race with other threads that create files."""
    with suppress(OSError):
        if found := re.search(r"^Umask:\s*(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(found[1], 8)
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
