"""A worker's mailbox: it sends messages to other workers, and keeps received messages apart by sender.

Sending never waits, so two workers that send to each other cannot deadlock. Messages of one worker to another arrive
in order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlinf_lite.scheduler.context import Address, network
from rlinf_lite.scheduler.errors import AbortedError, PeerError, RecvTimeoutError
from rlinf_lite.scheduler.heartbeat import Activity
from rlinf_lite.scheduler.segments import Parcel, discard, unpack
from rlinf_lite.scheduler.shared_memory import forget_writers

_LAUNCH_GRACE_S = 2.0  # how long a send waits for a group that is being launched


class Message(NamedTuple):
    """The header of a message from one worker to another."""

    group: str
    rank: int
    epoch: int
    tag: object


class Abort(NamedTuple):
    """The header of a message with which the driver ends receives."""

    epoch: int
    reason: str


class Mailbox:
    """One worker's inbox and outbox. One thread reads it: the one that runs the worker's methods."""

    def __init__(self, group: str, rank: int, epoch: int, activity: Activity) -> None:
        self.group, self.rank, self.epoch, self.activity = group, rank, epoch, activity
        self._network = network()
        self.inbox = self._network.inbox(f"{group}-{rank}")
        self._peers: dict[str, list[Address]] = {}
        self._waiting: dict[str, deque[tuple[Message, Parcel]]] = {}
        self._aborted: str | None = None
        self._oldest_epochs: dict[str, int] = {}

    def send(self, obj: Any, group: str, ranks: Sequence[int], tag: object) -> None:
        if not ranks:
            return
        addresses = [self._address(group, rank) for rank in ranks]
        self._network.send(addresses, Message(self.group, self.rank, self.epoch, tag), obj)
        self.activity.sent_to.add(group)
        self.activity.made_progress()

    def recv(self, tags: Mapping[str, object], rank: int | None, timeout_s: float | None) -> tuple[str, int, Any]:
        """The next message from `rank` (None: any rank) of one of the groups in `tags`, with the tag given there for
        that group (`...`: any), as (group, source rank, object)."""
        clock = self._network.clock
        deadline = None if timeout_s is None else clock() + timeout_s
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
                arrived = self.inbox.wait(None if deadline is None else deadline - clock())
            if not arrived:
                raise RecvTimeoutError(
                    f"{self.group}[{self.rank}] waited {timeout_s:g} s for a message from {source}; none came."
                )

    def check_abort(self, doing: str) -> None:
        """Raise AbortedError if the group was aborted; `doing` says in the message what is given up."""
        self._drain()
        if self._aborted is not None:
            raise AbortedError(f"{self.group}[{self.rank}] gave up {doing}: {self._aborted}")

    def clear_abort(self, epoch: int, oldest_epochs: dict[str, int]) -> None:
        """Allow receives again, and drop messages that aborted groups sent before their abort."""
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
            while (peers := self._network.find("group", group)) is None:
                if time.monotonic() >= deadline:
                    known = ", ".join(self._network.known_names("group")) or "none"
                    raise PeerError(f"no group named {group!r} is running (running: {known})")
                time.sleep(0.05)
            self._peers[group] = peers
            if not self._lives(peers, rank):
                raise PeerError(f"{group}[{rank}] is gone: {self.group}[{self.rank}] cannot send to it.")
        if not 0 <= rank < len(peers):
            raise PeerError(f"{group}[{rank}] does not exist: the group {group!r} has ranks 0..{len(peers) - 1}.")
        return peers[rank]

    def _lives(self, peers: list[Address], rank: int) -> bool:
        # the driver removes the inbox of a worker that died or was shut down
        return not 0 <= rank < len(peers) or self._network.lives(peers[rank])
