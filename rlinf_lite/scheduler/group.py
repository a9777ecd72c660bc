"""A group of worker processes, called as one object."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import ray

from rlinf_lite.scheduler.context import run_on, withdraw
from rlinf_lite.scheduler.dispatch import Arguments, CallRule, Deferred, Execute, call_rule, get_dispatch_mode
from rlinf_lite.scheduler.errors import SchedulerError
from rlinf_lite.scheduler.handle import Handle, only, same
from rlinf_lite.scheduler.host import ray_method
from rlinf_lite.scheduler.mailbox import Abort
from rlinf_lite.scheduler.placement import ComponentPlacement, ProcessPlacement
from rlinf_lite.scheduler.post import push
from rlinf_lite.scheduler.processes import SHARED_BYTES, Member, Processes
from rlinf_lite.scheduler.rows import MeshPlace, mesh_mode
from rlinf_lite.scheduler.worker import Worker

if TYPE_CHECKING:
    from rlinf_lite.scheduler.cluster import Cluster

_Carried = tuple[list[Any], dict[str, Any]]
"""Arguments as Ray carries them."""


class WorkerGroup:
    """What `cls.create_group(...).launch(...)` gives: every public method of `cls`, as a call that returns a Handle."""

    def __init__(self, cls: type[Worker], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._cls, self._args, self._kwargs = cls, args, kwargs
        self._methods = _public_methods(cls)
        self._cluster: Cluster | None = None
        self._epoch, self._aborted = 0, False
        self._processes: Processes | None = None
        self._init_calls: dict[int, _Carried] = {}
        self._meshes: dict[tuple[str, int], MeshPlace | None] = {}
        self.name = cls.__name__
        self.members: list[Member] = []
        taken = sorted(set(self._methods) & {name for name in dir(WorkerGroup) if not name.startswith("_")})
        if taken:
            raise TypeError(f"{cls.__name__}.{taken[0]}: every group has a {taken[0]!r} of its own; rename the method")

    def launch(
        self,
        cluster: Cluster,
        placement_strategy: ComponentPlacement | Sequence[ProcessPlacement] | str = "all",
        name: str | None = None,
        env_vars: Mapping[str, str] = MappingProxyType({}),
    ) -> WorkerGroup:
        """Start the workers and wait until all are constructed. `name` defaults to the component's name.
        Inside `with cluster.launching():` groups start side by side, and the end of the block waits.

        `placement_strategy`: what `HybridComponentPlacement` or a `ResourcePool` gives for a component, processes, or a
        spec such as `0-3:0-7`. Raises WorkerError for what a constructor raises, PlacementError and CallTimeoutError.
        """
        placed = cluster.place(placement_strategy, name or self._cls.__name__)
        launch([self], cluster, placed, {placed.component: name or placed.component}, env_vars)
        return self

    @property
    def world_size(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"WorkerGroup({self.name}, {self.world_size} workers)"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._caller(name, self.__dict__.get("members", ()))

    def execute_on(self, *ranks: int) -> GroupView:
        """A view of some workers: calls through it reach only them, as a group of that size."""
        bad = [rank for rank in ranks if not 0 <= rank < self.world_size]
        if bad or not ranks:
            raise ValueError(
                f"{self.name} has ranks 0..{self.world_size - 1}, not {', '.join(map(str, bad)) or 'none'}"
            )
        return GroupView(self, ranks)

    def abort(self, reason: str) -> None:
        """Make pending and later receives of the workers raise AbortedError, until `clear_abort`. Served at once."""
        cluster = self._running()
        self._epoch, self._aborted = cluster.start_epoch(self.name), True
        cluster.calls.give_up(set(self.members).__contains__)
        for member in self.members:
            if member.address is None:
                continue  # it did not start
            with suppress(ray.exceptions.RayError, ValueError):  # its node is gone
                run_on(member.address.node_id, push, member.address.socket, Abort(self._epoch, reason))

    def clear_abort(self, timeout_s: float = 60.0) -> None:
        """Let the workers receive again. Waits for their running methods to end; drops messages of aborted groups."""
        oldest_epochs = self._running().oldest_epochs
        refs = [member.actor._clear_abort.remote(member.index, self._epoch, oldest_epochs) for member in self.members]
        Handle(self, "clear_abort", self.members, refs).wait(timeout_s)
        self._aborted = False

    def shutdown(self) -> None:
        """Kill the workers, and those fused with them, and wait until they are gone. A second call does nothing."""
        if self._cluster is None:
            return
        cluster, processes = self._cluster, self._processes
        assert processes is not None, "only launched groups have a cluster"
        try:
            processes.end(self.members)
        finally:
            for group in processes.groups:
                if group._cluster is None:
                    continue
                for member in group.members:
                    member.unlink_socket()
                cluster.release(group)
                if not cluster.ray_has_ended():
                    withdraw("group", group.name)
                group._cluster, group._processes, group.members = None, None, []
                group._meshes, group._init_calls, group._aborted = {}, {}, False

    def restart(self, *ranks: int, timeout_s: float | None = None) -> None:
        """Start new workers in the place of some (of all, where none are named), and of those fused with them.

        Each is then given the last `init` call of the one before it, which has `timeout_s`. Others keep running:
        `abort` and `clear_abort` make them forget what they had to do with the old ones.
        """
        restart({self: ranks}, timeout_s)

    def _running(self) -> Cluster:
        if self._cluster is None:
            raise SchedulerError(f"the group {self.name!r} is not running: launch it first")
        return self._cluster

    def _caller(self, name: str, members: Sequence[Member]) -> Callable[..., Any]:
        methods = self.__dict__.get("_methods", {})
        if name not in methods:
            close = difflib.get_close_matches(name, methods, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise AttributeError(
                f"{self.__dict__.get('name', 'group')}: its workers have no public method {name!r}{hint}"
            )
        rule = methods[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            handle = self._call(name, rule, members, args, kwargs)
            return handle.wait() if rule.blocking else handle

        call.__name__ = name
        return call

    def _call(
        self, method: str, rule: CallRule, members: Sequence[Member], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Handle:
        cluster = self._running()
        cluster.record_feeders(self.name, (*args, *kwargs.values()))
        mode = get_dispatch_mode(rule.dispatch_mode)
        if mode.mesh is not None:
            mode = mesh_mode(mode.mesh, self._places(mode.mesh, members))
        rank_zero = rule.execute_mode == Execute.RANK_ZERO
        members, collect = (members[:1], only) if rank_zero else (members, mode.collect)
        stored: dict[int, Any] = {}
        refs = []
        for member, arguments in zip(members, mode.dispatch(len(members), args, kwargs), strict=True):
            carried = _carried(arguments, stored, share=len(members) > 1)
            if method == "init":
                self._init_calls[member.rank] = carried
            refs.append(_start_call(member, method, carried))
        return Handle(self, method, members, refs, collect, rule.timeout_s, calls=cluster.calls)

    def _places(self, mesh: str, members: Sequence[Member]) -> list[MeshPlace | None]:
        """Where these workers stand in a device mesh; asked once, since nobody moves."""
        if any(self._meshes.get((mesh, member.rank)) is None for member in members):
            refs = [member.actor._mesh_place.remote(member.index, mesh) for member in members]
            for member, place in zip(members, Handle(self, "join_mesh", members, refs).wait(), strict=True):
                self._meshes[mesh, member.rank] = place
        return [self._meshes[mesh, member.rank] for member in members]


class GroupView:
    """Some workers of a group, seen as a group. Changes nothing in it."""

    def __init__(self, group: WorkerGroup, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, ranks

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        group: WorkerGroup = self.__dict__["_group"]
        return group._caller(name, [group.members[rank] for rank in self.__dict__["_ranks"]])


class FusedGroups(Mapping[str, WorkerGroup]):
    """Groups by role whose workers of one rank share a process. Each is called as any group; they end together."""

    def __init__(self, groups: dict[str, WorkerGroup]) -> None:
        self._groups = groups

    def launch(
        self, cluster: Cluster, placement_strategy: ComponentPlacement | Sequence[ProcessPlacement] | str = "all"
    ) -> FusedGroups:
        """Start the processes and wait until all workers are constructed. As `WorkerGroup.launch`; groups have the
        names of their roles."""
        placed = cluster.place(placement_strategy, "+".join(self._groups))
        launch(list(self._groups.values()), cluster, placed, {role: role for role in self._groups})
        return self

    def shutdown(self) -> None:
        next(iter(self._groups.values())).shutdown()

    def __getitem__(self, role: str) -> WorkerGroup:
        return self._groups[role]

    def __getattr__(self, role: str) -> WorkerGroup:
        if role not in self.__dict__.get("_groups", {}):
            raise AttributeError(f"no role {role!r} was fused; there are {', '.join(self.__dict__.get('_groups', {}))}")
        return self._groups[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)


def fuse(**roles: WorkerGroup) -> FusedGroups:
    """`fuse(actor=Actor.create_group(cfg), rollout=Rollout.create_group(cfg)).launch(cluster, "0-1")`: two processes,
    each with one worker of every role, which find each other in `self.fused`. Constructed in this order."""
    if not roles:
        raise ValueError("fuse() needs a group for at least one role")
    for role, group in roles.items():
        if group._cluster is not None:
            raise SchedulerError(f"{role}: the group {group.name!r} runs already; fuse groups before they are launched")
    return FusedGroups(roles)


def launch(
    groups: Sequence[WorkerGroup],
    cluster: Cluster,
    placed: ComponentPlacement,
    names: dict[str, str],
    env_vars: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Start processes with a worker of every group in each. `names`: a group's name by its role."""
    for group, name in zip(groups, names.values(), strict=True):
        if group._cluster is not None:
            raise SchedulerError(f"the group {group.name!r} runs already")
        group.name = name
    try:
        processes = Processes(groups, cluster, placed, list(names), env_vars)
        for group in groups:
            cluster.claim(group, placed)
            group._cluster, group._epoch, group._processes = cluster, cluster.epoch, processes
        processes.begin()
        cluster.wait_for(processes)
    except BaseException:
        groups[0].shutdown()
        raise


