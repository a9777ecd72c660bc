"""Names and messages between Ray processes: names in Ray's internal key-value store, messages by ZeroMQ within a node
and through an agent actor on other nodes.

Sending never waits: queues are unlimited. Messages from one process to another arrive in order.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray
import zmq
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf_lite.scheduler.context import RAY_NAMESPACE, Address, ProcessContext, get_context, set_context
from rlinf_lite.scheduler.errors import SchedulerError
from rlinf_lite.scheduler.ray_private import delete_value, get_value, list_keys, put_value
from rlinf_lite.scheduler.scratch import ScratchDirs
from rlinf_lite.scheduler.segments import BULK_BYTES, Parcel, encode, store
from rlinf_lite.scheduler.shared_memory import forget_all, forget_inbox

_LIMIT_S = 30.0
_LOST_NODE_LIMIT_S = 120.0  # Ray takes up to a minute to find that a node is gone

_counter = itertools.count()
_sockets: dict[str, zmq.Socket[bytes]] = {}
_lock = threading.Lock()
_actors: dict[str, Any] = {}  # actors that this process has looked up or keeps, by name
_deliveries: list[_Delivery] = []


class _Delivery(NamedTuple):
    """A message that is being sent to another node's agent."""

    done: Any
    node_id: str
    began: float


