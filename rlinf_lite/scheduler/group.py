"""A group of worker processes, called as one object."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from rlinf_lite.scheduler.context import Address, publish, run_on, withdraw
from rlinf_lite.scheduler.dispatch import Arguments, CallRule, Deferred, Execute, call_rule, get_dispatch_mode
from rlinf_lite.scheduler.errors import CallTimeoutError, SchedulerError, WorkerDiedError
from rlinf_lite.scheduler.handle import Handle, only, same
from rlinf_lite.scheduler.host import host_class
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
        if self._cluster is not None:
            raise SchedulerError(f"the group {self.name!r} runs already")
        placed = cluster.place(placement_strategy, name or self._cls.__name__)
        self.name = name or placed.component
        cluster.claim(self, placed)
        self._cluster = cluster
        try:
            self._start(cluster, placed)
        except BaseException:
            self.shutdown()
            raise
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
        refs = [member.actor._clear_abort.remote(self._epoch, oldest_epochs) for member in self.members]
        Handle(self, "clear_abort", self.members, refs).wait(timeout_s)

    def shutdown(self) -> None:
        """Kill the workers and wait until they are gone. A second call does nothing."""
        if self._cluster is None:
            return
        cluster, self._cluster = self._cluster, None
        for member in self.members:
            ray.kill(member.actor)
        for member in self.members:
            member.unlink_socket()
        cluster.release(self)
        withdraw("group", self.name)
        _wait_gone(self.members)
        self.members, self._meshes = [], {}

    def _running(self) -> Cluster:
        if self._cluster is None:
            raise SchedulerError(f"the group {self.name!r} is not running: launch it first")
        return self._cluster

    def _start(self, cluster: Cluster, placed: ComponentPlacement) -> None:
        payload = cloudpickle.dumps((self._cls, self._args, self._kwargs))
        shared = ray.put(payload) if len(payload) > _SHARED_BYTES else payload
        host = ray.remote(host_class(self._cls.__name__, self._methods))
        nodes = [cluster.nodes[cluster.shape.node_of(process.slots[0])] for process in placed.processes]
        common = {
            "name": self.name,
            "role": placed.component,
            "world_size": placed.world_size,
            "device": "cuda:0" if cluster.accelerator == "cuda" else "cpu",
            "master_addr": nodes[0].ip,
            "master_port": run_on(nodes[0].node_id, free_port),
        }
        self._epoch = cluster.epoch
        building = []
        for process, node in zip(placed.processes, nodes, strict=True):
            actor: Any = host.options(**cluster.actor_options(node)).remote(self.name, process.rank)
            self.members.append(Member(self.name, process.rank, node, actor, actor._process.remote()))
            identity = common | {
                "rank": process.rank,
                "local_rank": nodes[: process.rank].count(node),
                "local_world_size": nodes.count(node),
                "node_rank": node.rank,
            }
            env_vars = cluster.env_vars(node, process.slots)
            building.append(actor._build.remote(identity, cluster.context(node.rank), env_vars, self._epoch, shared))
        addresses = Handle(self, "__init__", self.members, building).wait(cluster.start_timeout_s)
        for member, address in zip(self.members, addresses, strict=True):
            member.address = address
        publish("group", self.name, addresses)

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
            refs.append(getattr(member.actor, method).remote(*positional, **named))
        return Handle(self, method, members, refs, collect, rule.timeout_s)

    def _places(self, mesh: str, members: Sequence[Member]) -> list[MeshPlace | None]:
        """Where these workers stand in a device mesh; asked once, since nobody moves."""
        if any(self._meshes.get((mesh, member.rank)) is None for member in members):
            refs = [member.actor._mesh_place.remote(mesh) for member in members]
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
