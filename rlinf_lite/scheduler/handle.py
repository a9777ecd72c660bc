"""The workers of a launched group, calls to them, and the driver's waits for the results."""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rlinf_lite.scheduler.context import Address, network
from rlinf_lite.scheduler.dispatch import (
    Arguments,
    CallRule,
    CollectFn,
    ConcatRows,
    Deferred,
    Execute,
    MeshPlace,
    Pending,
    get_dispatch_mode,
    mesh_mode,
    take_rows,
)
from rlinf_lite.scheduler.errors import CallTimeoutError, ClusterError, SchedulerError, WorkerDiedError, WorkerError
from rlinf_lite.scheduler.host import Carried, carry, host_method
from rlinf_lite.scheduler.mailbox import Abort
from rlinf_lite.scheduler.runtime import CallFailed, Node, Remote, Runtime
from rlinf_lite.scheduler.segments import cloudpickle

_PATROL_S = 1.0
"""Interval in which a wait checks that idle workers live, and that calls without a waiter have not failed."""


ExplainDeath = Callable[[str, int, str], str]
"""Maps (worker such as `env[1]`, its process id, Ray's message) to the reason of its death; empty: not known."""


@dataclass(eq=False)
class Member:
    """The driver's record of one worker of a group."""

    group: str
    rank: int
    node: Node
    remote: Remote  # the host of the workers in its process
    index: int = 0  # its position among the workers of its process
    address: Address | None = None  # of its mailbox; None until the worker is constructed

    @property
    def pid(self) -> int:
        return self.remote.pid

    @property
    def log_paths(self) -> list[str]:
        return self.remote.log_paths

    def __str__(self) -> str:
        return f"{self.group}[{self.rank}]"

    def death(self, failed: CallFailed, explain: ExplainDeath | None) -> WorkerDiedError:
        """The error for a dead worker, with the end of its log. Also removes the worker's inbox."""
        where, tail, reason = f"node {self.node.rank} ({self.node.ip})", "", ""
        with suppress(CallFailed, TimeoutError):  # it may have died before it reported its process id
            where = f"{where}, pid {self.pid}"
            if explain is not None:
                reason = explain(str(self), self.pid, failed.text)
            tail = self.remote.log_tail()
        self.remove_inbox()
        return WorkerDiedError(self.group, self.rank, where, reason or exit_reason(failed.text), tail)

    def remove_inbox(self) -> None:
        """Mark the worker's inbox as gone, so that senders notice, and free its unread messages."""
        if self.address is not None:
            with suppress(Exception):  # its node is gone
                network().remove_inbox(self.address)


def exit_reason(ray_message: str) -> str:
    """The reason of a worker's end, in one line, from Ray's message."""
    _, found, detail = ray_message.partition("Worker exit type: ")
    if not found:
        return ray_message.strip().splitlines()[-1] if ray_message.strip() else "unknown"
    kind, _, text = detail.partition(" Worker exit detail: ")
    reason = f"{kind.strip()}: {text.split('. Some common causes')[0].strip().rstrip('.')}"
    if "connection error" in reason:
        reason += " (the process was killed by a signal, such as the out-of-memory killer's, or crashed)"
    return reason


@dataclass(eq=False)
class Calls:
    """The calls of a cluster's groups that later calls and waits depend on.

    It holds the calls whose outcome has not been seen yet; a call whose handle is dropped is removed automatically.
    """

    runtime: Runtime
    epoch: int = 0  # the number of the last abort
    oldest_epochs: dict[str, int] = field(default_factory=dict)
    """The number of the last abort of each group; messages that it sent before are stale."""
    data_flow: set[tuple[str, str]] = field(default_factory=set)  # (a, b): results of group a went to group b
    explain_death: ExplainDeath | None = None  # asks the supervisor of the workers
    _handles: weakref.WeakSet[Handle] = field(default_factory=weakref.WeakSet)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, handle: Handle) -> None:
        with self._lock:
            self._handles.add(handle)

    def forget(self, handles: Iterable[Handle]) -> None:
        """Remove calls whose outcome has been seen or no longer matters."""
        with self._lock:
            self._handles.difference_update(handles)

    def under_way(self) -> list[Handle]:
        with self._lock:
            return list(self._handles)

    def give_up(self, ended: Callable[[Member], bool]) -> None:
        """Drop the calls of workers that were aborted or ended."""
        self.drop([handle for handle in self.under_way() if any(map(ended, handle.members))])

    def drop(self, handles: Sequence[Handle]) -> None:
        """Forget calls that are no longer waited for: their errors say nothing new."""
        self.forget(handles)
        self.runtime.drop([ref for handle in handles for ref in handle._refs])