@dataclass(frozen=True)
class RayNetwork:
    """The `Network` of the cluster `uid`, whose processes are Ray's."""

    uid: str

    def publish(self, kind: str, name: str, value: Any) -> None:
        put_value(self._key(kind, name), pickle.dumps(value))

    def withdraw(self, kind: str, name: str) -> None:
        delete_value(self._key(kind, name))

    def find(self, kind: str, name: str) -> Any:
        value = get_value(self._key(kind, name))
        return None if value is None else pickle.loads(value)

    def known_names(self, kind: str) -> list[str]:
        prefix = self._key(kind, "")
        return [key.removeprefix(prefix) for key in list_keys(prefix)]

    def inbox(self, label: str) -> ZmqInbox:
        return ZmqInbox(label)

    def send(self, addresses: Sequence[Address], header: Any, obj: Any = None) -> None:
        """As in `Network`; a message to several inboxes of one other node crosses the network once."""
        head, buffers = encode(obj)
        by_node: dict[str, list[str]] = {}
        for address in addresses:
            by_node.setdefault(address.node_id, []).append(address.socket)
        _deliver(by_node.pop(get_context().node_id, []), header, head, buffers)
        if by_node:
            self._send_to_nodes(by_node, header, head, buffers)

    def lives(self, address: Address) -> bool:
        return address.node_id != get_context().node_id or os.path.exists(address.socket)

    def remove_inbox(self, address: Address) -> None:
        self.run_on(address.node_id, _remove_inbox, address.socket)

    def keep(self, name: str, kind: type[Any], *args: Any) -> bool:
        here = NodeAffinitySchedulingStrategy(get_context().node_id, soft=False)
        place: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": here, "enable_task_events": False}
        full_name = f"{self.uid}.{name}"
        try:
            kept: Any = ray.remote(kind).options(name=full_name, namespace=RAY_NAMESPACE, **place).remote(*args)
        except ValueError:  # the name is taken
            return False
        _actors[full_name] = kept
        return True

    def is_kept(self, name: str) -> bool:
        _actors.pop(f"{self.uid}.{name}", None)  # another actor may have this name now
        try:
            _actor(f"{self.uid}.{name}")
        except ValueError:
            return False
        return True

    def drop(self, name: str) -> None:
        with suppress(ValueError):  # it is gone
            ray.kill(_actor(f"{self.uid}.{name}"))
        _actors.pop(f"{self.uid}.{name}", None)

    def ask(self, name: str, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()

        def take(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            elif isinstance(error, RayActorError):
                answer.set_exception(_gone(name))
            else:
                answer.set_exception(getattr(error, "cause", error))

        try:
            call = getattr(_actor(f"{self.uid}.{name}"), method)
            call.remote(*args).future().add_done_callback(take)
        except ValueError:
            answer.set_exception(_gone(name))
        return answer

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def clock(self) -> float:
        return time.monotonic()

    def run_on(self, node_id: str, function: Callable[..., Any], *args: Any) -> Any:
        if node_id == get_context().node_id:
            return function(*args)
        return ray.get(self.start_on(node_id, function, *args), timeout=_LIMIT_S)

    def start_on(self, node_id: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in another node's agent; returns Ray's reference to the result. Calls run in order."""
        return _actor(agent_name(self.uid, node_id)).call.remote(function, *args)

    def _key(self, kind: str, name: str) -> str:
        return f"rlinf_lite/{self.uid}/{kind}/{name}"

    def _send_to_nodes(
        self, by_node: Mapping[str, list[str]], header: Any, head: bytes, buffers: Sequence[Any]
    ) -> None:
        """Send a message to inboxes of other nodes; `by_node`: their paths by node."""
        arrays: Any = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        if len(by_node) > 1 and sum(array.nbytes for array in arrays) >= BULK_BYTES:
            arrays = ray.put(arrays)  # store once for all nodes; otherwise each call stores a copy
        with _lock:
            for node_id, paths in by_node.items():
                done = self.start_on(node_id, _deliver, paths, header, head, arrays)
                _deliveries.append(_Delivery(done, node_id, time.monotonic()))
            ready = set(ray.wait([one.done for one in _deliveries], num_returns=len(_deliveries), timeout=0)[0])
            ended = [one for one in _deliveries if one.done in ready]
            _deliveries[:] = [one for one in _deliveries if one.done not in ready]
        for delivery in ended:
            try:
                ray.get(delivery.done)  # raises the error of an earlier delivery
            except RayActorError as error:
                if not any(node["NodeID"] == delivery.node_id and node["Alive"] for node in ray.nodes()):
                    continue  # a message to a dead process is lost, as within a node; the driver handles the lost node
                if time.monotonic() - delivery.began > _LOST_NODE_LIMIT_S or not isinstance(
                    error, ActorUnavailableError
                ):
                    raise
                with _lock:
                    _deliveries.append(delivery)  # Ray does not know yet whether the node is lost


class ZmqInbox:
    """An inbox as a ZeroMQ socket, for messages from processes of the same node. One thread reads it."""

    def __init__(self, label: str) -> None:
        context = get_context()
        name = f"{label[:20]}-{os.getpid()}-{next(_counter)}".replace("/", "_")
        self.address = Address(context.node_id, os.path.join(context.temp_dir, name))
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(f"ipc://{self.address.socket}")

    def wait(self, timeout_s: float | None) -> bool:
        return bool(self._socket.poll(None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))))

    def take(self) -> tuple[Any, Parcel] | None:
        try:
            envelope, head, *small = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        header, place, spans = pickle.loads(envelope)
        parcel = Parcel(head, small, place, spans)
        parcel.arrive()
        return header, parcel

    def close(self) -> None:
        self._socket.close(linger=0)


def _actor(name: str) -> Any:
    """A named Ray actor. Raises ValueError if there is none."""
    if name not in _actors:
        _actors[name] = ray.get_actor(name, namespace=RAY_NAMESPACE)
    return _actors[name]


def _gone(name: str) -> SchedulerError:
    kind, _, own = name.partition(" ")
    return SchedulerError(f"the {kind} {own!r} is gone: it was closed, or its creator ended")


def leave() -> None:
    """Leave the cluster: close this process's sockets and release the shared memory that it keeps."""
    with _lock:
        for outgoing in _sockets.values():
            outgoing.close()
        _sockets.clear()
    _actors.clear()
    forget_all()


def _deliver(paths: Sequence[str], header: Any, head: bytes, buffers: Sequence[Any]) -> None:
    """Send a message to inboxes of this node."""
    views = [memoryview(buffer) for buffer in buffers]
    for path in paths:
        _push(path, header, store(head, views, get_context().shm_dir, path))


def _push(path: str, header: Any, parcel: Parcel) -> None:
    """Send a message to one inbox of this node."""
    envelope = pickle.dumps((header, parcel.place, parcel.spans))
    with _lock:
        if path not in _sockets:
            for gone in [other for other in _sockets if not os.path.exists(other)]:
                _sockets.pop(gone).close()
                forget_inbox(gone)
            outgoing: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
            outgoing.set_hwm(0)
            outgoing.linger = 0
            outgoing.connect(f"ipc://{path}")
            _sockets[path] = outgoing
        _sockets[path].send_multipart([envelope, parcel.head, *parcel.small])


def _remove_inbox(path: str) -> None:
    directory, prefix = get_context().shm_dir, f"{os.path.basename(path)}."
    for name in [name for name in os.listdir(directory) if name.startswith(prefix)]:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))
    with suppress(FileNotFoundError):
        os.unlink(path)


class NodeAgent:
    """A Ray actor on every node of a multi-node cluster that runs functions for processes of other nodes."""

    def __init__(self, uid: str, node_id: str) -> None:
        self._dirs = ScratchDirs(uid)
        set_context(ProcessContext(uid, node_id, self._dirs.temp, self._dirs.shm, RayNetwork(uid)))

    def __repr__(self) -> str:
        return "agent"

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def close(self) -> None:
        self._dirs.remove()


def agent_name(uid: str, node_id: str) -> str:
    return f"{uid}.agent.{node_id}"
