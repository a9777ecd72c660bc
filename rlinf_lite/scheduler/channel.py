"""A named queue between any processes of a cluster.

The process that creates a channel keeps the order, and small items. Bulk stays in shared memory on the producer's
node, where the consumer maps it, unless one of the three is on another node.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import ray

from rlinf_lite.scheduler.context import Address, find, publish, run_on, withdraw
from rlinf_lite.scheduler.errors import SchedulerError
from rlinf_lite.scheduler.keeper import Keeper, Request
from rlinf_lite.scheduler.post import Inbox, is_read, post
from rlinf_lite.scheduler.segments import discard, unpack

_PATROL_S = 1.0
"""How often a wait looks whether the keeper still lives."""

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
        number = next(_numbers)
        values: list[Any] = []
        with _inbox() as inbox:
            post(self._keeper, Request(inbox.address, number, what, key, weight, timeout_s), item)
            while True:
                while not inbox.wait(_PATROL_S):
                    if not _lives(self._keeper):
                        raise SchedulerError(f"the channel {self.name!r} is gone: it was closed, or its creator ended")
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


def leave_channels() -> None:
    """Close the channels that this process keeps, and its inboxes."""
    for keeper in _kept:
        keeper.end()
    for inbox in _idle:
        inbox.close()
    _kept.clear()
    _idle.clear()


@contextmanager
def _inbox() -> Iterator[Inbox]:
    """An inbox that nobody else reads meanwhile."""
    with _lock:
        inbox = _idle.pop() if _idle else Inbox("asks")
    try:
        yield inbox
    finally:
        _idle.append(inbox)


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