@dataclass(eq=False)
class RunningGroup:
    """The workers of one group, by rank, until their processes end; see `Processes`."""

    name: str
    role: str
    cls: type[Any]
    arguments: Arguments  # of the workers' constructor
    methods: Mapping[str, CallRule]  # the methods that can be called
    calls: Calls  # those of the cluster

    members: list[Member] = field(default_factory=list)
    has_ended: bool = False
    aborted: bool = False
    mesh_places: dict[tuple[str, int], MeshPlace | None] = field(default_factory=dict)
    """The workers' positions by mesh and rank, filled when a call first needs them."""
    _init_calls: dict[int, Carried] = field(default_factory=dict)

    def call(
        self, method: str, rule: CallRule, members: Sequence[Member], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Handle:
        """Call a method of some of the workers, as on a group of that size."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Handle):
                self.calls.data_flow.add((value.group.name, self.name))
        mode = get_dispatch_mode(rule.dispatch_mode)
        if mode.mesh is not None:
            mesh, known = mode.mesh, self.mesh_places
            if any(known.get((mesh, member.rank)) is None for member in members):  # asked once: positions are fixed
                asked = [member.remote.call("_mesh_place", member.index, mesh) for member in members]
                places = Handle(self, "join_mesh", members, asked, of_user=False).wait()
                known |= {(mesh, member.rank): place for member, place in zip(members, places, strict=True)}
            mode = mesh_mode(mesh, [known[mesh, member.rank] for member in members], lists=mode.collect is list)
        rank_zero = rule.execute_mode == Execute.RANK_ZERO
        members, collect = (members[:1], _only) if rank_zero else (members, mode.collect)
        stored: dict[int, Any] = {}
        refs = []
        for member, arguments in zip(members, mode.dispatch(len(members), args, kwargs), strict=True):
            carried = carry(arguments, stored, self.calls.runtime.put if len(members) > 1 else None)
            if method == "init":
                self._init_calls[member.rank] = carried
            refs.append(_start(member, method, carried))
        return Handle(self, method, members, refs, collect, rule.timeout_s)

    def init_again(self, ranks: Sequence[int]) -> Handle:
        """Repeat the last `init` call of each rank on its new worker."""
        members = [self.members[rank] for rank in ranks if rank in self._init_calls]
        refs = [_start(member, "init", self._init_calls[member.rank]) for member in members]
        return Handle(self, "init", members, refs, with_peers=False, of_user=False)

    def abort(self, reason: str) -> None:
        """Make pending and later receives of the workers raise AbortedError until `clear_abort`. Takes effect at
        once."""
        self.calls.epoch += 1
        epoch = self.calls.oldest_epochs[self.name] = self.calls.epoch
        self.aborted = True
        self.calls.give_up(set(self.members).__contains__)
        for member in self.members:
            if member.address is None:
                continue  # it did not start
            with suppress(Exception):  # its node is gone
                network().send([member.address], Abort(epoch, reason))

    def clear_abort(self, timeout_s: float = 60.0) -> None:
        """Let the workers receive again. Waits until their running methods end; drops messages of aborted groups."""
        oldest = self.calls.oldest_epochs
        epoch = oldest.get(self.name, 0)
        refs = [member.remote.call("_clear_abort", member.index, epoch, oldest) for member in self.members]
        Handle(self, "clear_abort", self.members, refs, of_user=False).wait(timeout_s)
        self.aborted = False


class Handle(Pending):
    """The result of a group call that may still be running. `members`: the workers that run it."""

    def __init__(
        self,
        group: RunningGroup,
        method: str,
        members: Sequence[Member],
        refs: Sequence[Any],
        collect: CollectFn = list,
        timeout_s: float | None = None,
        with_peers: bool = True,
        of_user: bool = True,
    ) -> None:
        """`with_peers`: a wait checks all workers of the group, since the called ones may wait for a dead peer.
        `of_user`: a user's call. If one of the user's calls fails, waits for the others end too."""
        self.group, self.method, self.with_peers, self.of_user = group, method, with_peers, of_user
        self.members, self._refs, self._collect = list(members), list(refs), collect
        self._runtime = group.calls.runtime
        self._deadline = None if timeout_s is None else self._runtime.network.clock() + timeout_s
        if of_user:
            group.calls.add(self)

    def __repr__(self) -> str:
        return f"Handle({self.group.name}.{self.method}, {'done' if self.done() else 'running'})"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} must be an argument of a group call itself, not lie inside one")

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the call and return the collected result. Raises WorkerError, WorkerDiedError and CallTimeoutError.

        Also raises the error of another call of the cluster that fails meanwhile and that nothing waits for, since this
        call may depend on it. The `wait` of that other call raises the error again.
        """
        return _Wait([self], timeout_s, "").run()[0]

    @property
    def refs(self) -> list[Any]:
        """References to the result of each worker, by rank; with Ray they are ObjectRefs, for `ray.get` and
        `ray.wait`."""
        return list(self._refs)

    def done(self) -> bool:
        """Whether every worker has finished or failed."""
        return len(self._runtime.ready(self._refs)) == len(self._refs)

    def durations(self) -> list[float]:
        """Seconds that the method took in each worker, by rank; waits until the call ends."""
        self.wait()
        calls = zip(self.members, self._refs, strict=True)
        id_of = self._runtime.call_id
        return self._runtime.get([member.remote.call("_duration", id_of(ref)) for member, ref in calls], None)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.wait).__await__()

    def map(self, resolve: Callable[[Any], Any]) -> Deferred:
        """An argument for another group's call: `resolve(collected result)`, computed by the workers."""
        collect = self._collect
        return Deferred(tuple(self._refs), lambda values: resolve(collect(values)))

    def deferred(self) -> Deferred:
        return self.map(lambda result: result)

    def element(self, rank: int, world_size: int) -> Deferred:
        """As in `Pending`; if the call collects outputs by rank, the worker fetches only output `rank`."""
        if self._collect is not list:
            return self.deferred().element(rank, world_size)
        if len(self._refs) != world_size:
            raise ValueError(f"{self!r} has {len(self._refs)} outputs for {world_size} ranks; give one per rank")
        return Deferred((self._refs[rank],), _only)

    def rows(self, rank: int, world_size: int) -> Deferred:
        """As in `Pending`; the worker takes its rows from the outputs without concatenating all of them."""
        if not isinstance(self._collect, ConcatRows):
            return self.deferred().rows(rank, world_size)
        return Deferred(tuple(self._collect.chosen(self._refs)), lambda parts: take_rows(parts, rank, world_size))


