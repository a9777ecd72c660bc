"""The errors of the scheduler, as the driver sees them. Needs neither ray nor torch."""

from __future__ import annotations

from typing import Any


class PlacementError(ValueError):
    """A placement is not allowed by the grammar or by the cluster."""

    def __init__(self, text: str, about: str = "") -> None:
        """`about`: the component or config key that the error is about; the message begins with it."""
        super().__init__(f"{about}: {text}" if about else text)
        self.text, self.about = text, about


class SchedulerError(RuntimeError):
    """Base class of errors between the driver and its workers."""


class ClusterError(SchedulerError):
    """The cluster did not start, or differs from what the config asks for."""


class WorkerError(SchedulerError):
    """A worker's method raised an exception. `__cause__` is the original exception and `worker_traceback` its
    traceback. `origin` is one line, such as "ValueError at /some/file.py:12", followed by the exceptions that caused
    it."""

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
        """The pickled original exception; None if it cannot be pickled."""
        self.original: BaseException | None = None
        """The original exception with its traceback, only in the process in which it was raised."""
        super().__init__(f"{group}[{rank}].{method} raised {summary}\n\nIn the worker:\n{worker_traceback.rstrip()}")

    def __reduce__(self) -> Any:
        fields = (self.group, self.rank, self.method, self.summary, self.worker_traceback, self.pickled, self.origin)
        return WorkerError, fields


class WorkerDiedError(SchedulerError):
    """A worker process died. `log_tail` holds the last lines that it printed."""

    def __init__(self, group: str, rank: int, node: str, reason: str, log_tail: str) -> None:
        self.group, self.rank, self.node, self.reason, self.log_tail = group, rank, node, reason, log_tail
        log = f"\n\nThe last lines of its log:\n{log_tail.rstrip()}" if log_tail.strip() else "\n\nIts log is empty."
        super().__init__(f"{group}[{rank}] on {node} died: {reason}{log}")


class SharedMemoryFullError(SchedulerError):
    """A node's shared memory has no room for a message or for weights."""


class AbortedError(SchedulerError):
    """A receive ended early because the driver called `group.abort(reason)`."""


class PeerError(SchedulerError):
    """A message cannot be sent: its destination does not exist or is gone."""


class CallTimeoutError(SchedulerError, TimeoutError):
    """A group call took longer than its limit; the message names the ranks that are late."""


class RecvTimeoutError(SchedulerError, TimeoutError):
    """No message came in time; the error text names the expected sender."""


class ChannelTimeoutError(SchedulerError, TimeoutError):
    """A channel stayed empty or full for longer than the limit."""
