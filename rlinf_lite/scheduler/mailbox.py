"""Messages between workers: ZeroMQ sockets within a node, the other node's agent across nodes.

A send never blocks: queues are unlimited, so two workers that send to each other cannot deadlock. Messages of one
source arrive in the order in which they were sent. One thread reads a mailbox: the one that runs the worker's methods.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import zmq

from rlinf_lite.scheduler.context import PeerAddress, ProcessContext, find_agent, find_group
from rlinf_lite.scheduler.errors import AbortedError, PeerError, RecvTimeoutError
from rlinf_lite.scheduler.segments import Parcel, discard, pack, unpack

_ABORT = "abort"
_DATA = "data"


def data_frames(group: str, rank: int, epoch: int, parcel: Parcel) -> list[Any]:
    """A message as ZeroMQ frames: an envelope, the pickle, and the small buffers."""
    layout = [small is None for small in parcel.inline]
    envelope = pickle.dumps((_DATA, group, rank, epoch, parcel.segment, parcel.spans, layout))
    return [envelope, parcel.head, *(small for small in parcel.inline if small is not None)]


def abort_frames(epoch: int, reason: str) -> list[Any]:
    return [pickle.dumps((_ABORT, epoch, reason))]


@dataclass(frozen=True)
class _Message:
    arrival: int
    epoch: int
    parcel: Parcel


class SocketPool:
    """Outgoing sockets to mailboxes on this node, opened on first use."""

    def __init__(self) -> None:
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._lock = threading.Lock()

    def push(self, path: str, frames: list[Any]) -> None:
        with self._lock:
            if path not in self._sockets:
                socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
                socket.set_hwm(0)
                socket.linger = 0
                socket.connect(f"ipc://{path}")
                self._sockets[path] = socket
            self._sockets[path].send_multipart(frames)

    def close(self) -> None:
        with self._lock:
            for socket in self._sockets.values():
                socket.close()
            self._sockets.clear()


class Mailbox:
    """One worker's inbox and outbox."""

    def __init__(self, context: ProcessContext, group: str, rank: int) -> None:
        self.context, self.group, self.rank = context, group, rank
        self.epoch = 0
        self.path = os.path.join(context.temp_dir, f"{group[:20]}-{rank}-{os.getpid()}".replace("/", "_"))
        self._inbox: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(f"ipc://{self.path}")
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._pool = SocketPool()
        self._peers: dict[str, list[PeerAddress]] = {}
        self._arrivals = itertools.count()
        self._queues: dict[str, dict[int, deque[_Message]]] = {}
        self._aborted: str | None = None
        self._oldest_epochs: dict[str, int] = {}
        self._remote_sends: deque[Any] = deque()

    def send(self, obj: Any, group: str, rank: int) -> None:
        address = self._address(group, rank)
        if address.node_id == self.context.node_id:
            parcel = pack(obj, self.context.shm_dir)
            self._pool.push(address.socket, data_frames(self.group, self.rank, self.epoch, parcel))
        else:
            self._send_to_node(obj, address)

    def recv(self, group: str, rank: int | None, timeout_s: float | None) -> tuple[int, Any]:
        """The next message of one rank, or of any rank of a group, as (source rank, object)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.check_abort(f"waiting for {_source(group, rank)}")
            taken = self._take(group, rank)
            if taken is not None:
                return taken[0], unpack(taken[1])
            if not self._poller.poll(_milliseconds_left(deadline)):
                raise RecvTimeoutError(
                    f"{self.group}[{self.rank}] waited {timeout_s:g} s for a message from {_source(group, rank)}; "
                    "none came."
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
        for group, ranks in self._queues.items():
            for rank, queue in ranks.items():
                ranks[rank] = deque(
                    message for message in queue if self._is_current(group, message.epoch, message.parcel)
                )

    def _is_current(self, group: str, epoch: int, parcel: Parcel) -> bool:
        if epoch >= self._oldest_epochs.get(group, 0):
            return True
        discard(parcel)
        return False

    def _address(self, group: str, rank: int) -> PeerAddress:
        peers = self._peers.get(group)
        if peers is None or not self._alive(peers, rank):
            peers = self._peers[group] = find_group(group)
            if 0 <= rank < len(peers) and not self._alive(peers, rank):
                raise PeerError(f"{group}[{rank}] is gone: {self.group}[{self.rank}] cannot send to it.")
        if not 0 <= rank < len(peers):
            raise PeerError(f"{group}[{rank}] does not exist: the group {group!r} has ranks 0..{len(peers) - 1}.")
        return peers[rank]

    def _alive(self, peers: list[PeerAddress], rank: int) -> bool:
        # the driver unlinks the socket of a worker that it has seen die or has shut down
        if not 0 <= rank < len(peers):
            return True
        return peers[rank].node_id != self.context.node_id or os.path.exists(peers[rank].socket)

    def _send_to_node(self, obj: Any, address: PeerAddress) -> None:
        import numpy as np
        import ray

        from rlinf_lite.scheduler.codec import encode

        head, buffers = encode(obj)
        arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        deliver = find_agent(address.node_id).deliver
        self._remote_sends.append(deliver.remote(address.socket, self.group, self.rank, self.epoch, head, arrays))
        while self._remote_sends and ray.wait([self._remote_sends[0]], timeout=0)[0]:
            ray.get(self._remote_sends.popleft())  # surfaces an error of an earlier delivery

    def _drain(self) -> None:
        while True:
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._accept(frames)

    def _accept(self, frames: list[bytes]) -> None:
        kind, *fields = pickle.loads(frames[0])
        if kind == _ABORT:
            epoch, reason = fields
            if epoch > self.epoch:
                self._aborted = reason
            return
        group, rank, epoch, segment, spans, layout = fields
        small = iter(frames[2:])
        parcel = Parcel(frames[1], [None if is_bulk else next(small) for is_bulk in layout], segment, spans)
        if self._is_current(group, epoch, parcel):
            self._queue(group, rank).append(_Message(next(self._arrivals), epoch, parcel))

    def _queue(self, group: str, rank: int) -> deque[_Message]:
        return self._queues.setdefault(group, {}).setdefault(rank, deque())

    def _take(self, group: str, rank: int | None) -> tuple[int, Parcel] | None:
        if rank is None:
            waiting = [(queue[0].arrival, source) for source, queue in self._queues.get(group, {}).items() if queue]
            if not waiting:
                return None
            rank = min(waiting)[1]
        queue = self._queue(group, rank)
        return (rank, queue.popleft().parcel) if queue else None


def _milliseconds_left(deadline: float | None) -> int | None:
    return None if deadline is None else max(0, math.ceil((deadline - time.monotonic()) * 1000))


def _source(group: str, rank: int | None) -> str:
    return f"any rank of {group}" if rank is None else f"{group}[{rank}]"