def restart(ranks: Mapping[WorkerGroup, Sequence[int]], timeout_s: float | None = None) -> None:
    """`WorkerGroup.restart` for several groups, side by side. Goes on where some do not start, and then raises the
    first error."""
    again: dict[Processes, list[int]] = {}
    for group, some in ranks.items():
        group._running()
        assert group._processes is not None, "only launched groups run"
        again.setdefault(group._processes, sorted(set(some)) or list(range(group.world_size)))
    errors: list[SchedulerError] = []
    for begin in (True, False):
        for processes in list(again):
            try:
                processes.begin_again(again[processes]) if begin else processes.wait()
            except SchedulerError as error:
                errors.append(error)
                del again[processes]
    for fused in zip_longest(*(processes.groups for processes in again)):
        handles = [_init_again(group, some) for group, some in zip(fused, again.values(), strict=True) if group]
        for handle in handles:
            try:
                handle.wait(timeout_s)
            except SchedulerError as error:
                errors.append(error)
    if errors:
        raise errors[0]


def _init_again(group: WorkerGroup, ranks: Sequence[int]) -> Handle:
    """Give new workers the `init` call of those before them."""
    group._meshes = {}
    members = [group.members[rank] for rank in ranks if rank in group._init_calls]
    refs = [_start_call(member, "init", group._init_calls[member.rank]) for member in members]
    return Handle(group, "init", members, refs, with_peers=False)


