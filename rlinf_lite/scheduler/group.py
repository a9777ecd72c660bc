"""A group of worker processes, called as one object."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from rlinf_lite.scheduler.context import Address, publish, run_on, withdraw
from rlinf_lite.scheduler.dispatch import Arguments, CallRule, Deferred, Execute, call_rule, get_dispatch_mode
from rlinf_lite.scheduler.errors import CallTimeoutError, SchedulerError, WorkerDiedError
from rlinf_lite.scheduler.handle import Handle, only, same
from rlinf_lite.scheduler.host import host_class, ray_method
from rlinf_lite.scheduler.mailbox import Abort
from rlinf_lite.scheduler.nodes import free_port, tail_logs
from rlinf_lite.scheduler.placement import ComponentPlacement, ProcessPlacement
from rlinf_lite.scheduler.post import push
from rlinf_lite.scheduler.rows import MeshPlace, mesh_mode
from rlinf_lite.scheduler.worker import Worker

if TYPE_CHECKING:
    from rlinf_lite.scheduler.cluster import Cluster
    from rlinf_lite.scheduler.nodes import Node

_SHARED_BYTES = 100_000
"""Arguments from this size on that several workers get are stored once; below it Ray sends them inside the call."""


@dataclass(eq=False)
class Member:
    """One worker of a group, as the driver knows it."""

    group: str
    rank: int
    node: Node
    actor: Any
    process: Any
    """A reference to the process id and the log files."""
    index: int = 0
    """Which of its process's workers it is."""
    address: Address | None = None
    """Of its mailbox; None until it is constructed."""

    @property
    def pid(self) -> int:
        return int(ray.get(self.process, timeout=5)[0])

    def death(self, ray_message: str) -> WorkerDiedError:
        """The error for a dead worker, with the tail of its log; tidies up what it left."""
        where, tail = f"node {self.node.rank} ({self.node.ip})", ""
        with suppress(ray.exceptions.RayError):  # it may have died before it could say who it is
            pid, log_paths = ray.get(self.process, timeout=5)
            where = f"{where}, pid {pid}"
            try:
                tail = run_on(self.node.node_id, tail_logs, log_paths)
            except Exception as error:  # the node may be gone with the worker; its death is still reported
                tail = f"(the log could not be read: {error})"
        self.unlink_socket()
        return WorkerDiedError(self.group, self.rank, where, _exit_reason(ray_message), tail)

    def unlink_socket(self) -> None:
        """Tell senders that nobody reads here any more."""
        if self.address is not None:
            with suppress(Exception):  # already gone, with or without its node
                run_on(self.address.node_id, os.unlink, self.address.socket)


class WorkerGroup:
    """What `cls.create_group(...).launch(...)` gives: every public method of `cls`, as a call that returns a Handle."""

    def __init__(self, cls: type[Worker], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._cls, self._args, self._kwargs = cls, args, kwargs
        self._methods = _public_methods(cls)
        self._cluster: Cluster | None = None
        self._epoch = 0
        self._fused: Sequence[WorkerGroup] = (self,)
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
    ) -> WorkerGroup:
        """Start the workers and wait until all are constructed. `name` defaults to the component's name.

        `placement_strategy`: what `HybridComponentPlacement` or a `ResourcePool` gives for a component, processes, or a
        spec such as `0-3:0-7`. Raises WorkerError for what a constructor raises, PlacementError and CallTimeoutError.
        """
        placed = cluster.place(placement_strategy, name or self._cls.__name__)
        launch([self], cluster, placed, {placed.component: name or placed.component})
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
        return GroupView(self, [self.members[rank] for rank in ranks])

    def abort(self, reason: str) -> None:
        """Make pending and later receives of the workers raise AbortedError, until `clear_abort`. Served at once."""
        self._epoch = self._running().start_epoch(self.name)
        for member in self.members:
            assert member.address is not None, "only launched groups are called"
            run_on(member.address.node_id, push, member.address.socket, Abort(self._epoch, reason))

    def clear_abort(self, timeout_s: float = 60.0) -> None:
        """Let the workers receive again. Waits for their running methods to end; drops messages of aborted groups."""
        oldest_epochs = self._running().oldest_epochs
        refs = [member.actor._clear_abort.remote(member.index, self._epoch, oldest_epochs) for member in self.members]
        Handle(self, "clear_abort", self.members, refs).wait(timeout_s)

    def shutdown(self) -> None:
        """Kill the workers, and those fused with them, and wait until they are gone. A second call does nothing."""
        if self._cluster is None:
            return
        cluster = self._cluster
        for member in self.members:
            ray.kill(member.actor)
        for group in self._fused:
            for member in group.members:
                member.unlink_socket()
            if group._cluster is not None:
                cluster.release(group)
                withdraw("group", group.name)
        _wait_gone(self.members)
        for group in self._fused:
            group._cluster, group.members, group._meshes = None, [], {}

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
        self._running()
        mode = get_dispatch_mode(rule.dispatch_mode)
        if mode.mesh is not None:
            mode = mesh_mode(mode.mesh, self._places(mode.mesh, members))
        rank_zero = rule.execute_mode == Execute.RANK_ZERO
        members, collect = (members[:1], only) if rank_zero else (members, mode.collect)
        stored: dict[int, Any] = {}
        refs = []
        for member, arguments in zip(members, mode.dispatch(len(members), args, kwargs), strict=True):
            positional, named = _carried(arguments, stored, share=len(members) > 1)
            refs.append(getattr(member.actor, ray_method(member.index, method)).remote(*positional, **named))
        return Handle(self, method, members, refs, collect, rule.timeout_s)

    def _places(self, mesh: str, members: Sequence[Member]) -> list[MeshPlace | None]:
        """Where these workers stand in a device mesh; asked once, since nobody moves."""
        if any(self._meshes.get((mesh, member.rank)) is None for member in members):
            refs = [member.actor._mesh_place.remote(member.index, mesh) for member in members]
            for member, place in zip(members, Handle(self, "join_mesh", members, refs).wait(), strict=True):
                self._meshes[mesh, member.rank] = place
        return [self._meshes[mesh, member.rank] for member in members]


