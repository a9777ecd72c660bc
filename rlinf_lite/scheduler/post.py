"""How objects get from process to process: ZeroMQ sockets within a node, the other node's agent across nodes.

Posting never blocks: queues are unlimited, so two processes that post to each other cannot deadlock. What one process
posts to another arrives in order. A worker's mailbox keeps messages apart by who sent them.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import ray
import zmq
from ray.exceptions import ActorUnavailableError, RayActorError

from rlinf_lite.scheduler.context import Address, find, get_context, known_names, start_on
from rlinf_lite.scheduler.errors import AbortedError, PeerError, RecvTimeoutError
from rlinf_lite.scheduler.heartbeat import Activity
from rlinf_lite.scheduler.segments import BULK_BYTES, Buffer, Parcel, discard, encode, open_buffers, store, unpack
from rlinf_lite.scheduler.shared_memory import forget_all, forget_inbox, forget_writers

_LAUNCH_GRACE_S = 2.0  # how long a send waits for a group that is being launched
_VERDICT_S = 120.0  # Ray takes up to a minute to find that a node is gone

_NOTHING = Parcel(b"", [], None, [])
_counter = itertools.count()
_sockets: dict[str, zmq.Socket[bytes]] = {}
_lock = threading.Lock()
_deliveries: list[_Delivery] = []


class _Delivery(NamedTuple):
    """To another node, by its agent."""

    done: Any
    node_id: str
    began: float


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
        header, place, spans = pickle.loads(envelope)
        parcel = Parcel(head, small, place, spans)
        parcel.arrive()
        return header, parcel

    def close(self) -> None:
        self._socket.close(linger=0)


def post(addresses: Sequence[Address], header: Any, obj: Any = None) -> None:
    """Send a picklable header and any object; what goes to several inboxes of another node crosses the network once."""
    head, buffers = encode(obj)
    by_node: dict[str, list[str]] = {}
    for address in addresses:
        by_node.setdefault(address.node_id, []).append(address.socket)
    _deliver(by_node.pop(get_context().node_id, []), header, head, buffers)
    if by_node:
        _post_abroad(by_node, header, head, buffers)


def forward(address: Address, header: Any, parcel: Parcel) -> None:
    """Pass on a parcel; on this node, its bulk stays where it is."""
    if address.node_id == get_context().node_id:
        push(address.socket, header, parcel)
    else:
        _post_abroad({address.node_id: [address.socket]}, header, parcel.head, open_buffers(parcel))


def push(path: str, header: Any, parcel: Parcel = _NOTHING) -> None:
    """Send to an inbox on this node."""
    place = parcel.place if parcel.mapped is None else parcel.mapped.place
    envelope = pickle.dumps((header, place, parcel.spans))
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


def close_sockets() -> None:
    with _lock:
        for outgoing in _sockets.values():
            outgoing.close()
        _sockets.clear()
    forget_all()


def remove_inbox(path: str) -> None:
    """Tell senders of this node that nobody reads here any more, and free what was not read."""
    directory, prefix = get_context().shm_dir, f"{os.path.basename(path)}."
    for name in [name for name in os.listdir(directory) if name.startswith(prefix)]:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))
    with suppress(FileNotFoundError):
        os.unlink(path)


def is_read(path: str) -> bool:
    """Whether the process that reads an inbox on this node still lives."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def _post_abroad(by_node: Mapping[str, list[str]], header: Any, head: bytes, buffers: Sequence[Buffer]) -> None:
    """To inboxes of other nodes, by the node."""
    arrays: Any = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    if len(by_node) > 1 and sum(array.nbytes for array in arrays) >= BULK_BYTES:
        arrays = ray.put(arrays)  # once for all nodes; each call would put its own
    with _lock:
        for node_id, paths in by_node.items():
            done = start_on(node_id, _deliver, paths, header, head, arrays)
            _deliveries.append(_Delivery(done, node_id, time.monotonic()))
        ready = set(ray.wait([one.done for one in _deliveries], num_returns=len(_deliveries), timeout=0)[0])
        ended = [one for one in _deliveries if one.done in ready]
        _deliveries[:] = [one for one in _deliveries if one.done not in ready]
    for delivery in ended:
        try:
            ray.get(delivery.done)  # raises what an earlier delivery has raised
        except RayActorError as error:
            if not any(node["NodeID"] == delivery.node_id and node["Alive"] for node in ray.nodes()):
                continue  # as on this node, what is sent to who has died is lost; the driver sees that a node is gone
            if time.monotonic() - delivery.began > _VERDICT_S or not isinstance(error, ActorUnavailableError):
                raise
            with _lock:
                _deliveries.append(delivery)  # Ray does not know yet which it is


