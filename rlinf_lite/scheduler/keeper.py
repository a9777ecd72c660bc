"""A channel where it is kept: in a thread of the process that created it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray

from rlinf_lite.scheduler.context import Address
from rlinf_lite.scheduler.errors import ChannelTimeoutError, SchedulerError
from rlinf_lite.scheduler.post import Inbox, forward, push
from rlinf_lite.scheduler.segments import Parcel, discard, pack

log = logging.getLogger(__name__)


class Request(NamedTuple):
    """The header of what a caller asks of a keeper."""

    caller: Address
    number: int
    what: str
    """put, get, qsize or close."""
    key: Any
    weight: int | None
    """Of the item put; or what the items got have to weigh together (None: one item)."""
    timeout_s: float | None


class Reply(NamedTuple):
    """The header of an answer; a get of several items has one for each."""

    number: int
    is_last: bool
    error: SchedulerError | None


class _Waiting:
    """A put that waits for room, or a get that waits for items."""

    def __init__(self, request: Request, items: Sequence[tuple[Parcel, int]] = ()) -> None:
        self.request = request
        self.items = list(items)
        self.deadline = math.inf if request.timeout_s is None else time.monotonic() + request.timeout_s

    def has_enough(self) -> bool:
        return self.request.weight is None or sum(weight for _, weight in self.items) >= self.request.weight


@dataclass
class _Queue:
    """One key: the items with their weights, and two lines, served in the order in which they formed."""

    items: deque[tuple[Parcel, int]] = field(default_factory=deque)
    producers: deque[_Waiting] = field(default_factory=deque)
    consumers: deque[_Waiting] = field(default_factory=deque)


class Keeper:
    """Minds the order and the limits of time, so that no item goes to somebody who has given up."""

    def __init__(self, name: str, maxsize: int) -> None:
        self._name, self._maxsize = name, maxsize
        self._queues: dict[Any, _Queue] = {}
        """Those in which an item or somebody waits."""
        self._lines: dict[Any, _Queue] = {}
        """Those in which somebody waits."""
        self._inbox = Inbox(f"channel-{name}")
        self.address = self._inbox.address
        self._thread = threading.Thread(target=self._run, name=f"channel {name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        push(self.address.socket, None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._serve_next():
                self._expire()
        finally:
            self._drop_all()
            self._inbox.close()  # by which callers notice

    def _serve_next(self) -> bool:
        """Serve what comes in before somebody's time is up; False once the channel is closed."""
        waiting = [w for queue in self._lines.values() for w in (*queue.producers, *queue.consumers)]
        deadline = min((w.deadline for w in waiting), default=math.inf)
        self._inbox.wait(None if deadline == math.inf else deadline - time.monotonic())
        while (taken := self._inbox.take()) is not None:
            request, parcel = taken
            if request is None:
                return False
            if request.what == "qsize":
                known = self._queues.get(request.key)
                _answer(request, [pack(0 if known is None else len(known.items), "")])
                continue
            queue = self._queues.setdefault(request.key, _Queue())
            match request.what:
                case "put":
                    queue.producers.append(_Waiting(request, [(parcel, request.weight)]))
                case "get":
                    queue.consumers.append(_Waiting(request))
                case "close":
                    self._drop_all()
                    _answer(request)
                    return False
            self._settle(request.key)
        return True

    def _settle(self, key: Any) -> None:
        """Let producers in and hand out items until neither can go on; forget a key that nothing is left of.

        A get takes what there is and so makes room: a target weight above `maxsize` cannot deadlock.
        """
        queue = self._queues[key]
        while True:
            if queue.producers and (not self._maxsize or len(queue.items) < self._maxsize):
                producer = queue.producers.popleft()
                queue.items.extend(producer.items)
                _answer(producer.request)
            elif queue.items and queue.consumers:
                consumer = queue.consumers[0]
                consumer.items.append(queue.items.popleft())
                if consumer.has_enough():
                    queue.consumers.popleft()
                    _answer(consumer.request, [parcel for parcel, _ in consumer.items])
            else:
                break
        if queue.producers or queue.consumers:
            self._lines[key] = queue
            return
        self._lines.pop(key, None)
        if not queue.items:
            del self._queues[key]

    def _expire(self) -> None:
        """Refuse those who have waited for too long."""
        now = time.monotonic()
        for key, queue in list(self._lines.items()):
            for late in [waiting for waiting in queue.producers if waiting.deadline <= now]:
                queue.producers.remove(late)
                discard(late.items[0][0])
                self._refuse_late(late.request, f"full for {late.request.timeout_s:g} s; nobody takes its items.")
            for late in [waiting for waiting in queue.consumers if waiting.deadline <= now]:
                queue.consumers.remove(late)
                queue.items.extendleft(reversed(late.items))
                self._refuse_late(late.request, f"nothing arrived in {late.request.timeout_s:g} s.")
            self._settle(key)

    def _drop_all(self) -> None:
        for queue in self._queues.values():
            for waiting in (*queue.producers, *queue.consumers):
                _answer(waiting.request, error=SchedulerError(f"the channel {self._name!r} was closed"))
                queue.items.extend(waiting.items)
            for parcel, _ in queue.items:
                discard(parcel)
        self._queues.clear()
        self._lines.clear()

    def _refuse_late(self, request: Request, problem: str) -> None:
        _answer(request, error=ChannelTimeoutError(f"channel {self._name!r}, key {request.key!r}: {problem}"))


def _answer(request: Request, parcels: Sequence[Parcel] = (), error: SchedulerError | None = None) -> None:
    parcels = parcels or [pack(None, "")]
    try:
        for count, parcel in enumerate(parcels, 1):
            forward(request.caller, Reply(request.number, count == len(parcels), error), parcel)
    except (ray.exceptions.RayError, ValueError) as problem:  # its node is gone
        log.warning("a caller of a channel cannot be answered: %s", problem)
