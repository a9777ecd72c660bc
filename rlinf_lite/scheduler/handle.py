"""A group call on its way, and how the driver waits for some of them."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray import cloudpickle

from rlinf_lite.scheduler.dispatch import CollectFn, Deferred
from rlinf_lite.scheduler.errors import CallTimeoutError, ClusterError, SchedulerError, WorkerError
from rlinf_lite.scheduler.rows import ConcatRows, take_rows

if TYPE_CHECKING:
    from rlinf_lite.scheduler.group import WorkerGroup
    from rlinf_lite.scheduler.processes import Member

_PATROL_S = 1.0
"""How often a wait looks whether idle workers still live, and whether calls that nobody waits for have failed."""


class Calls:
    """The calls of a cluster whose outcome nobody has seen. One whose handle is dropped leaves by itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()

    def add(self, handle: Handle) -> None:
        with self._lock:
            self._handles.add(handle)

    def forget(self, handles: Iterable[Handle]) -> None:
        """Their outcome has been seen, or is of no interest any more."""
        with self._lock:
            self._handles.difference_update(handles)

    def under_way(self) -> list[Handle]:
        with self._lock:
            return list(self._handles)

    def give_up(self, ended: Callable[[Member], bool]) -> None:
        """Forget the calls of workers that have been told to stop, or were ended: how those fail says nothing new."""
        self.forget([handle for handle in self.under_way() if any(map(ended, handle._members))])


class Handle:
    """The result of a group call, which may still be running."""

    def __init__(
        self,
        group: WorkerGroup,
        method: str,
        members: Sequence[Member],
        refs: Sequence[Any],
        collect: CollectFn = list,
        timeout_s: float | None = None,
        with_peers: bool = True,
        calls: Calls | None = None,
    ) -> None:
        """`with_peers`: waits look at the whole group, whose death the members called might wait for in vain. `calls`:
        the other calls of a user's, whose failure ends a wait for this one, and the other way round."""
        self.group, self.method, self.with_peers, self._calls = group, method, with_peers, calls
        self._members, self._refs, self._collect = list(members), list(refs), collect
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if calls is not None:
            calls.add(self)

    def __repr__(self) -> str:
        return f"Handle({self.group.name}.{self.method}, {'done' if self.done() else 'running'})"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} must be an argument of a group call itself, not lie inside one")

    def wait(self, timeout_s: float | None = None) -> Any:
        """The collected result. Raises WorkerError, WorkerDiedError and CallTimeoutError.

        Raises too what another call of the cluster has failed with meanwhile, whose own handle is not waited for: this
        one may wait for it in vain. The other's `wait` raises that again.
        """
        return _Wait([self], timeout_s, "").run()[0]

    def done(self) -> bool:
        """Whether every worker has finished, or failed."""
        return not ray.wait(self._refs, num_returns=len(self._refs), timeout=0, fetch_local=False)[1]

    def durations(self) -> list[float]:
        """Seconds that the method took in each worker, by rank; waits for the call to end."""
        self.wait()
        calls = zip(self._members, self._refs, strict=True)
        seconds: list[float] = ray.get([member.actor._duration.remote(ref.task_id().hex()) for member, ref in calls])
        return seconds

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.wait).__await__()

    def map(self, resolve: Callable[[Any], Any]) -> Deferred:
        """As an argument of another group's call: `resolve` of the collected result, computed by the workers."""
        collect = self._collect
        return Deferred(tuple(self._refs), lambda values: resolve(collect(values)))

    def element(self, rank: int, world_size: int) -> Deferred:
        """What rank i of a DP_COMPUTE call gets: output i, fetched alone, of a call that collects outputs by rank."""
        if self._collect is not list:
            return self.map(same).element(rank, world_size)
        if len(self._refs) != world_size:
            raise ValueError(f"{self!r} has {len(self._refs)} outputs for {world_size} ranks; give one per rank")
        return Deferred((self._refs[rank],), only)

    def rows(self, rank: int, world_size: int) -> Deferred:
        """What rank i of a DP_COMPUTE_PROTO call gets: its rows of the outputs, without putting all together."""
        if not isinstance(self._collect, ConcatRows):
            return self.map(same).rows(rank, world_size)
        return Deferred(tuple(self._collect.chosen(self._refs)), lambda parts: take_rows(parts, rank, world_size))


def wait_all(
    *handles: Handle, timeout_s: float | None = None, what: str = "", check: Callable[[], None] | None = None
) -> list[Any]:
    """Wait for calls of several groups together; returns their collected results. While they run, `check` is called
    about every second; what it raises ends the wait.

    Raises as soon as any call of the cluster fails, or any worker of the groups that are called dies, even where others
    are still blocked; the groups of these handles are then aborted (`group.abort`), so that their workers stop waiting
    for messages that will not come.
    """
    try:
        return _Wait(handles, timeout_s, what, check).run()
    except BaseException as error:
        reason = str(error).split("\n", 1)[0] or type(error).__name__
        running = [handle for handle in handles if not handle.done()]
        for group in {handle.group for handle in running}:
            group.abort(reason)  # which forgets their calls
        # what these calls raise now says nothing new; Ray would print it as unhandled
        refs = [ref for handle in running for ref in handle._refs]
        threading.Thread(target=_swallow, args=(refs,), daemon=True).start()
        raise


