"""A group call on its way, and how the driver waits for some of them."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

import ray
from ray import cloudpickle

from rlinf_lite.scheduler.dispatch import CollectFn, ConcatRows, Deferred, Pending, take_rows
from rlinf_lite.scheduler.errors import CallTimeoutError, ClusterError, SchedulerError, WorkerError
from rlinf_lite.scheduler.local_ray import local_ray_has_ended
from rlinf_lite.scheduler.member import ExplainDeath, Member

_PATROL_S = 1.0
"""How often a wait looks whether idle workers still live, and whether calls that nobody waits for have failed."""


class Calls:
    """What the groups of a cluster have been asked, as far as it concerns later calls and waits.

    It holds the calls whose outcome nobody has seen; one whose handle is dropped leaves by itself.
    """

    epoch: int
    """The number of the last abort."""
    oldest_epochs: dict[str, int]
    """The last abort of each group; what it sent before is stale."""
    data_flow: set[tuple[str, str]]
    """(a, b) where results of group a were given to group b."""
    explain_death: ExplainDeath | None
    """Asks whoever watches the workers."""

    def __init__(self) -> None:
        self.epoch, self.oldest_epochs, self.data_flow, self.explain_death = 0, {}, set(), None
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
        self.forget([handle for handle in self.under_way() if any(map(ended, handle.members))])


class Called(Protocol):
    """What a wait knows of the group that was called."""

    name: str
    members: list[Member]
    calls: Calls

    def abort(self, reason: str) -> None: ...


class Handle(Pending):
    """The result of a group call, which may still be running. `members`: the workers that run it."""

    def __init__(
        self,
        group: Called,
        method: str,
        members: Sequence[Member],
        refs: Sequence[Any],
        collect: CollectFn = list,
        timeout_s: float | None = None,
        with_peers: bool = True,
        of_user: bool = True,
    ) -> None:
        """`with_peers`: waits look at the whole group, whose death the members called might wait for in vain.
        `of_user`: the failure of his other calls ends a wait for this one, and the other way round."""
        self.group, self.method, self.with_peers, self.of_user = group, method, with_peers, of_user
        self.members, self._refs, self._collect = list(members), list(refs), collect
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if of_user:
            group.calls.add(self)

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
        calls = zip(self.members, self._refs, strict=True)
        seconds: list[float] = ray.get([member.actor._duration.remote(ref.task_id().hex()) for member, ref in calls])
        return seconds

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.wait).__await__()

    def map(self, resolve: Callable[[Any], Any]) -> Deferred:
        """As an argument of another group's call: `resolve` of the collected result, computed by the workers."""
        collect = self._collect
        return Deferred(tuple(self._refs), lambda values: resolve(collect(values)))

    def element(self, rank: int, world_size: int) -> Deferred:
        """Output i alone is fetched where the call collects outputs by rank."""
        if self._collect is not list:
            return self.map(same).element(rank, world_size)
        if len(self._refs) != world_size:
            raise ValueError(f"{self!r} has {len(self._refs)} outputs for {world_size} ranks; give one per rank")
        return Deferred((self._refs[rank],), only)

    def rows(self, rank: int, world_size: int) -> Deferred:
        """Rows are taken from the outputs without putting all together."""
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
        refs = [ref for handle in running for ref in handle._refs]

        def swallow() -> None:  # what these calls raise now says nothing new; Ray would print it as unhandled
            for ref in refs:
                with suppress(Exception):
                    ray.get(ref)

        threading.Thread(target=swallow, daemon=True).start()
        raise


def wait_alone(handles: Sequence[Handle], timeout_s: float | None) -> list[Any]:
    """Wait for these calls, whatever becomes of others, and abort nothing; returns their collected results."""
    return _Wait(handles, timeout_s, "", alone=True).run()


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
            left = math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            try:
                values = iter(ray.get(self._refs, timeout=min(_PATROL_S, left)))
                break
            except ray.exceptions.GetTimeoutError:
                self._patrol()
            except ray.exceptions.RayError as error:
                self._raise(error)
        self._forget(self._handles)
        return [handle._collect([next(values) for _ in handle._refs]) for handle in self._handles]

    def _patrol(self) -> None:
        """Look for errors among the finished calls and those of others, for dead workers among the idle, and at the
        clock."""
        if local_ray_has_ended():
            raise ClusterError(
                f"{self._what or self._calls()}: Ray's own processes on this machine have ended. Were they killed?"
            )
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
        first = self._handles[0]
        if self._alone or not first.of_user:
            return []
        return [other for other in first.group.calls.under_way() if other not in self._handles]

    def _forget(self, handles: Sequence[Handle]) -> None:
        if handles:
            handles[0].group.calls.forget(handles)  # all are of one cluster

    def _members(self, handles: Sequence[Handle]) -> list[Member]:
        called = [member for handle in handles for member in handle.members]
        groups = {handle.group for handle in handles if handle.with_peers}
        peers = [member for group in groups for member in group.members]
        return list(dict.fromkeys([*called, *peers]))

    def _late(self, running: set[Any]) -> str:
        late = [
            f"{member}.{handle.method}"
            for handle in self._handles
            for member, ref in zip(handle.members, handle._refs, strict=True)
            if ref in running
        ]
        waited = f"waited {time.monotonic() - self._started:.1f} s"
        done = f"{len(self._refs) - len(late)} of {len(self._refs)} calls are done"
        return f"{self._what + ': ' if self._what else ''}{waited}; not done: {', '.join(late)} ({done})"

    def _raise(self, error: Exception) -> NoReturn:
        others = self._others()
        failure = getattr(error, "cause", None)
        if isinstance(failure, WorkerError):
            self._forget([handle for handle in (*self._handles, *others) if handle.group.name == failure.group])
            pickled = failure.pickled
            raise failure from RuntimeError(failure.summary) if pickled is None else cloudpickle.loads(pickled)
        if isinstance(error, ray.exceptions.RayActorError):
            for member in self._members([*self._handles, *others]):
                if member.actor._actor_id.hex() == error.actor_id:
                    self._forget([h for h in (*self._handles, *others) if h.group.name == member.group])
                    raise member.death(str(error), self._handles[0].group.calls.explain_death) from error
        # not a worker's own exception: for example, a result that cannot be pickled
        self._forget(self._handles)
        raise SchedulerError(f"{self._calls()}: {error}") from error

    def _calls(self) -> str:
        return ", ".join(dict.fromkeys(f"{handle.group.name}.{handle.method}" for handle in self._handles))


def same(value: Any) -> Any:
    return value


def only(values: list[Any]) -> Any:
    return values[0]
