"""The seam between groups of workers and what runs them: `cluster.runtime` ray (processes) or local (threads).

A runtime starts hosts of workers, calls them, and ends them; a `Network` (context.py) carries what workers send to each
other. `tests/scheduler/test_runtimes.py` is the contract of both. Needs neither ray nor torch.
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
    """The host of one process's workers, as the driver reaches it."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the host, after those before it; returns a reference to the result at once. References
        among the arguments stand for what they refer to."""

    @property
    def pid(self) -> int: ...
    @property
    def log_paths(self) -> list[str]: ...
    def log_tail(self) -> str:
        """The last lines that its process printed."""


class CallFailed(Exception):
    """The result of a call does not come: its method `raised`, or, as `text` says, its process died, or it cannot be
    sent."""

    def __init__(self, text: str, raised: WorkerError | None = None) -> None:
        super().__init__(text)
        self.text, self.raised = text, raised

    def is_of(self, remote: Remote) -> bool:
        """Whether this host's process has died of it."""
        return False


class Runtime(Protocol):
    """What a `Cluster` runs its workers on."""

    nodes: list[Node]
    shape: ClusterShape

    @property
    def network(self) -> Network:
        """What workers find and reach each other by."""

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
        """A host of workers that have these methods, on some slots of a node. `title`: of its process in `ps`."""

    def build(self, remote: Remote, identities: Sequence[dict[str, Any]], epoch: int, payload: Any) -> Any:
        """Have its workers constructed from `pack`'s payload; returns a reference to the addresses of their inboxes."""

    def pack(self, definitions: Sequence[Definition]) -> Any:
        """What `build` makes workers of."""

    def get(self, refs: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """Results of calls, for which `timeout_s` real seconds are waited. Raises TimeoutError and CallFailed."""

    def ready(self, refs: Sequence[Any]) -> list[Any]:
        """Those of calls that have ended."""

    def put(self, value: Any) -> Any:
        """A reference to a value, which several calls may be given."""

    def call_id(self, ref: Any) -> str:
        """The name under which a host knows a call."""

    def drop(self, refs: Sequence[Any]) -> None:
        """Nobody asks for these results any more."""

    def end(self, remotes: Sequence[tuple[str, Node, Remote]]) -> None:
        """End hosts, given their names, and wait until they are gone."""

    def has_ended(self) -> bool:
        """Whether nothing runs any more, so that whatever is asked is not answered."""

    def device(self, slots: Sequence[int]) -> str:
        """The torch device of a host on these slots."""

    def replace_lost_nodes(self) -> None:
        """Give the place of nodes that are gone to others, for what is started from now on."""

    def watch(self, monitor: str) -> None:
        """Have workers that are started from now on tell a Ray actor every other second what they do."""

    def close(self) -> None:
        """End everything that is left."""
