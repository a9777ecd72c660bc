"""The interface between worker groups and the runtime: `cluster.runtime` is ray (processes) or local (threads).

A runtime starts hosts of workers, calls them, and ends them; a `Network` (context.py) carries messages between workers.
`tests/scheduler/test_runtimes.py` tests the contract of both runtimes. Needs neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlinf_lite.scheduler.errors import WorkerError

if TYPE_CHECKING:
    from rlinf_lite.scheduler.context import Network
    from rlinf_lite.scheduler.placement import ClusterShape

Definition = tuple[type[Any], tuple[Any, ...], dict[str, Any]]
"""A worker's class, and the arguments of its constructor."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    rank: int
    node_id: str
    ip: str
    num_gpus: int


class Remote(Protocol):
    """The driver's handle on the host of one process's workers."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the host, after earlier calls; returns a reference to the result at once. References among
        the arguments are replaced by their values."""

    @property
    def pid(self) -> int: ...
    @property
    def log_paths(self) -> list[str]: ...
    def log_tail(self) -> str:
        """The last lines that the process printed."""


class CallFailed(Exception):
    """A call has no result: its method raised (`raised`), its process died, or the result cannot be sent (`text`)."""

    def __init__(self, text: str, raised: WorkerError | None = None) -> None:
        super().__init__(text)
        self.text, self.raised = text, raised

    def is_of(self, remote: Remote) -> bool:
        """Whether the failure is the death of this host's process."""
        return False


class Runtime(Protocol):
    """Starts, calls and ends the hosts of a `Cluster`'s workers."""

    nodes: list[Node]
    shape: ClusterShape

    @property
    def network(self) -> Network:
        """The network by which workers find each other and send messages."""

    def start(
        self,
        title: str,
        name: str,
        rank: int,
        node: Node,
        slots: Sequence[int],
        env_vars: Mapping[str, str],
        methods: Sequence[Iterable[str]],
    ) -> Remote:
        """Start a host for workers with these methods, on some slots of a node. `title`: of its process in `ps`."""

    def build(self, remote: Remote, identities: Sequence[dict[str, Any]], epoch: int, payload: Any) -> Any:
        """Construct a host's workers from `pack`'s payload; returns a reference to the addresses of their inboxes."""

    def pack(self, definitions: Sequence[Definition]) -> Any:
        """The payload from which `build` constructs workers."""

    def get(self, refs: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """Results of calls; waits at most `timeout_s` seconds of real time. Raises TimeoutError and CallFailed."""

    def ready(self, refs: Sequence[Any]) -> list[Any]:
        """The references among `refs` whose calls have ended."""

    def put(self, value: Any) -> Any:
        """A reference to a value, which can be an argument of several calls."""

    def call_id(self, ref: Any) -> str:
        """The id by which the host knows a call."""

    def drop(self, refs: Sequence[Any]) -> None:
        """Declare that these results are no longer needed."""

    def end(self, remotes: Sequence[tuple[str, Node, Remote]]) -> None:
        """End hosts, each with the name of its worker for messages, and wait until they are gone."""

    def has_ended(self) -> bool:
        """Whether the runtime itself has died, so that calls get no answer."""

    def device(self, slots: Sequence[int]) -> str:
        """The torch device of a host on these slots."""

    def replace_lost_nodes(self) -> None:
        """Replace nodes that are gone by others, for hosts that start from now on."""

    def watch(self, monitor: str) -> None:
        """Make workers that start from now on send heartbeats to the Ray actor `monitor`."""

    def close(self) -> None:
        """End everything that still runs."""