class GroupView:
    """Some workers of a group, seen as a group. Changes nothing in it."""

    def __init__(self, group: WorkerGroup, members: Sequence[Member]) -> None:
        self._group, self._members = group, members

    @property
    def world_size(self) -> int:
        return len(self._members)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self.__dict__["_group"]._caller(name, self.__dict__["_members"])


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


def launch(groups: Sequence[WorkerGroup], cluster: Cluster, placed: ComponentPlacement, names: dict[str, str]) -> None:
    """Start processes with a worker of every group in each. `names`: a group's name by its role."""
    for group, name in zip(groups, names.values(), strict=True):
        if group._cluster is not None:
            raise SchedulerError(f"the group {group.name!r} runs already")
        group.name, group._fused = name, groups
    try:
        for group in groups:
            cluster.claim(group, placed)
            group._cluster, group._epoch = cluster, cluster.epoch
        _start(groups, cluster, placed, list(names))
    except BaseException:
        groups[0].shutdown()
        raise


def _start(groups: Sequence[WorkerGroup], cluster: Cluster, placed: ComponentPlacement, roles: list[str]) -> None:
    payload = cloudpickle.dumps([(group._cls, group._args, group._kwargs) for group in groups])
    shared = ray.put(payload) if len(payload) > _SHARED_BYTES else payload
    host = ray.remote(host_class(groups[0]._cls.__name__, [group._methods for group in groups]))
    nodes = [cluster.nodes[cluster.shape.node_of(process.slots[0])] for process in placed.processes]
    common = {
        "world_size": placed.world_size,
        "device": "cuda:0" if cluster.accelerator == "cuda" else "cpu",
        "master_addr": nodes[0].ip,
    }
    ports = [run_on(nodes[0].node_id, free_port) for _ in groups]
    building = []
    for process, node in zip(placed.processes, nodes, strict=True):
        actor: Any = host.options(**cluster.actor_options(node)).remote("+".join(g.name for g in groups), process.rank)
        born = actor._process.remote()
        for index, group in enumerate(groups):
            group.members.append(Member(group.name, process.rank, node, actor, born, index))
        mine = common | {
            "rank": process.rank,
            "local_rank": nodes[: process.rank].count(node),
            "local_world_size": nodes.count(node),
            "node_rank": node.rank,
        }
        identities = [
            mine | {"name": group.name, "role": role, "master_port": port}
            for group, role, port in zip(groups, roles, ports, strict=True)
        ]
        env_vars = cluster.env_vars(node, process.slots)
        building.append(actor._build.remote(identities, cluster.context(node.rank), env_vars, cluster.epoch, shared))
    built = Handle(groups[0], "__init__", groups[0].members, building).wait(cluster.start_timeout_s)
    for index, group in enumerate(groups):
        for member, addresses in zip(group.members, built, strict=True):
            member.address = addresses[index]
        publish("group", group.name, [addresses[index] for addresses in built])


def _public_methods(cls: type[Worker]) -> dict[str, CallRule]:
    names = [name for name in dir(cls) if not name.startswith("_") and name not in Worker._not_callable]
    return {name: call_rule(getattr(cls, name)) for name in names if callable(getattr(cls, name))}


def _carried(arguments: Arguments, stored: dict[int, Any], share: bool) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as Ray carries them: references lie at the top, where it fetches what they refer to."""
    refs: list[Any] = []

    def carried(value: Any) -> Any:
        value = value.map(same) if isinstance(value, Handle) else value
        if isinstance(value, Deferred):
            refs.extend(value.refs)
            return Deferred((None,) * len(value.refs), value.resolve)
        if share and payload_bytes(value) >= _SHARED_BYTES:
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


def _wait_gone(members: Sequence[Member], limit_s: float = 10.0) -> None:
    """Until Ray has seen every worker die."""
    deadline = time.monotonic() + limit_s
    for member in members:
        try:
            ray.get(member.actor._ping.remote(), timeout=max(0.1, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise CallTimeoutError(f"{member.group}[{member.rank}] did not stop within {limit_s:g} s") from error
        except ray.exceptions.RayError:
            continue


def _exit_reason(ray_message: str) -> str:
    _, found, detail = ray_message.partition("Worker exit type: ")
    if not found:
        return ray_message.strip().splitlines()[-1] if ray_message.strip() else "unknown"
    kind, _, text = detail.partition(" Worker exit detail: ")
    reason = f"{kind.strip()}: {text.split('. Some common causes')[0].strip().rstrip('.')}"
    if "connection error" in reason:
        reason += " (the process was killed by a signal, such as the out-of-memory killer's, or crashed)"
    return reason
