"""A named queue between any processes of a cluster, kept in one place: with Ray by an actor, else in this process."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rlinf_lite.scheduler.context import network
from rlinf_lite.scheduler.errors import SchedulerError
from rlinf_lite.scheduler.heartbeat import waits_for
from rlinf_lite.scheduler.queues import Queues
from rlinf_lite.scheduler.segments import encode


class Channel:
    """Items under a key come out in the order they went in; keys are queues of their own.

    Any number of processes put and get. Every blocking method has an `async` twin: `await channel.get_async()`. Items
    are copies: changing one after `put` has no effect, and what comes out is writable and belongs to the consumer
    alone. The channel lives as long as the process that created it; whoever waits then gets a SchedulerError. A process
    that is killed while it waits in `get` may still take the next item with it, as with any queue in a Ray actor.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def create(cls, name: str, maxsize: int = 0) -> Channel:
        """Make a channel of at most `maxsize` items per key (0: no limit); then `put` waits.

        Raises SchedulerError if the name is taken.
        """
        if not network().keep(f"channel {name}", Queues, name, maxsize):
            raise SchedulerError(f"a channel named {name!r} exists already: use Channel.connect, or another name")
        return cls(name)

    @classmethod
    def connect(cls, name: str) -> Channel:
        """A channel that another process created. Raises SchedulerError if there is none."""
        if not network().is_kept(f"channel {name}"):
            raise SchedulerError(f"no channel named {name!r} exists: make it with Channel.create")
        return cls(name)

    def put(self, item: Any, key: Any = None, weight: int = 0, timeout_s: float | None = None) -> None:
        """Add an item; waits while the key is full. Raises ChannelTimeoutError."""
        self._wait(self._ask("put", key, _packed(item), weight, timeout_s))

    def get(self, key: Any = None, timeout_s: float | None = None) -> Any:
        """Take the oldest item; waits for one. Raises ChannelTimeoutError."""
        return _unpacked(self._wait(self._ask("get", key, None, timeout_s)))[0]

    def get_batch(self, target_weight: int, key: Any = None, timeout_s: float | None = None) -> list[Any]:
        """Take the oldest items until their weights reach `target_weight`; waits for enough.

        Raises ChannelTimeoutError, and then has taken nothing.
        """
        return _unpacked(self._wait(self._ask("get", key, target_weight, timeout_s)))

    def qsize(self, key: Any = None) -> int:
        """Items waiting under a key."""
        return int(self._wait(self._ask("qsize", key)))

    def empty(self, key: Any = None) -> bool:
        """Whether no item waits under a key."""
        return self.qsize(key) == 0

    def close(self) -> None:
        """End the channel and drop what is in it; whoever waits gets a SchedulerError."""
        self._wait(self._ask("close"))
        network().drop(f"channel {self.name}")

    async def put_async(self, item: Any, key: Any = None, weight: int = 0, timeout_s: float | None = None) -> None:
        await asyncio.wrap_future(self._ask("put", key, _packed(item), weight, timeout_s))

    async def get_async(self, key: Any = None, timeout_s: float | None = None) -> Any:
        return _unpacked(await asyncio.wrap_future(self._ask("get", key, None, timeout_s)))[0]

    async def get_batch_async(self, target_weight: int, key: Any = None, timeout_s: float | None = None) -> list[Any]:
        return _unpacked(await asyncio.wrap_future(self._ask("get", key, target_weight, timeout_s)))

    async def qsize_async(self, key: Any = None) -> int:
        return int(await asyncio.wrap_future(self._ask("qsize", key)))

    async def empty_async(self, key: Any = None) -> bool:
        return await self.qsize_async(key) == 0

    def _ask(self, method: str, *args: Any) -> Future[Any]:
        return network().ask(f"channel {self.name}", method, *args)

    def _wait(self, answer: Future[Any]) -> Any:
        with waits_for(f"the channel {self.name!r}"), network().waiting():
            return answer.result()


def _packed(item: Any) -> tuple[bytes, list[np.ndarray]]:
    head, buffers = encode(item)
    return head, [np.array(buffer) for buffer in buffers]  # copies: of what the item is at this moment


def _unpacked(items: Sequence[tuple[bytes, list[np.ndarray]]]) -> list[Any]:
    return [pickle.loads(head, buffers=[bytearray(buffer) for buffer in buffers]) for head, buffers in items]
