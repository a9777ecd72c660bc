"""What a process knows about the cluster that it belongs to, and how it finds groups."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from typing import Any

from rlinf_lite.scheduler.errors import PeerError, SchedulerError

RAY_NAMESPACE = "rlinf_lite"
_LAUNCH_GRACE_S = 2.0


@dataclass(frozen=True)
class ProcessContext:
    """The cluster as one process (driver or worker) sees it."""

    uid: str
    node_id: str
    temp_dir: str
    shm_dir: str
    single_node: bool


@dataclass(frozen=True)
class PeerAddress:
    """Where a worker's mailbox is."""

    node_id: str
    socket: str


_current: ProcessContext | None = None
_agents: dict[str, Any] = {}


def set_context(context: ProcessContext | None) -> None:
    global _current
    _current = context
    _agents.clear()


def get_context() -> ProcessContext:
    if _current is None:
        raise SchedulerError(
            "This process belongs to no cluster: make a Cluster() first, or launch the worker in a group."
        )
    return _current


def publish_group(name: str, addresses: list[PeerAddress] | None) -> None:
    """Make a group known to every process of the cluster; None: make it unknown."""
    from ray.experimental import internal_kv

    key = _key(name)
    if addresses is None:
        internal_kv._internal_kv_del(key)
    else:
        internal_kv._internal_kv_put(key, pickle.dumps(addresses), overwrite=True)


def find_group(name: str, wait_s: float = _LAUNCH_GRACE_S) -> list[PeerAddress]:
    """The mailboxes of a group; waits a little for one that is being launched. Raises PeerError."""
    from ray.experimental import internal_kv

    deadline = time.monotonic() + wait_s
    while True:
        value: Any = internal_kv._internal_kv_get(_key(name))
        if value is not None:
            addresses: list[PeerAddress] = pickle.loads(value)
            return addresses
        if time.monotonic() >= deadline:
            prefix = _key("")
            known = sorted(key[len(prefix) :].decode() for key in internal_kv._internal_kv_list(prefix))
            raise PeerError(f"no group named {name!r} is running (running: {', '.join(known) or 'none'})")
        time.sleep(0.05)


def _key(name: str) -> bytes:
    return f"rlinf_lite/{get_context().uid}/group/{name}".encode()


def find_agent(node_id: str) -> Any:
    """The actor that acts for us on another node."""
    import ray

    if node_id not in _agents:
        _agents[node_id] = ray.get_actor(agent_name(get_context().uid, node_id), namespace=RAY_NAMESPACE)
    return _agents[node_id]


def agent_name(uid: str, node_id: str) -> str:
    return f"{uid}.agent.{node_id}"
