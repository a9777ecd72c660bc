"""Worker: the base class of everything that runs in its own process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlinf_lite.scheduler.dispatch import MeshPlace
from rlinf_lite.scheduler.errors import PeerError
from rlinf_lite.scheduler.heartbeat import Activity

if TYPE_CHECKING:
    from rlinf_lite.scheduler.group import WorkerGroup
    from rlinf_lite.scheduler.mailbox import Mailbox


@dataclass(frozen=True)
class Span:
    """An operation of a process from `start` to `end`, in seconds of `time.time()`."""

    name: str
    start: float
    end: float
    process: str
    """Group and rank, for example `env 0`."""


class Worker:
    """A process of a group. `__init__` should only set attributes; heavy work goes into a method such as `init`.

    Every public method of a subclass can be called through the group. The attributes below are set before `__init__`
    runs. Outside a cluster, a worker is rank 0 of 1.
    """

    name: str = "local"
    """The group's name."""
    role: str = "local"
    """The component, such as `actor`."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The rank among the group's workers on the same node."""
    local_world_size: int = 1
    node_rank: int = 0
    device: str = "cpu"
    """The torch device: `cuda:0` (of the devices that this process sees) on a GPU slot, else `cpu`."""
    master_addr: str = "127.0.0.1"
    """The address of rank 0's node, for process groups."""
    master_port: int = 0
    """A port that is free there, and reserved for a minute after the launch."""

    fused: Mapping[str, Worker] = MappingProxyType({})
    """The workers of this process by role, itself included; several if groups were fused."""

    failover: ClassVar[Literal["worker", "group", "job"]] = "group"
    """The part that restarts if a worker fails in a supervised job: `worker`, this worker alone (its last `init` call
    restores it); `group`, the whole group (its ranks share state); `job`, everything."""

    _activity: Activity = Activity()
    _mailbox: Mailbox | None = None
    _spans: list[Span] | None = None
    _mesh_places: Mapping[str, MeshPlace] = MappingProxyType({})
    _not_callable: ClassVar[frozenset[str]] = frozenset(
        {
            "create_group",
            "send",
            "recv",
            "recv_any",
            "recv_first",
            "check_abort",
            "timer",
            "join_mesh",
            "report_progress",
        }
    )

    @classmethod
    def create_group(cls, *args: Any, **kwargs: Any) -> WorkerGroup:
        """Create a group of this class, which is not running yet; the arguments are those of `__init__`."""
        from rlinf_lite.scheduler.group import WorkerGroup

        return WorkerGroup(cls, args, kwargs)

    def send(self, obj: Any, group: str, rank: int | Sequence[int], tag: object = None) -> None:
        """Send any picklable object to one or several workers. Returns at once; never waits for the receiver. An object
        for several workers of another node crosses the network once. Raises PeerError.

        The receiver gives a tag too, and gets only messages with an equal tag (`...`: with any), so that messages of
        different steps are not mixed up.
        """
        self._connected().send(obj, group, rank if isinstance(rank, Sequence) else [rank], tag)

    def recv(self, group: str, rank: int, timeout_s: float | None = None, tag: object = None) -> Any:
        """The next message of one worker, in the order it sent them. Raises RecvTimeoutError and AbortedError."""
        return self._connected().recv({group: tag}, rank, timeout_s)[2]

    def recv_any(self, group: str, timeout_s: float | None = None, tag: object = None) -> tuple[int, Any]:
        """The next message of any worker of a group, in order of arrival, as (source rank, object)."""
        return self._connected().recv({group: tag}, None, timeout_s)[1:]

    def recv_first(self, tags: Mapping[str, object], timeout_s: float | None = None) -> tuple[str, int, Any]:
        """The next message of any worker of several groups, as (group, source rank, object). `tags`: the wanted tag by
        group. If several groups have sent messages, those of the group that `tags` names first come first."""
        return self._connected().recv(tags, None, timeout_s)

    def check_abort(self, doing: str) -> None:
        """Raise AbortedError if the group was aborted; for long work that receives no messages."""
        if self._mailbox is not None:
            self._mailbox.check_abort(doing)

    def report_progress(self) -> None:
        """Report that a long method makes progress, so that the worker is not taken for hanging. Code without access to
        a worker calls `rlinf_lite.scheduler.report_progress`."""
        self._activity.made_progress()

    def join_mesh(self, mesh: str, dp_rank: int, dp_size: int, collects: bool = True) -> None:
        """Set this worker's position in a device mesh, for its `nd_compute(mesh)` methods.

        Workers of one data-parallel rank (tensor-parallel workers) get the same shard; one of them `collects`: its
        outputs count as those of the rank. With torch's DeviceMesh of ("dp", "tp"):
        `join_mesh("actor", mesh.get_local_rank("dp"), mesh["dp"].size(), mesh.get_local_rank("tp") == 0)`.
        """
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} is not within 0..{dp_size - 1}")
        self._mesh_places = {**self._mesh_places, mesh: MeshPlace(dp_rank, dp_size, collects)}

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Record a span: `with self.timer("simulate"): ...`."""
        start = time.time()
        self._activity.made_progress()
        try:
            yield
        finally:
            self._activity.made_progress()
            self._spans = self._spans or []
            self._spans.append(Span(name, start, time.time(), f"{self.name} {self.rank}"))

    def pop_spans(self) -> list[Span]:
        """The spans recorded since the last call."""
        spans, self._spans = self._spans, None
        return spans or []

    def _connected(self) -> Mailbox:
        if self._mailbox is None:
            raise PeerError(f"{type(self).__name__} was not launched in a group: it cannot send messages.")
        return self._mailbox
