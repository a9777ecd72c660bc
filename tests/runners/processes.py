"""The processes that a program starts."""

import subprocess
import time


def processes_below(pid):
    """All descendants of a process, by parent links."""
    rows = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.split()
    children: dict[int, list[int]] = {}
    for child, parent in zip(map(int, rows[::2]), map(int, rows[1::2]), strict=True):
        children.setdefault(parent, []).append(child)
    found, stack = [], [pid]
    while stack:
        found += (below := children.get(stack.pop(), []))
        stack += below
    return found


def alive(pids):
    def running(pid):
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in pids if running(pid)]


def wait_until_gone(pids, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive(pids)
