"""Named queues between the processes of a cluster. With Ray an actor holds the items, in the local runtime this
process.
"""

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
    """A named queue that every process of the cluster can use. Each key is a queue of its own: first in, first out.

    Any number of processes may put and get. Every blocking method has an `async` twin: `await channel.get_async()`.
    Items are copies: changing one after `put` has no effect, and the item that `get` returns is writable and belongs to
    the caller alone. The channel ends with the process that created it; waiting calls then raise SchedulerError. A
    process that is killed while it waits in `get` may still remove the next item, as with any queue in a Ray actor.
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
        """Open a channel that another process created. Raises SchedulerError if there is none."""
        if not network().is_kept(f"channel {name}"):
            raise SchedulerError(f"no channel named {name!r} exists: make it with Channel.create")
        return cls(name)

    def put(self, item: Any, key: Any = None, weight: int = 0, timeout_s: float | None = None) -> None:
        """Add an item; waits while the queue of the key is full. Raises ChannelTimeoutError."""
        self._wait(self._ask("put", key, _packed(item), weight, timeout_s))

    def get(self, key: Any = None, timeout_s: float | None = None) -> Any:
        """Remove and return the oldest item; waits for one. Raises ChannelTimeoutError."""
        return _unpacked(self._wait(self._ask("get", key, None, timeout_s)))[0]

    def get_batch(self, target_weight: int, key: Any = None, timeout_s: float | None = None) -> list[Any]:
        """Remove and return the oldest items until their weights reach `target_weight`; waits for enough.

        Raises ChannelTimeoutError, and then removes nothing.
        """
        return _unpacked(self._wait(self._ask("get", key, target_weight, timeout_s)))

    def qsize(self, key: Any = None) -> int:
        """Number of items that wait under a key."""
        return int(self._wait(self._ask("qsize", key)))

    def empty(self, key: Any = None) -> bool:
        """Whether no item waits under a key."""
        return self.qsize(key) == 0

    def close(self) -> None:
        """End the channel and drop its items; waiting calls raise SchedulerError."""
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
    return head, [np.array(buffer) for buffer in buffers]  # copies, so that later changes to the item have no effect


def _unpacked(items: Sequence[tuple[bytes, list[np.ndarray]]]) -> list[Any]:
    return [pickle.loads(head, buffers=[bytearray(buffer) for buffer in buffers]) for head, buffers in items]
