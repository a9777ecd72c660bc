"""What goes wrong in a cluster, as the driver sees it. Needs neither ray nor torch."""

from __future__ import annotations

from typing import Any


class PlacementError(ValueError):
    """A placement that the grammar or the cluster does not allow."""

    def __init__(self, text: str, about: str = "") -> None:
        """`about`: the component or key of the config that it is about, which the message begins with."""
        super().__init__(f"{about}: {text}" if about else text)
        self.text, self.about = text, about


class SchedulerError(RuntimeError):
    """Anything that goes wrong between the driver and its workers."""


class ClusterError(SchedulerError):
    """The cluster did not come up, or is not what the config says."""


class WorkerError(SchedulerError):
    """A worker's method raised. `__cause__` is the original exception, `worker_traceback` where it was raised, and
    `origin` the same in a line: "ValueError at /some/file.py:12", followed by what that arose from."""

    def __init__(
        self,
        group: str,
        rank: int,
        method: str,
        summary: str,
        worker_traceback: str,
        pickled: bytes | None = None,
        origin: str = "",
    ) -> None:
        self.group, self.rank, self.method = group, rank, method
        self.summary, self.worker_traceback, self.origin = summary, worker_traceback, origin
        self.pickled = pickled
        """The original exception, where it survives pickling."""
        self.original: BaseException | None = None
        """The original exception with its traceback, in the process that it was raised in."""
        super().__init__(f"{group}[{rank}].{method} raised {summary}\n\nIn the worker:\n{worker_traceback.rstrip()}")

    def __reduce__(self) -> Any:
        fields = (self.group, self.rank, self.method, self.summary, self.worker_traceback, self.pickled, self.origin)
        return WorkerError, fields


class WorkerDiedError(SchedulerError):
    """A worker process is gone. `log_tail` holds the last lines that it printed."""

    def __init__(self, group: str, rank: int, node: str, reason: str, log_tail: str) -> None:
        self.group, self.rank, self.node, self.reason, self.log_tail = group, rank, node, reason, log_tail
        log = f"\n\nThe last lines of its log:\n{log_tail.rstrip()}" if log_tail.strip() else "\n\nIts log is empty."
        super().__init__(f"{group}[{rank}] on {node} died: {reason}{log}")


class SharedMemoryFullError(SchedulerError):
    """A message, or weights, find no room in a node's shared memory."""


class AbortedError(SchedulerError):
    """A receive was given up because the driver called `group.abort(reason)`."""


class PeerError(SchedulerError):
    """A message cannot be sent: its destination does not exist or is gone."""


class CallTimeoutError(SchedulerError, TimeoutError):
    """A group call took longer than its limit; the message says which ranks are late."""


class RecvTimeoutError(SchedulerError, TimeoutError):
    """No message came in time; the message says from whom it was expected."""


class ChannelTimeoutError(SchedulerError, TimeoutError):
    """A channel stayed empty, or full, for longer than the limit."""
