"""How objects get from process to process: ZeroMQ sockets within a node, the other node's agent across nodes.

Posting never blocks: queues are unlimited, so two processes that post to each other cannot deadlock. What one process
posts to another arrives in order.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import zmq

from rlinf_lite.scheduler.codec import Buffer, encode
from rlinf_lite.scheduler.context import Address, get_context, start_on
from rlinf_lite.scheduler.segments import Parcel, open_buffers, store

_NOTHING = Parcel(b"", [], None, [])
_counter = itertools.count()
_sockets: dict[str, zmq.Socket[bytes]] = {}
_lock = threading.Lock()
_deliveries: list[Any] = []


class Inbox:
    """Where a process reads what is posted to it; one thread does."""

    def __init__(self, label: str) -> None:
        context = get_context()
        name = f"{label[:20]}-{os.getpid()}-{next(_counter)}".replace("/", "_")
        self.address = Address(context.node_id, os.path.join(context.temp_dir, name))
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(f"ipc://{self.address.socket}")

    def wait(self, timeout_s: float | None) -> bool:
        """Whether something is there, after at most `timeout_s`."""
        return bool(self._socket.poll(None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))))

    def take(self) -> tuple[Any, Parcel] | None:
        """The next header and parcel, if there is one."""
        try:
            envelope, head, *small = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        header, segment, spans = pickle.loads(envelope)
        return header, Parcel(head, small, segment, spans)

    def close(self) -> None:
        self._socket.close(linger=0)


def post(address: Address, header: Any, obj: Any = None) -> None:
    """Send a picklable header and any object."""
    head, buffers = encode(obj)
    if address.node_id == get_context().node_id:
        push(address.socket, header, store(head, buffers, get_context().shm_dir))
    else:
        _post_abroad(address, header, head, buffers)


def forward(address: Address, header: Any, parcel: Parcel) -> None:
    """Pass on a parcel; on this node, its bulk stays where it is."""
    if address.node_id == get_context().node_id:
        push(address.socket, header, parcel)
    else:
        _post_abroad(address, header, parcel.head, open_buffers(parcel))


def push(path: str, header: Any, parcel: Parcel = _NOTHING) -> None:
    """Send to an inbox on this node."""
    envelope = pickle.dumps((header, parcel.segment, parcel.spans))
    with _lock:
        if path not in _sockets:
            for gone in [other for other in _sockets if not os.path.exists(other)]:
                _sockets.pop(gone).close()
            outgoing: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
            outgoing.set_hwm(0)
            outgoing.linger = 0
            outgoing.connect(f"ipc://{path}")
            _sockets[path] = outgoing
        _sockets[path].send_multipart([envelope, parcel.head, *parcel.small])


def close_sockets() -> None:
    with _lock:
        for outgoing in _sockets.values():
            outgoing.close()
        _sockets.clear()


def is_read(path: str) -> bool:
    """Whether the process that reads an inbox on this node still lives."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def _post_abroad(address: Address, header: Any, head: bytes, buffers: Sequence[Buffer]) -> None:
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    with _lock:
        _deliveries.append(start_on(address.node_id, _deliver, address.socket, header, head, arrays))
        done, _deliveries[:] = ray.wait(_deliveries, num_returns=len(_deliveries), timeout=0)
    ray.get(done)  # raises what an earlier delivery has raised


def _deliver(path: str, header: Any, head: bytes, arrays: Sequence[Any]) -> None:
    push(path, header, store(head, [memoryview(array) for array in arrays], get_context().shm_dir))
