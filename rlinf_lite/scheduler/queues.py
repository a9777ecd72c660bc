"""The queues of a channel, in the process that holds them."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from rlinf_lite.scheduler.errors import ChannelTimeoutError, SchedulerError


class Queues:
    """The queues of a channel, one per key, of (item, weight). Waiting calls are served in the order of their
    arrival."""

    def __init__(self, name: str, maxsize: int) -> None:
        self._name, self._maxsize, self._is_closed = name, maxsize, False
        self._changed = asyncio.Condition()
        self._items: defaultdict[Any, deque[tuple[Any, int]]] = defaultdict(deque)
        self._lines: defaultdict[Any, deque[object]] = defaultdict(deque)  # by (method, key): the waiting calls

    async def put(self, key: Any, item: Any, weight: int, timeout_s: float | None) -> None:
        def append() -> bool:
            if self._maxsize and len(self._items[key]) >= self._maxsize:
                return False
            self._items[key].append((item, weight))
            return True

        problem = f"full for {timeout_s or 0:g} s; no one takes its items."
        await self._in_line("put", key, append, timeout_s, problem)

    async def get(self, key: Any, target_weight: int | None, timeout_s: float | None) -> list[Any]:
        taken: list[tuple[Any, int]] = []

        def take() -> bool:  # takes items at once, which makes room: a target above `maxsize` cannot deadlock
            while self._items[key]:
                taken.append(self._items[key].popleft())
                self._changed.notify_all()
                if target_weight is None or sum(weight for _, weight in taken) >= target_weight:
                    return True
            return False

        def put_back() -> None:
            self._items[key].extendleft(reversed(taken))

        problem = f"nothing arrived in {timeout_s or 0:g} s."
        await self._in_line("get", key, take, timeout_s, problem, put_back)
        return [item for item, _ in taken]

    async def qsize(self, key: Any) -> int:
        return len(self._items.get(key, ()))

    async def close(self) -> None:
        async with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    async def _in_line(
        self,
        method: str,
        key: Any,
        step: Callable[[], bool],
        timeout_s: float | None,
        problem: str,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait in line behind earlier calls of this method and key, and repeat `step` until it returns True. Calls
        `undo` if the wait ends without success."""
        line, me = self._lines[method, key], object()
        line.append(me)
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        async with self._changed:
            try:
                async with asyncio.timeout_at(deadline):
                    while not self._is_closed and not (line[0] is me and step()):
                        await self._changed.wait()
                    if self._is_closed:
                        raise SchedulerError(f"the channel {self._name!r} was closed")
            except BaseException as error:  # also cancellation, when the caller is gone
                undo()
                if isinstance(error, TimeoutError):
                    raise ChannelTimeoutError(f"channel {self._name!r}, key {key!r}: {problem}") from None
                raise
            finally:
                line.remove(me)
                if not line:
                    del self._lines[method, key]
                if not self._items[key]:
                    del self._items[key]
                self._changed.notify_all()
