"""Files that are written whole or not at all, and the modes of those that others write: safetensors makes its files
0600, whatever the umask."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text, which readers see all of or nothing."""
    unfinished = path.with_name(f".{path.name}.partial")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


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
