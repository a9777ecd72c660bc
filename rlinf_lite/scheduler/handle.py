"""A group call on its way, and how the driver waits for some of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf_lite.scheduler.dispatch import CollectFn, Deferred
from rlinf_lite.scheduler.errors import CallTimeoutError, RemoteFailure, SchedulerError, WorkerError

if TYPE_CHECKING:
    from rlinf_lite.scheduler.group import Member, WorkerGroup

_PATROL_S = 1.0
"""How often a wait looks whether idle workers of the groups involved still live."""


@dataclass(frozen=True)
class Call:
    """One worker's part of a group call."""

    member: Member
    ref: Any


class Handle:
    """The result of a group call, which may still be running."""

    def __init__(
        self,
        group: WorkerGroup,
        method: str,
        call_id: int,
        calls: Sequence[Call],
        collect: CollectFn,
        by_rank: bool,
        timeout_s: float | None,
    ) -> None:
        self.group, self.method = group, method
        self._call_id, self._calls, self._collect, self._by_rank = call_id, tuple(calls), collect, by_rank
        self._limit_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def __repr__(self) -> str:
        return f"Handle({self.group.name}.{self.method}, {'done' if self.done() else 'running'})"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} must be an argument of a group call itself, not lie inside one")

    def wait(self, timeout_s: float | None = None) -> Any:
        """The collected result. Raises WorkerError, WorkerDiedError and CallTimeoutError."""
        return self._collect(_Wait([self], timeout_s, "").run()[0])

    def done(self) -> bool:
        """Whether every worker has finished, or failed."""
        import ray

        refs = [call.ref for call in self._calls]
        return len(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0]) == len(refs)

    def durations(self) -> list[float]:
        """Seconds that the method took in each worker, by rank; waits for the call to end."""
        import ray

        self.wait()
        seconds: list[float] = ray.get([call.member.actor.duration.remote(self._call_id) for call in self._calls])
        return seconds

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.wait).__await__()

    def map(self, resolve: Callable[[Any], Any]) -> Deferred:
        """As an argument of another group's call: `resolve` of the collected result, computed by the workers."""
        collect = self._collect
        return Deferred(tuple(call.ref for call in self._calls), lambda values: resolve(collect(values)))

    def of_rank(self, index: int) -> Deferred:
        """As an argument of another group's call: one worker's output, fetched alone."""
        return Deferred((self._calls[index].ref,), _only)

    def element(self, rank: int, world_size: int) -> Deferred:
        """What rank i of a DP_COMPUTE call gets: output i, fetched alone, of a call that collects a list by rank."""
        if not self._by_rank:
            return self.map(same).element(rank, world_size)
        if len(self._calls) != world_size:
            raise ValueError(f"{self!r} has {len(self._calls)} outputs for {world_size} ranks; give one per rank")
        return self.of_rank(rank)


def wait_all(*handles: Handle, timeout_s: float | None = None, what: str = "") -> list[Any]:
    """Wait for calls of several groups together; returns their collected results.

    Raises as soon as any of them fails, or any worker of their groups dies, even where others are still blocked; those
    groups are then aborted (`group.abort`), so that their workers stop waiting for messages that will not come.
    """
    try:
        outputs = _Wait(handles, timeout_s, what).run()
    except BaseException as error:
        _abort(
            [handle for handle in handles if not handle.done()], str(error).split("\n", 1)[0] or type(error).__name__
        )
        raise
    return [handle._collect(values) for handle, values in zip(handles, outputs, strict=True)]


def _abort(handles: Sequence[Handle], reason: str) -> None:
    for group in {handle.group for handle in handles}:
        group.abort(reason)
    # what these calls raise now says nothing new; Ray would print it as unhandled
    refs = [call.ref for handle in handles for call in handle._calls]
    threading.Thread(target=_swallow, args=(refs,), daemon=True).start()


def _swallow(refs: Sequence[Any]) -> None:
    import ray

    for ref in refs:
        with suppress(Exception):
            ray.get(ref)


class _Wait:
    """One wait for the calls of one or several handles."""

    def __init__(self, handles: Sequence[Handle], timeout_s: float | None, what: str) -> None:
        self._handles = handles
        self._calls = [call for handle in handles for call in handle._calls]
        self._what = what
        self._started = time.monotonic()
        limits = [handle._deadline for handle in handles if handle._deadline is not None and timeout_s is None]
        self._deadline = self._started + timeout_s if timeout_s is not None else min(limits, default=None)
        self._pings: dict[Member, Any] = {}

    def run(self) -> list[list[Any]]:
        import ray

        refs = [call.ref for call in self._calls]
        while True:
            try:
                values = ray.get(refs, timeout=self._next_patrol())
                break
            except ray.exceptions.GetTimeoutError:
                self._patrol()
            except ray.exceptions.RayError as error:
                raise self._translated(error) from _original(error)
        outputs, start = [], 0
        for handle in self._handles:
            outputs.append(values[start : start + len(handle._calls)])
            start += len(handle._calls)
        return outputs

    def _next_patrol(self) -> float:
        return _PATROL_S if self._deadline is None else min(_PATROL_S, max(0.0, self._deadline - time.monotonic()))

    def _patrol(self) -> None:
        """Look for errors among the finished calls, for dead workers among the idle, and at the clock."""
        import ray

        finished, running = ray.wait(
            [call.ref for call in self._calls], num_returns=len(self._calls), timeout=0, fetch_local=False
        )
        answered = [ref for ref in self._pings.values() if ray.wait([ref], timeout=0)[0]]
        try:
            ray.get(finished)
            ray.get(answered)
        except ray.exceptions.RayError as error:
            raise self._translated(error) from _original(error)
        if running and self._deadline is not None and time.monotonic() >= self._deadline:
            raise CallTimeoutError(self._late(set(running)))
        for member in {member for handle in self._handles for member in handle.group.members}:
            if member not in self._pings or self._pings[member] in answered:
                self._pings[member] = member.actor.ping.remote()

    def _late(self, running: set[Any]) -> str:
        late = [
            f"{handle.group.name}[{call.member.rank}].{handle.method}"
            for handle in self._handles
            for call in handle._calls
            if call.ref in running
        ]
        waited = f"waited {time.monotonic() - self._started:.1f} s"
        done = f"{len(self._calls) - len(late)} of {len(self._calls)} calls are done"
        return f"{self._what + ': ' if self._what else ''}{waited}; not done: {', '.join(late)} ({done})"

    def _translated(self, error: Exception) -> SchedulerError:
        import ray

        record = _remote_failure(error)
        if record is not None:
            return WorkerError(record.group, record.rank, record.method, record.summary, record.traceback)
        if isinstance(error, ray.exceptions.RayActorError):
            dead = error.actor_id
            for member in (member for handle in self._handles for member in handle.group.members):
                if member.actor._actor_id.hex() == dead:
                    return member.death(str(error))
        # not a worker's own exception: for example, a result that cannot be pickled
        calls = dict.fromkeys(f"{handle.group.name}.{handle.method}" for handle in self._handles)
        return SchedulerError(f"{', '.join(calls)}: {error}")


def _remote_failure(error: Exception) -> Any:
    cause = getattr(error, "cause", None)
    return cause.record if isinstance(cause, RemoteFailure) else None


def _original(error: Exception) -> BaseException:
    from ray import cloudpickle

    record = _remote_failure(error)
    if record is None:
        return error
    if record.pickled is not None:
        original: BaseException = cloudpickle.loads(record.pickled)
        return original
    return RuntimeError(record.summary)


def same(value: Any) -> Any:
    return value


def _only(values: list[Any]) -> Any:
    return values[0]
