"""What a cluster of several nodes keeps on each of them: it passes messages on, reads logs, and cleans up."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

from rlinf_lite.scheduler.context import ProcessContext
from rlinf_lite.scheduler.mailbox import SocketPool, data_frames
from rlinf_lite.scheduler.scratch import ScratchDirs
from rlinf_lite.scheduler.segments import open_segment, pack_buffers


class NodeAgent:
    """One actor per node; a cluster of one node needs none, since the driver does all of this itself."""

    def __init__(self, uid: str, node_id: str) -> None:
        self._dirs = ScratchDirs(uid)
        self._pool = SocketPool()
        self._context = ProcessContext(uid, node_id, self._dirs.temp, self._dirs.shm, single_node=False)

    def __repr__(self) -> str:
        return "agent"

    def context(self) -> ProcessContext:
        return self._context

    def deliver(self, path: str, group: str, rank: int, epoch: int, head: bytes, arrays: list[Any]) -> None:
        """Pass on a message of a worker on another node to a mailbox on this one."""
        parcel = pack_buffers(head, [memoryview(array) for array in arrays], self._context.shm_dir)
        self._pool.push(path, data_frames(group, rank, epoch, parcel))

    def push(self, path: str, frames: list[bytes]) -> None:
        self._pool.push(path, frames)

    def fetch_segment(self, path: str, spans: list[tuple[int, int]]) -> list[Any]:
        """The buffers of a segment on this node, for a reader on another one."""
        import numpy as np

        return [np.frombuffer(buffer, np.uint8) for buffer in open_segment(path, spans)]

    def free_port(self) -> int:
        return free_port()

    def tail(self, paths: list[str]) -> str:
        return tail_logs(paths)

    def unlink(self, path: str) -> None:
        with suppress(OSError):
            os.unlink(path)

    def close(self) -> None:
        self._dirs.remove()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def tail_logs(paths: list[str], num_lines: int = 30, num_bytes: int = 16384) -> str:
    """The last lines of a worker's stdout and stderr files, in that order; empty ones are left out."""
    tails = []
    for path in paths:
        with suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - num_bytes))
            lines = file.read().decode(errors="replace").splitlines()
            # Ray marks its own bookkeeping lines with a leading colon
            tails.append(
                "\n".join(
                    [line for line in lines if not line.startswith((":actor_name:", ":job_id:", ":task_name:"))][
                        -num_lines:
                    ]
                )
            )
    return "\n".join(tail for tail in tails if tail)
