"""A named queue between any processes of a cluster.

The process that creates a channel keeps the order, and small items. Bulk stays in shared memory on the producer's
node, where the consumer maps it, unless one of the three is on another node.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

import ray

from rlinf_lite.scheduler.context import Address, find, publish, run_on, withdraw
from rlinf_lite.scheduler.errors import ChannelTimeoutError, SchedulerError
from rlinf_lite.scheduler.heartbeat import waits_for
from rlinf_lite.scheduler.post import Inbox, forward, is_read, post, push
from rlinf_lite.scheduler.segments import Parcel, discard, pack, unpack

log = logging.getLogger(__name__)

_PATROL_S = 1.0  # how often a wait looks whether the keeper still lives

P = ParamSpec("P")
R = TypeVar("R")

_kept: list[Keeper] = []
_idle: list[Inbox] = []
_lock = threading.Lock()
_numbers = itertools.count()


class Channel:
    """Items under a key come out in the order they went in; keys are queues of their own.

    Any number of processes put and get. Every blocking method has an `async` twin: `await channel.get_async()`. Items
    are copies: changing one after `put` has no effect, and what comes out is writable and belongs to the consumer
    alone. The channel lives as long as the process that created it; whoever waits then gets a SchedulerError.
    """

    def __init__(self, name: str, keeper: Address) -> None:
        self.name, self._keeper = name, keeper

    @classmethod
    def create(cls, name: str, maxsize: int = 0) -> Channel:
        """Make a channel of at most `maxsize` items per key (0: no limit); then `put` waits.

        Raises SchedulerError if the name is taken.
        """
        known = find("channel", name)
        if known is None or not _lives(known):
            keeper = Keeper(name, maxsize)
            _kept.append(keeper)
            if publish("channel", name, keeper.address, replace=known is not None):
                return cls(name, keeper.address)
            keeper.end()
        raise SchedulerError(f"a channel named {name!r} exists already: use Channel.connect, or another name")

    @classmethod
    def connect(cls, name: str) -> Channel:
        """A channel that another process created. Raises SchedulerError if there is none."""
        keeper = find("channel", name)
        if keeper is None:
            raise SchedulerError(f"no channel named {name!r} exists: make it with Channel.create")
        return cls(name, keeper)

    def put(self, item: Any, key: Any = None, weight: int = 0, timeout_s: float | None = None) -> None:
        """Add an item; waits while the key is full. Raises ChannelTimeoutError."""
        self._ask("put", key, weight, timeout_s, item)

    def get(self, key: Any = None, timeout_s: float | None = None) -> Any:
        """Take the oldest item; waits for one. Raises ChannelTimeoutError."""
        return self._ask("get", key, None, timeout_s)[0]

    def get_batch(self, target_weight: int, key: Any = None, timeout_s: float | None = None) -> list[Any]:
        """Take the oldest items until their weights reach `target_weight`; waits for enough.

        Raises ChannelTimeoutError, and then has taken nothing.
        """
        return self._ask("get", key, target_weight, timeout_s)

    def qsize(self, key: Any = None) -> int:
        """Items waiting under a key."""
        return int(self._ask("qsize", key)[0])

    def empty(self, key: Any = None) -> bool:
        return self.qsize(key) == 0

    def close(self) -> None:
        """End the channel and drop what is in it; whoever waits gets a SchedulerError."""
        self._ask("close")
        withdraw("channel", self.name)

    async def put_async(self, item: Any, key: Any = None, weight: int = 0, timeout_s: float | None = None) -> None:
        await _in_thread(self.put, item, key, weight, timeout_s)

    async def get_async(self, key: Any = None, timeout_s: float | None = None) -> Any:
        return await _in_thread(self.get, key, timeout_s)

    async def get_batch_async(self, target_weight: int, key: Any = None, timeout_s: float | None = None) -> list[Any]:
        return await _in_thread(self.get_batch, target_weight, key, timeout_s)

    async def qsize_async(self, key: Any = None) -> int:
        return await _in_thread(self.qsize, key)

    async def empty_async(self, key: Any = None) -> bool:
        return await _in_thread(self.empty, key)

    def _ask(
        self, what: str, key: Any = None, weight: int | None = None, timeout_s: float | None = None, item: Any = None
    ) -> list[Any]:
        """Send a request to the keeper; returns the values that come back."""
        number, name = next(_numbers), f"the channel {self.name!r}"
        values: list[Any] = []
        with _lock:
            inbox = _idle.pop() if _idle else Inbox("asks")  # which nobody else reads meanwhile
        try:
            post([self._keeper], Request(inbox.address, number, what, key, weight, timeout_s), item)
            while True:
                with waits_for(name):
                    while not inbox.wait(_PATROL_S):
                        if not _lives(self._keeper):
                            raise SchedulerError(f"{name} is gone: it was closed, or its creator ended")
                taken = inbox.take()
                assert taken is not None
                reply, parcel = taken
                if reply.number != number:  # for somebody who was interrupted
                    discard(parcel)
                elif reply.error is not None:
                    raise reply.error
                else:
                    values.append(unpack(parcel))
                    if reply.is_last:
                        return values
        finally:
            _idle.append(inbox)


def leave_channels() -> None:
    """Close the channels that this process keeps, and its inboxes."""
    for keeper in _kept:
        keeper.end()
    for inbox in _idle:
        inbox.close()
    _kept.clear()
    _idle.clear()


async def _in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """As `asyncio.to_thread`, but in a thread for each call, which does not hold up the end of the process."""
    future: Future[R] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # which belongs to whoever awaits it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)


def _lives(keeper: Address) -> bool:
    try:
        return bool(run_on(keeper.node_id, is_read, keeper.socket))
    except ray.exceptions.GetTimeoutError:
        return True  # its node is slow
    except (ray.exceptions.RayError, ValueError):
        return False  # its node is gone


class Request(NamedTuple):
    """The header of what a caller asks of a keeper."""

    caller: Address
    number: int
    what: str  # put, get, qsize or close
    key: Any
    weight: int | None  # of the item put; or what the items got have to weigh together (None: one item)
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


@dataclass
class _Queue:
    """One key: the items with their weights, and two lines, served in the order in which they formed."""

    items: deque[tuple[Parcel, int]] = field(default_factory=deque)
    producers: deque[_Waiting] = field(default_factory=deque)
    consumers: deque[_Waiting] = field(default_factory=deque)


class Keeper:
    """A channel where it is kept, in a thread of the process that created it.

    Minds the order and the limits of time, so that no item goes to somebody who has given up.
    """

    def __init__(self, name: str, maxsize: int) -> None:
        self._name, self._maxsize = name, maxsize
        self._queues: dict[Any, _Queue] = {}  # those in which an item or somebody waits
        self._lines: dict[Any, _Queue] = {}  # those in which somebody waits
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
                self._refuse_late()
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
                target = consumer.request.weight
                if target is None or sum(weight for _, weight in consumer.items) >= target:
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

    def _refuse_late(self) -> None:
        now = time.monotonic()
        for key, queue in list(self._lines.items()):
            for late in [waiting for waiting in (*queue.producers, *queue.consumers) if waiting.deadline <= now]:
                waited = f"{late.request.timeout_s:g} s"
                if late in queue.producers:
                    queue.producers.remove(late)
                    discard(late.items[0][0])
                    problem = f"full for {waited}; nobody takes its items."
                else:
                    queue.consumers.remove(late)
                    queue.items.extendleft(reversed(late.items))
                    problem = f"nothing arrived in {waited}."
                _answer(late.request, error=ChannelTimeoutError(f"channel {self._name!r}, key {key!r}: {problem}"))
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


def _answer(request: Request, parcels: Sequence[Parcel] = (), error: SchedulerError | None = None) -> None:
    parcels = parcels or [pack(None, "")]
    try:
        for count, parcel in enumerate(parcels, 1):
            forward(request.caller, Reply(request.number, count == len(parcels), error), parcel)
    except (ray.exceptions.RayError, ValueError) as problem:  # its node is gone
        log.warning("a caller of a channel cannot be answered: %s", problem)