def _public_methods(cls: type[Worker]) -> dict[str, CallRule]:
    names = [name for name in dir(cls) if not name.startswith("_") and name not in Worker._not_callable]
    return {name: call_rule(getattr(cls, name)) for name in names if callable(getattr(cls, name))}


def _start_call(member: Member, method: str, carried: _Carried) -> Any:
    positional, named = carried
    return getattr(member.actor, ray_method(member.index, method)).remote(*positional, **named)


def _carried(arguments: Arguments, stored: dict[int, Any], share: bool) -> _Carried:
    """The arguments as Ray carries them: references lie at the top, where it fetches what they refer to."""
    refs: list[Any] = []

    def carried(value: Any) -> Any:
        value = value.map(same) if isinstance(value, Handle) else value
        if isinstance(value, Deferred):
            refs.extend(value.refs)
            return Deferred((None,) * len(value.refs), value.resolve)
        if share and payload_bytes(value) >= SHARED_BYTES:
            if id(value) not in stored:
                stored[id(value)] = ray.put(value)
            return stored[id(value)]
        return value

    args, kwargs = arguments
    positional, named = [carried(value) for value in args], {key: carried(value) for key, value in kwargs.items()}
    return positional + refs, named


def payload_bytes(value: Any) -> int:
    """Bytes of bulk data in nested containers of arrays, tensors and bytes; other things count as nothing."""
    if isinstance(value, dict):
        return sum(payload_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(payload_bytes(item) for item in value)
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0
