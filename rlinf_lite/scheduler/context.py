"""What a process knows about the cluster that it belongs to, and how it finds names and reaches other nodes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.experimental import internal_kv

from rlinf_lite.scheduler.errors import SchedulerError
from rlinf_lite.scheduler.scratch import ScratchDirs

RAY_NAMESPACE = "rlinf_lite"
_LIMIT_S = 30.0


@dataclass(frozen=True)
class ProcessContext:
    """The cluster as one process (driver or worker) sees it."""

    uid: str
    node_id: str
    temp_dir: str
    shm_dir: str
    monitor: str | None = None  # the Ray actor that workers tell what they are doing, if any


@dataclass(frozen=True)
class Address:
    """Where an inbox is."""

    node_id: str
    socket: str


_current: ProcessContext | None = None
_agents: dict[str, Any] = {}


def set_context(context: ProcessContext | None) -> None:
    global _current
    _current = context


def get_context() -> ProcessContext:
    if _current is None:
        raise SchedulerError(
            "This process belongs to no cluster: make a Cluster() first, or launch the worker in a group."
        )
    return _current


def publish(kind: str, name: str, value: Any, replace: bool = True) -> bool:
    """Make something known to every process of the cluster; False where it was and `replace` is not set."""
    existed: bool = internal_kv._internal_kv_put(_key(kind, name), pickle.dumps(value), overwrite=replace)
    return replace or not existed


def withdraw(kind: str, name: str) -> None:
    internal_kv._internal_kv_del(_key(kind, name))


def find(kind: str, name: str) -> Any:
    """What was published under a name, else None."""
    value: Any = internal_kv._internal_kv_get(_key(kind, name))
    return None if value is None else pickle.loads(value)


def known_names(kind: str) -> list[str]:
    prefix = _key(kind, "")
    return sorted(key[len(prefix) :].decode() for key in internal_kv._internal_kv_list(prefix))


def _key(kind: str, name: str) -> bytes:
    return f"rlinf_lite/{get_context().uid}/{kind}/{name}".encode()


class NodeAgent:
    """An actor on every node of several, which does there what processes elsewhere ask for."""

    def __init__(self, uid: str, node_id: str) -> None:
        self._dirs = ScratchDirs(uid)
        set_context(ProcessContext(uid, node_id, self._dirs.temp, self._dirs.shm))

    def __repr__(self) -> str:
        return "agent"

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def close(self) -> None:
        self._dirs.remove()


def agent_name(uid: str, node_id: str) -> str:
    return f"{uid}.agent.{node_id}"


def start_on(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """Have another node's agent run a function; returns Ray's reference to the result. Calls run in order."""
    name = agent_name(get_context().uid, node_id)
    if name not in _agents:
        _agents[name] = ray.get_actor(name, namespace=RAY_NAMESPACE)
    return _agents[name].call.remote(function, *args)


def run_on(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on a node: here where it is this one."""
    if node_id == get_context().node_id:
        return function(*args)
    return ray.get(start_on(node_id, function, *args), timeout=_LIMIT_S)
