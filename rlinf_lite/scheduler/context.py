"""The cluster as one process sees it: the directories on its node, and the `Network` for names and messages.

Needs neither ray nor torch: each runtime brings its own `Network`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlinf_lite.scheduler.errors import SchedulerError

if TYPE_CHECKING:
    from rlinf_lite.scheduler.segments import Parcel

RAY_NAMESPACE = "rlinf_lite"


@dataclass(frozen=True)
class Address:
    """The place of an inbox."""

    node_id: str
    socket: str


class Inbox(Protocol):
    """Messages sent to one thread, which reads them."""

    address: Address

    def wait(self, timeout_s: float | None) -> bool:
        """Wait at most `timeout_s` for a message; returns whether there is one."""

    def take(self) -> tuple[Any, Parcel] | None:
        """The header and parcel of the next message, or None."""

    def close(self) -> None:
        """Stop reading: free the inbox."""


class Network(Protocol):
    """The names and messages of a cluster, as one process uses them."""

    def publish(self, kind: str, name: str, value: Any) -> None:
        """Store a value under a name, for every process of the cluster."""

    def withdraw(self, kind: str, name: str) -> None:
        """Remove a published name."""

    def find(self, kind: str, name: str) -> Any:
        """The value published under a name, or None."""

    def known_names(self, kind: str) -> list[str]:
        """The published names, sorted."""

    def inbox(self, label: str) -> Inbox:
        """Create an inbox of this process."""

    def send(self, addresses: Sequence[Address], header: Any, obj: Any = None) -> None:
        """Send a picklable header and any object; every inbox gets a copy. Never waits for a reader."""

    def lives(self, address: Address) -> bool:
        """Whether an inbox is still read. Only known for inboxes on this node; True for those on other nodes."""

    def remove_inbox(self, address: Address) -> None:
        """Mark an inbox as gone, so that senders notice, and free its unread messages."""

    def keep(self, name: str, kind: type[Any], *args: Any) -> bool:
        """Create an object with asynchronous methods that every process of the cluster can call, and that ends with
        this process. Returns False if the name is taken."""

    def is_kept(self, name: str) -> bool:
        """Whether an object of this name is kept by some process."""

    def drop(self, name: str) -> None:
        """End a kept object."""

    def ask(self, name: str, method: str, *args: Any) -> Future[Any]:
        """Call a method of a kept object. The future raises what the method raises, and SchedulerError if the object
        is gone."""

    def waiting(self) -> AbstractContextManager[None]:
        """A context for waiting on something that another worker does."""

    def clock(self) -> float:
        """The time, in seconds, against which time limits are measured."""

    def run_on(self, node_id: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on a node; in this process if it is this node."""


@dataclass(frozen=True)
class ProcessContext:
    """The cluster as one process (driver or worker) sees it."""

    uid: str
    node_id: str
    temp_dir: str
    shm_dir: str
    network: Network = field(repr=False)
    runtime: Literal["ray", "local"] = "ray"
    monitor: str | None = None  # name of the Ray actor that workers send their heartbeats to, if any


_current: ProcessContext | None = None


def set_context(context: ProcessContext | None) -> None:
    global _current
    _current = context


def get_context() -> ProcessContext:
    if _current is None:
        raise SchedulerError(
            "This process belongs to no cluster: make a Cluster() first, or launch the worker in a group."
        )
    return _current


def is_local() -> bool:
    """Whether workers are threads of this process (`cluster.runtime: local`)."""
    return _current is not None and _current.runtime == "local"


def network() -> Network:
    """The network of this process. Raises SchedulerError if the process belongs to no cluster."""
    return get_context().network


def run_on(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on a node; in this process if it is this node."""
    return network().run_on(node_id, function, *args)