def _deliver(paths: Sequence[str], header: Any, head: bytes, buffers: Sequence[Any]) -> None:
    """To inboxes of this node."""
    views = [memoryview(buffer) for buffer in buffers]
    for path in paths:
        push(path, header, store(head, views, get_context().shm_dir, path))


class Message(NamedTuple):
    """The header of what one worker sends to another."""

    group: str
    rank: int
    epoch: int
    tag: object


class Abort(NamedTuple):
    """The header with which the driver ends receives."""

    epoch: int
    reason: str


class Mailbox:
    """One worker's inbox and outbox. One thread reads it: the one that runs the worker's methods."""

    def __init__(self, group: str, rank: int, epoch: int, activity: Activity) -> None:
        self.group, self.rank, self.epoch, self.activity = group, rank, epoch, activity
        self.inbox = Inbox(f"{group}-{rank}")
        self._peers: dict[str, list[Address]] = {}
        self._waiting: dict[str, deque[tuple[Message, Parcel]]] = {}
        self._aborted: str | None = None
        self._oldest_epochs: dict[str, int] = {}

    def send(self, obj: Any, group: str, ranks: Sequence[int], tag: object) -> None:
        if not ranks:
            return
        post([self._address(group, rank) for rank in ranks], Message(self.group, self.rank, self.epoch, tag), obj)
        self.activity.sent_to.add(group)
        self.activity.made_progress()

    def recv(self, tags: Mapping[str, object], rank: int | None, timeout_s: float | None) -> tuple[str, int, Any]:
        """The next message of one rank, or of any rank, of these groups, each with its tag, as (group, source rank,
        object)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        source = " or ".join(f"any rank of {group}" if rank is None else f"{group}[{rank}]" for group in tags)
        while True:
            self.check_abort(f"waiting for {source}")
            for group, tag in tags.items():
                queue = self._waiting.get(group, deque())
                for i, (message, parcel) in enumerate(queue):
                    if rank in (None, message.rank) and tag in (..., message.tag):
                        del queue[i]
                        return group, message.rank, unpack(parcel)
            with self.activity.waiting(source):
                arrived = self.inbox.wait(None if deadline is None else deadline - time.monotonic())
            if not arrived:
                raise RecvTimeoutError(
                    f"{self.group}[{self.rank}] waited {timeout_s:g} s for a message from {source}; none came."
                )

    def check_abort(self, doing: str) -> None:
        """Raise AbortedError where the group has been aborted; `doing` is what is given up."""
        self._drain()
        if self._aborted is not None:
            raise AbortedError(f"{self.group}[{self.rank}] gave up {doing}: {self._aborted}")

    def clear_abort(self, epoch: int, oldest_epochs: dict[str, int]) -> None:
        """Serve receives again, and drop what was sent by aborted groups before this."""
        self._drain()
        self._aborted, self.epoch, self._oldest_epochs = None, epoch, oldest_epochs
        self._peers.clear()
        forget_writers()
        kept, self._waiting = self._waiting, {}
        for queue in kept.values():
            for message, parcel in queue:
                self._keep(message, parcel)

    def _drain(self) -> None:
        while (taken := self.inbox.take()) is not None:
            header, parcel = taken
            if isinstance(header, Message):
                self._keep(header, parcel)
            elif header.epoch > self.epoch:
                self._aborted = header.reason

    def _keep(self, message: Message, parcel: Parcel) -> None:
        if message.epoch < self._oldest_epochs.get(message.group, 0):
            discard(parcel)
        else:
            self._waiting.setdefault(message.group, deque()).append((message, parcel))

    def _address(self, group: str, rank: int) -> Address:
        peers = self._peers.get(group)
        if peers is None or not self._lives(peers, rank):
            deadline = time.monotonic() + _LAUNCH_GRACE_S
            while (peers := find("group", group)) is None:
                if time.monotonic() >= deadline:
                    known = ", ".join(known_names("group")) or "none"
                    raise PeerError(f"no group named {group!r} is running (running: {known})")
                time.sleep(0.05)
            self._peers[group] = peers
            if not self._lives(peers, rank):
                raise PeerError(f"{group}[{rank}] is gone: {self.group}[{self.rank}] cannot send to it.")
        if not 0 <= rank < len(peers):
            raise PeerError(f"{group}[{rank}] does not exist: the group {group!r} has ranks 0..{len(peers) - 1}.")
        return peers[rank]

    def _lives(self, peers: list[Address], rank: int) -> bool:
        # the driver unlinks the socket of a worker that it has seen die or has shut down
        if not 0 <= rank < len(peers) or peers[rank].node_id != self.inbox.address.node_id:
            return True
        return os.path.exists(peers[rank].socket)