def _start(member: Member, method: str, carried: Carried) -> Any:
    positional, named = carried
    return member.remote.call(host_method(member.index, method), *positional, **named)


def _only(values: list[Any]) -> Any:
    return values[0]


def wait_all(
    *handles: Handle,
    timeout_s: float | None = None,
    what: str = "",
    check: Callable[[], None] | None = None,
    alone: bool = False,
) -> list[Any]:
    """Wait for calls of several groups together; returns their collected results. While they run, `check` is called
    about every second; an exception from it ends the wait.

    Raises as soon as any call of the cluster fails (with `alone`: any of these calls), or any worker of the called
    groups dies, even if other calls are still blocked. The groups of these handles are then aborted (`group.abort`), so
    that their workers stop waiting for messages that will not come.
    """
    try:
        return _Wait(handles, timeout_s, what, check, alone).run()
    except BaseException as error:
        reason = str(error).split("\n", 1)[0] or type(error).__name__
        running = [handle for handle in handles if not handle.done()]
        for group in {handle.group for handle in running}:
            group.abort(reason)  # also forgets their calls
        if running:
            running[0].group.calls.drop(running)  # those that `abort` does not know: already forgotten, or not a user's
        raise


def wait_alone(handles: Sequence[Handle], timeout_s: float | None) -> list[Any]:
    """Wait for these calls, regardless of others, and abort nothing; returns their collected results."""
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
        """`alone`: ignore failures of other calls."""
        self._handles, self._what, self._check, self._alone = handles, what, check, alone
        self._refs = [ref for handle in handles for ref in handle._refs]
        if not handles:
            return
        self._runtime = handles[0]._runtime  # all are of one cluster
        self._started = self._runtime.network.clock()
        limits = [handle._deadline for handle in handles if handle._deadline is not None]
        self._deadline = min(limits, default=None) if timeout_s is None else self._started + timeout_s
        self._pings: dict[Member, Any] = {}

    def run(self) -> list[Any]:
        """Wait, and return the collected result of each handle."""
        if not self._handles:
            return []
        while True:
            if self._check is not None:
                self._check()
            left = math.inf if self._deadline is None else max(0.0, self._deadline - self._runtime.network.clock())
            try:
                values = iter(self._runtime.get(self._refs, min(_PATROL_S, left)))
                break
            except TimeoutError:
                self._patrol()
            except CallFailed as failed:
                self._raise(failed)
        self._handles[0].group.calls.forget(self._handles)
        return [handle._collect([next(values) for _ in handle._refs]) for handle in self._handles]

    def _patrol(self) -> None:
        """Check for failed calls (of these handles and others), for dead workers that are idle, and for the time
        limit."""
        if self._runtime.has_ended():
            raise ClusterError(
                f"{self._what or self._calls()}: Ray's own processes on this machine have ended. Were they killed?"
            )
        get, ready, id_of = self._runtime.get, self._runtime.ready, self._runtime.call_id
        finished = ready(self._refs)
        running = set(self._refs) - set(finished)
        others = self._others()
        members = self._members([*self._handles, *others])
        pings = {member: ping for member, ping in self._pings.items() if member in members}
        answered = ready(list(pings.values()))
        try:
            get(finished, None)
            failed = {call for calls in get(answered, None) for call in calls}
            refs = [ref for other in others for ref in other._refs] if failed else []
            get([ref for ref in refs if id_of(ref) in failed], None)  # only these: results may be large
        except CallFailed as error:
            self._raise(error)
        if running and self._deadline is not None and self._runtime.network.clock() >= self._deadline:
            calls = [(m, h.method, ref) for h in self._handles for m, ref in zip(h.members, h._refs, strict=True)]
            late = [f"{member}.{method}" for member, method, ref in calls if ref in running]
            waited_s = self._runtime.network.clock() - self._started
            raise CallTimeoutError(
                f"{self._what + ': ' if self._what else ''}waited {waited_s:.1f} s; not done: {', '.join(late)} "
                f"({len(calls) - len(late)} of {len(calls)} calls are done)"
            )
        waiting = {member: ping for member, ping in pings.items() if ping not in set(answered)}
        self._pings = {member: waiting.get(member) or member.remote.call("_ping") for member in members}

    def _others(self) -> list[Handle]:
        """Calls of the same cluster that this wait is not for."""
        first = self._handles[0]
        if self._alone or not first.of_user:
            return []
        return [other for other in first.group.calls.under_way() if other not in self._handles]

    def _members(self, handles: Sequence[Handle]) -> list[Member]:
        called = [member for handle in handles for member in handle.members]
        groups = {handle.group for handle in handles if handle.with_peers}
        peers = [member for group in groups for member in group.members]
        return list(dict.fromkeys([*called, *peers]))

    def _raise(self, failed: CallFailed) -> NoReturn:
        others, drop = self._others(), self._handles[0].group.calls.drop
        failure = failed.raised
        if failure is not None:
            drop([handle for handle in (*self._handles, *others) if handle.group.name == failure.group])
            raise failure from _original(failure)
        for member in self._members([*self._handles, *others]):
            if failed.is_of(member.remote):
                drop([h for h in (*self._handles, *others) if h.group.name == member.group])
                raise member.death(failed, self._handles[0].group.calls.explain_death) from failed.__cause__
        # not raised by the worker's method: for example, a result that cannot be pickled
        drop(self._handles)
        raise SchedulerError(f"{self._calls()}: {failed.text}") from failed.__cause__

    def _calls(self) -> str:
        return ", ".join(dict.fromkeys(f"{handle.group.name}.{handle.method}" for handle in self._handles))


def _original(failure: WorkerError) -> BaseException:
    """The exception that the worker raised, or a RuntimeError with its text if it cannot be pickled."""
    if failure.original is not None:
        return failure.original
    if failure.pickled is None:
        return RuntimeError(failure.summary)
    loaded: BaseException = cloudpickle().loads(failure.pickled)
    return loaded