def _swallow(refs: Sequence[Any]) -> None:
    for ref in refs:
        with suppress(Exception):
            ray.get(ref)


class _Wait:
    """One wait for the calls of one or several handles."""

    def __init__(
        self,
        handles: Sequence[Handle],
        timeout_s: float | None,
        what: str,
        check: Callable[[], None] | None = None,
        alone: bool = False,
    ) -> None:
        """`alone`: what becomes of other calls does not matter."""
        self._handles, self._what, self._check, self._alone = handles, what, check, alone
        self._refs = [ref for handle in handles for ref in handle._refs]
        self._started = time.monotonic()
        limits = [handle._deadline for handle in handles if handle._deadline is not None]
        self._deadline = min(limits, default=None) if timeout_s is None else self._started + timeout_s
        self._pings: dict[Member, Any] = {}

    def run(self) -> list[Any]:
        """The collected result of each handle."""
        while True:
            if self._check is not None:
                self._check()
            try:
                values = iter(ray.get(self._refs, timeout=self._seconds_to_patrol()))
                break
            except ray.exceptions.GetTimeoutError:
                self._patrol()
            except ray.exceptions.RayError as error:
                self._raise(error)
        self._forget(self._handles)
        return [handle._collect([next(values) for _ in handle._refs]) for handle in self._handles]

    def _seconds_to_patrol(self) -> float:
        return _PATROL_S if self._deadline is None else min(_PATROL_S, max(0.0, self._deadline - time.monotonic()))

    def _patrol(self) -> None:
        """Look for errors among the finished calls and those of others, for dead workers among the idle, and at the
        clock."""
        cluster = self._handles[0].group._cluster
        if cluster is not None and cluster.ray_has_ended():
            calls = self._what or ", ".join(f"{handle.group.name}.{handle.method}" for handle in self._handles)
            raise ClusterError(f"{calls}: Ray's own processes on this machine have ended. Were they killed?")
        finished, running = ray.wait(self._refs, num_returns=len(self._refs), timeout=0, fetch_local=False)
        others = self._others()
        members = self._members([*self._handles, *others])
        pings = {member: ping for member, ping in self._pings.items() if member in members}
        answered = ray.wait(list(pings.values()), num_returns=len(pings), timeout=0)[0] if pings else []
        try:
            ray.get(finished)
            failed = {task for tasks in ray.get(answered) for task in tasks}
            refs = [ref for other in others for ref in other._refs] if failed else []
            ray.get([ref for ref in refs if ref.task_id().hex() in failed])  # not all: results may be large, and far
        except ray.exceptions.RayError as error:
            self._raise(error)
        if running and self._deadline is not None and time.monotonic() >= self._deadline:
            raise CallTimeoutError(self._late(set(running)))
        waiting = {member: ping for member, ping in pings.items() if ping not in set(answered)}
        self._pings = {member: waiting.get(member) or member.actor._ping.remote() for member in members}

    def _others(self) -> list[Handle]:
        """Calls of the same cluster that are not waited for here."""
        calls = None if self._alone else self._handles[0]._calls
        return [] if calls is None else [other for other in calls.under_way() if other not in self._handles]

    def _forget(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            if handle._calls is not None:
                handle._calls.forget([handle])

    def _members(self, handles: Sequence[Handle]) -> list[Member]:
        called = [member for handle in handles for member in handle._members]
        groups = {handle.group for handle in handles if handle.with_peers}
        peers = [member for group in groups for member in group.members]
        return list(dict.fromkeys([*called, *peers]))

    def _late(self, running: set[Any]) -> str:
        late = [
            f"{member.group}[{member.rank}].{handle.method}"
            for handle in self._handles
            for member, ref in zip(handle._members, handle._refs, strict=True)
            if ref in running
        ]
        waited = f"waited {time.monotonic() - self._started:.1f} s"
        done = f"{len(self._refs) - len(late)} of {len(self._refs)} calls are done"
        return f"{self._what + ': ' if self._what else ''}{waited}; not done: {', '.join(late)} ({done})"

    def _raise(self, error: Exception) -> NoReturn:
        others = self._others()
        failure = getattr(error, "cause", None)
        if isinstance(failure, WorkerError):
            self._forget(self._blamed(failure.group, others))
            pickled = failure.pickled
            raise failure from RuntimeError(failure.summary) if pickled is None else cloudpickle.loads(pickled)
        if isinstance(error, ray.exceptions.RayActorError):
            for member in self._members([*self._handles, *others]):
                if member.actor._actor_id.hex() == error.actor_id:
                    self._forget(self._blamed(member.group, others))
                    cluster = self._handles[0].group._cluster
                    explain = None if cluster is None else cluster.explain_death
                    raise member.death(str(error), explain) from error
        # not a worker's own exception: for example, a result that cannot be pickled
        self._forget(self._handles)
        calls = dict.fromkeys(f"{handle.group.name}.{handle.method}" for handle in self._handles)
        raise SchedulerError(f"{', '.join(calls)}: {error}") from error

    def _blamed(self, group: str, others: Sequence[Handle]) -> list[Handle]:
        """The calls whose failure is known once a group's is."""
        return [handle for handle in (*self._handles, *others) if handle.group.name == group]


def same(value: Any) -> Any:
    return value


def only(values: list[Any]) -> Any:
    return values[0]
