"""Memory of this machine, and bytes as text."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path


def gpu_bytes() -> int | None:
    """Bytes of memory of this machine's smallest GPU; None if not known."""
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split()
        return min(int(size) * 2**20 for size in found)
    return None


def free_host_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that are available to new processes of this machine, or of its container. Cached files count as
    available."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    if (group / "memory.max").is_file() and (limit := (group / "memory.max").read_text().strip()) != "max":
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(used["active_file"]) + int(used["inactive_file"])
        free = min(free, int(limit) - int((group / "memory.current").read_text()) + cached)
    return free


def byte_text(count: int) -> str:
    """A number of bytes as text: `1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
