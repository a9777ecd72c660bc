"""What a process knows about the cluster that it belongs to, and how it finds names and reaches others.

Needs neither ray nor torch: how processes find and reach each other, the `Network` of the runtime says.
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
    """Where an inbox is."""

    node_id: str
    socket: str


class Inbox(Protocol):
    """Where one thread reads what is sent to it."""

    address: Address

    def wait(self, timeout_s: float | None) -> bool:
        """Whether something is there, after at most `timeout_s`."""

    def take(self) -> tuple[Any, Parcel] | None:
        """The next header and parcel, if there is one."""

    def close(self) -> None:
        """Nobody reads it any more."""


class Network(Protocol):
    """Names and messages of a cluster, as one process uses them."""

    def publish(self, kind: str, name: str, value: Any) -> None:
        """Make something known to every process."""

    def withdraw(self, kind: str, name: str) -> None:
        """Make a name unknown."""

    def find(self, kind: str, name: str) -> Any:
        """What was published under a name, else None."""

    def known_names(self, kind: str) -> list[str]:
        """Names that were published, sorted."""

    def inbox(self, label: str) -> Inbox:
        """A new inbox of this process."""

    def send(self, addresses: Sequence[Address], header: Any, obj: Any = None) -> None:
        """Send a picklable header and any object, of which every inbox gets a copy. Never waits for a reader."""

    def lives(self, address: Address) -> bool:
        """Whether an inbox on this node is still read; of another node's, nothing is known, and it is taken to be."""

    def remove_inbox(self, address: Address) -> None:
        """Tell senders that nobody reads an inbox any more, and free what was not read."""

    def keep(self, name: str, kind: type[Any], *args: Any) -> bool:
        """Make an object with asynchronous methods, which every process of the cluster can ask, and which ends with
        this process. False where there is one of this name."""

    def is_kept(self, name: str) -> bool:
        """Whether some process keeps an object of this name."""

    def drop(self, name: str) -> None:
        """End an object that is kept."""

    def ask(self, name: str, method: str, *args: Any) -> Future[Any]:
        """Call a method of an object that is kept. The result raises what the method does, and SchedulerError where
        the object is gone."""

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait for something that another worker does."""

    def clock(self) -> float:
        """Seconds that count against limits of time."""

    def run_on(self, node_id: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on a node: here where it is this one."""


@dataclass(frozen=True)
class ProcessContext:
    """The cluster as one process (driver or worker) sees it."""

    uid: str
    node_id: str
    temp_dir: str
    shm_dir: str
    network: Network = field(repr=False)
    runtime: Literal["ray", "local"] = "ray"
    monitor: str | None = None  # the Ray actor that workers tell what they are doing, if any


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
    """That of this process. Raises SchedulerError where it belongs to no cluster."""
    return get_context().network


def run_on(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on a node: here where it is this one."""
    return network().run_on(node_id, function, *args)
