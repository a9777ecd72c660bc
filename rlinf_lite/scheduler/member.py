"""One worker of a group, as the driver knows it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from rlinf_lite.scheduler.context import Address, run_on
from rlinf_lite.scheduler.errors import WorkerDiedError
from rlinf_lite.scheduler.nodes import Node, tail_logs

ExplainDeath = Callable[[str, int, str], str]
"""Why a worker (`env[1]`) with this process id has died, of which Ray says that; empty: no more is known."""


@dataclass(eq=False)
class Member:
    """One worker of a group, as the driver knows it."""

    group: str
    rank: int
    node: Node
    actor: Any
    process: Any
    """A reference to the process id and the log files."""
    index: int = 0
    """Which of its process's workers it is."""
    address: Address | None = None
    """Of its mailbox; None until it is constructed."""

    @property
    def pid(self) -> int:
        return int(ray.get(self.process, timeout=5)[0])

    @property
    def log_paths(self) -> list[str]:
        return list(ray.get(self.process, timeout=5)[1])

    def __str__(self) -> str:
        return f"{self.group}[{self.rank}]"

    def death(self, ray_message: str, explain: ExplainDeath | None) -> WorkerDiedError:
        """The error for a dead worker, with the tail of its log; tidies up what it left."""
        where, tail, reason = f"node {self.node.rank} ({self.node.ip})", "", ""
        with suppress(ray.exceptions.RayError):  # it may have died before it could say who it is
            where = f"{where}, pid {self.pid}"
            if explain is not None:
                reason = explain(str(self), self.pid, ray_message)
            try:
                tail = run_on(self.node.node_id, tail_logs, self.log_paths)
            except Exception as error:  # the node may be gone with the worker; its death is still reported
                tail = f"(the log could not be read: {error})"
        self.unlink_socket()
        return WorkerDiedError(self.group, self.rank, where, reason or exit_reason(ray_message), tail)

    def unlink_socket(self) -> None:
        """Tell senders that nobody reads here any more."""
        if self.address is not None:
            with suppress(Exception):  # already gone, with or without its node
                run_on(self.address.node_id, os.unlink, self.address.socket)


def exit_reason(ray_message: str) -> str:
    """What Ray says of a worker's end, in a line."""
    _, found, detail = ray_message.partition("Worker exit type: ")
    if not found:
        return ray_message.strip().splitlines()[-1] if ray_message.strip() else "unknown"
    kind, _, text = detail.partition(" Worker exit detail: ")
    reason = f"{kind.strip()}: {text.split('. Some common causes')[0].strip().rstrip('.')}"
    if "connection error" in reason:
        reason += " (the process was killed by a signal, such as the out-of-memory killer's, or crashed)"
    return reason
