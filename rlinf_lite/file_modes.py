"""The modes of files that others write: safetensors makes its files 0600, whatever the umask."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


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
