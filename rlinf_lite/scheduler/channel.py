"""A named queue between any processes of a cluster.

One asyncio actor keeps the order; small items travel inside the call, bulk stays in a shared memory segment on the
producer's node, which the consumer maps there or, from another node, fetches through that node's agent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rlinf_lite.scheduler.codec import decode
from rlinf_lite.scheduler.context import RAY_NAMESPACE, find_agent, get_context
from rlinf_lite.scheduler.errors import ChannelTimeoutError, SchedulerError
from rlinf_lite.scheduler.segments import Parcel, discard, pack, unpack

_MAX_PENDING_CALLS = 10_000


class Channel:
    """Items under a key come out in the order they went in; keys are queues of their own.

    Any number of processes put and get. Every blocking method has an `async` twin: `await channel.get_async()`. Items
    are copies: changing one after `put` has no effect, and what comes out is writable and belongs to the consumer
    alone. The channel lives as long as its creator does.
    """

    def __init__(self, name: str, broker: Any) -> None:
        self.name, self._broker = name, broker

    @classmethod
    def create(cls, name: str, maxsize: int = 0) -> Channel:
        """Make a channel of at most `maxsize` items per key (0: no limit); then `put` waits.

        Raises SchedulerError if the name is taken.
        """
        import ray

        broker = ray.remote(Broker).options(
            name=_actor_name(name),
            namespace=RAY_NAMESPACE,
            num_cpus=0,
            max_concurrency=_MAX_PENDING_CALLS,
            enable_task_events=False,
        )
        try:
            return cls(name, broker.remote(name, maxsize))
        except ValueError as error:
            raise SchedulerError(
                f"a channel named {name!r} exists already: use Channel.connect, or another name"
            ) from error

    @classmethod
    def connect(cls, name: str) -> Channel:
        """A channel that another process created. Raises SchedulerError if there is none."""
        import ray

        try:
            return cls(name, ray.get_actor(_actor_name(name), namespace=RAY_NAMESPACE))
        except ValueError as error:
            raise SchedulerError(f"no channel named {name!r} exists: make it with Channel.create") from error

    def put(self, item: Any, key: Any = None, weight: int = 0, timeout_s: float | None = None) -> None:
        """Add an item; waits while the key is full. Raises ChannelTimeoutError."""
        import ray

        self._check_put(ray.get(self._send(item, key, weight, timeout_s)), key, timeout_s)

    async def put_async(self, item: Any, key: Any = None, weight: int = 0, timeout_s: float | None = None) -> None:
        self._check_put(await self._send(item, key, weight, timeout_s), key, timeout_s)

    def get(self, key: Any = None, timeout_s: float | None = None) -> Any:
        """Take the oldest item; waits for one. Raises ChannelTimeoutError."""
        import ray

        return self._open(ray.get(self._broker.get.remote(key, None, timeout_s)), key, timeout_s)[0]

    async def get_async(self, key: Any = None, timeout_s: float | None = None) -> Any:
        return self._open(await self._broker.get.remote(key, None, timeout_s), key, timeout_s)[0]

    def get_batch(self, target_weight: int, key: Any = None, timeout_s: float | None = None) -> list[Any]:
        """Take the oldest items until their weights reach `target_weight`; waits for enough.

        Raises ChannelTimeoutError, and then has taken nothing.
        """
        import ray

        return self._open(ray.get(self._broker.get.remote(key, target_weight, timeout_s)), key, timeout_s)

    async def get_batch_async(self, target_weight: int, key: Any = None, timeout_s: float | None = None) -> list[Any]:
        return self._open(await self._broker.get.remote(key, target_weight, timeout_s), key, timeout_s)

    def qsize(self, key: Any = None) -> int:
        """Items waiting under a key."""
        import ray

        return int(ray.get(self._broker.qsize.remote(key)))

    async def qsize_async(self, key: Any = None) -> int:
        return int(await self._broker.qsize.remote(key))

    def empty(self, key: Any = None) -> bool:
        return self.qsize(key) == 0

    async def empty_async(self, key: Any = None) -> bool:
        return await self.qsize_async(key) == 0

    def close(self) -> None:
        """End the channel and drop what is in it; whoever waits gets an error."""
        import ray

        for parcel in ray.get(self._broker.drain.remote()):
            if parcel.node_id == get_context().node_id:
                discard(parcel)
        ray.kill(self._broker)

    def _send(self, item: Any, key: Any, weight: int, timeout_s: float | None) -> Any:
        context = get_context()
        return self._broker.put.remote(key, pack(item, context.shm_dir, context.node_id), weight, timeout_s)

    def _check_put(self, accepted: bool, key: Any, timeout_s: float | None) -> None:
        if not accepted:
            raise ChannelTimeoutError(
                f"channel {self.name!r}, key {key!r}: full for {timeout_s:g} s; nobody takes its items."
            )

    def _open(self, parcels: list[Parcel] | None, key: Any, timeout_s: float | None) -> list[Any]:
        if parcels is None:
            raise ChannelTimeoutError(f"channel {self.name!r}, key {key!r}: nothing arrived in {timeout_s:g} s.")
        return [_open_anywhere(parcel) for parcel in parcels]


def _actor_name(name: str) -> str:
    return f"{get_context().uid}.channel.{name}"


def _open_anywhere(parcel: Parcel) -> Any:
    import ray

    if parcel.segment is None or parcel.node_id == get_context().node_id:
        return unpack(parcel)
    bulk = iter(ray.get(find_agent(parcel.node_id).fetch_segment.remote(parcel.segment, parcel.spans)))
    return decode(parcel.head, [bytearray(next(bulk) if small is None else small) for small in parcel.inline])


@dataclass
class _Queue:
    """One key: the items, and a line of consumers, served in the order in which they came."""

    items: deque[tuple[Parcel, int]] = field(default_factory=deque)
    taken: list[tuple[Parcel, int]] = field(default_factory=list)
    """What the consumer at the head of the line has so far."""
    consumers: asyncio.Lock = field(default_factory=asyncio.Lock)
    producers: asyncio.Lock = field(default_factory=asyncio.Lock)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


class Broker:
    """The actor behind a channel."""

    def __init__(self, name: str, maxsize: int) -> None:
        self._name, self._maxsize = name, maxsize
        self._queues: dict[Any, _Queue] = {}

    def __repr__(self) -> str:
        return f"channel {self._name}"

    async def put(self, key: Any, parcel: Parcel, weight: int, timeout_s: float | None) -> bool:
        try:
            await asyncio.wait_for(self._put(self._queue(key), parcel, weight), timeout_s)
        except TimeoutError:
            return False
        return True

    async def get(self, key: Any, target_weight: int | None, timeout_s: float | None) -> list[Parcel] | None:
        try:
            return await asyncio.wait_for(self._take(self._queue(key), target_weight), timeout_s)
        except TimeoutError:
            return None

    async def qsize(self, key: Any) -> int:
        return len(self._queue(key).items)

    async def drain(self) -> list[Parcel]:
        return [parcel for queue in self._queues.values() for parcel, _ in (*queue.taken, *queue.items)]

    def _queue(self, key: Any) -> _Queue:
        return self._queues.setdefault(key, _Queue())

    async def _put(self, queue: _Queue, parcel: Parcel, weight: int) -> None:
        async with queue.producers, queue.changed:
            if self._maxsize:
                await queue.changed.wait_for(lambda: len(queue.items) < self._maxsize)
            queue.items.append((parcel, weight))
            queue.changed.notify_all()

    async def _take(self, queue: _Queue, target_weight: int | None) -> list[Parcel]:
        """Items up to the target (None: one). Frees room as it goes, so a target above `maxsize` cannot deadlock."""
        async with queue.consumers, queue.changed:
            try:
                while not queue.taken or (
                    target_weight is not None and sum(weight for _, weight in queue.taken) < target_weight
                ):
                    await queue.changed.wait_for(lambda: bool(queue.items))
                    queue.taken.append(queue.items.popleft())
                    queue.changed.notify_all()
                return [parcel for parcel, _ in queue.taken]
            except asyncio.CancelledError:
                queue.items.extendleft(reversed(queue.taken))
                raise
            finally:
                queue.taken.clear()
