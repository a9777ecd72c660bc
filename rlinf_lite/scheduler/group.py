"""A group of worker processes, called as one object."""

from __future__ import annotations

import difflib
import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf_lite.scheduler.context import PeerAddress, publish_group
from rlinf_lite.scheduler.dispatch import Arguments, CallRule, Deferred, Execute, call_rule, get_dispatch_mode
from rlinf_lite.scheduler.errors import CallTimeoutError, SchedulerError, WorkerDiedError
from rlinf_lite.scheduler.handle import Call, Handle, same
from rlinf_lite.scheduler.host import Argument, BuildSpec, CallHeader, Host, ProcessInfo
from rlinf_lite.scheduler.placement import ComponentPlacement, ProcessPlacement
from rlinf_lite.scheduler.worker import Worker, WorkerIdentity

if TYPE_CHECKING:
    from rlinf_lite.scheduler.cluster import Cluster
    from rlinf_lite.scheduler.nodes import Node

_SHARED_BYTES = 100_000
"""Arguments from this size on that several workers get are stored once; below it Ray sends them inside the call."""

_call_ids = itertools.count()


@dataclass(eq=False)
class Member:
    """One worker of a group, as the driver knows it."""

    group: str
    rank: int
    node: Node
    actor: Any
    cluster: Cluster
    process_ref: Any
    address: PeerAddress | None = None
    """Of its mailbox; None until it is constructed."""

    @property
    def process(self) -> ProcessInfo:
        import ray

        info: ProcessInfo = ray.get(self.process_ref, timeout=5)
        return info

    @property
    def pid(self) -> int:
        return self.process.pid

    def death(self, ray_message: str) -> WorkerDiedError:
        """The error for a dead worker, with the tail of its log; tidies up what it left."""
        node, tail = f"node {self.node.rank} ({self.node.ip})", ""
        with suppress(Exception):  # it may have died before it could say who it is
            process = self.process
            node = f"{node}, pid {process.pid}"
            tail = self.cluster.tail(self.node.node_id, process.log_paths)
        self.unlink_socket()
        return WorkerDiedError(self.group, self.rank, node, _exit_reason(ray_message), tail)

    def unlink_socket(self) -> None:
        """Tell senders that nobody reads here any more."""
        if self.address is not None:
            self.cluster.unlink(self.node.node_id, self.address.socket)


class WorkerGroup:
    """What `cls.create_group(...).launch(...)` gives: every public method of `cls`, as a call that returns a Handle."""

    def __init__(self, cls: type[Worker], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._cls, self._args, self._kwargs = cls, args, kwargs
        self._methods = _public_methods(cls)
        self._cluster: Cluster | None = None
        self._epoch = 0
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
        try:
            self._start(cluster, placed)
        except BaseException:
            self._kill(cluster)
            raise
        self._cluster = cluster
        return self

    @property
    def world_size(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"WorkerGroup({self.name}, {self.world_size} workers)"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        methods = self.__dict__.get("_methods", {})
        if name in methods:
            return self._caller(name, methods[name], self.members)
        close = difflib.get_close_matches(name, methods, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"{self.__dict__.get('name', 'group')}: its workers have no public method {name!r}{hint}")

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
        cluster = self._running()
        self._epoch = cluster.next_epoch()
        cluster.oldest_epochs[self.name] = self._epoch
        for member in self.members:
            assert member.address is not None, "only launched groups are called"
            cluster.push_abort(member.address, self._epoch, reason)

    def clear_abort(self, timeout_s: float = 60.0) -> None:
        """Let the workers receive again. Waits for their running methods to end; drops messages of aborted groups."""
        cluster = self._running()
        epochs = dict(cluster.oldest_epochs)
        calls = [Call(member, member.actor.clear_abort.remote(self._epoch, epochs)) for member in self.members]
        Handle(self, "clear_abort", -1, calls, list, True, None).wait(timeout_s)

    def shutdown(self) -> None:
        """Kill the workers and wait until they are gone. A second call does nothing."""
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            self._kill(cluster)

    def _running(self) -> Cluster:
        if self._cluster is None:
            raise SchedulerError(f"the group {self.name!r} is not running: launch it first")
        return self._cluster

    def _start(self, cluster: Cluster, placed: ComponentPlacement) -> None:
        import ray
        from ray import cloudpickle

        payload = cloudpickle.dumps((self._cls, self._args, self._kwargs))
        shared = ray.put(payload) if len(payload) > _SHARED_BYTES else payload
        nodes = [cluster.node_of(process.slots[0]) for process in placed.processes]
        master = cluster.nodes[nodes[0]]
        port = cluster.free_port(master)
        self._epoch = cluster.epoch
        calls = []
        for process, node in zip(placed.processes, nodes, strict=True):
            actor = cluster.actor(Host, node).remote(self.name, process.rank)
            member = Member(self.name, process.rank, cluster.nodes[node], actor, cluster, actor.process_info.remote())
            self.members.append(member)
            identity = WorkerIdentity(
                name=self.name,
                role=placed.component,
                rank=process.rank,
                world_size=placed.world_size,
                local_rank=nodes[: process.rank].count(node),
                local_world_size=nodes.count(node),
                node_rank=node,
                device="cuda:0" if cluster.accelerator == "cuda" else "cpu",
                master_addr=master.ip,
                master_port=port,
            )
            env_vars = cluster.env_vars(node, process.slots)
            spec = BuildSpec(identity, cluster.context(node), env_vars, self._epoch)
            calls.append(Call(member, actor.build.remote(spec, shared)))
        addresses = Handle(self, "__init__", -1, calls, list, True, cluster.start_timeout_s).wait()
        for member, address in zip(self.members, addresses, strict=True):
            member.address = address
        publish_group(self.name, addresses)

    def _kill(self, cluster: Cluster) -> None:
        import ray

        for member in self.members:
            ray.kill(member.actor)
        for member in self.members:
            member.unlink_socket()
        cluster.release(self)
        _wait_gone(self.members)
        self.members = []

    def _caller(self, method: str, rule: CallRule, members: Sequence[Member]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(method, rule, members, args, kwargs)

        call.__name__ = method
        return call

    def _call(
        self, method: str, rule: CallRule, members: Sequence[Member], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._running()
        rank_zero = rule.execute_mode == Execute.RANK_ZERO
        chosen = members[:1] if rank_zero else members
        mode = get_dispatch_mode(rule.dispatch_mode)
        spread = mode.dispatch(len(chosen), args, kwargs)
        call_id = next(_call_ids)
        stored: dict[int, Any] = {}
        calls = []
        for member, arguments in zip(chosen, spread, strict=True):
            plan, values = _flatten(arguments, stored, share=len(chosen) > 1)
            calls.append(Call(member, member.actor.call.remote(CallHeader(call_id, method, plan).pickled(), *values)))
        collect = _first if rank_zero else mode.collect
        by_rank = not rank_zero and mode.by_rank
        handle = Handle(self, method, call_id, calls, collect, by_rank, rule.timeout_s)
        return handle.wait() if rule.blocking else handle


class GroupView:
    """Some workers of a group, seen as a group. Changes nothing in it."""

    def __init__(self, group: WorkerGroup, members: Sequence[Member]) -> None:
        self._group, self._members = group, members

    @property
    def world_size(self) -> int:
        return len(self._members)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        group = self.__dict__["_group"]
        if name not in group._methods:
            return group.__getattr__(name)  # raises AttributeError
        return group._caller(name, group._methods[name], self._members)


def _public_methods(cls: type[Worker]) -> dict[str, CallRule]:
    names = [name for name in dir(cls) if not name.startswith("_") and name not in Worker._not_callable]
    return {
        name: call_rule(member)
        for name in names
        if inspect.isroutine(member := inspect.getattr_static(cls, name)) or callable(member)
    }


def _flatten(arguments: Arguments, stored: dict[int, Any], share: bool) -> tuple[list[Argument] | None, list[Any]]:
    """The arguments as Ray carries them: values and refs side by side, and how to put them together again."""
    args, kwargs = arguments
    plan: list[Argument] = []
    values: list[Any] = []
    plain = not kwargs
    for keyword, value in itertools.chain(((None, value) for value in args), kwargs.items()):
        if isinstance(value, Handle):
            value = value.map(same)
        if share and not isinstance(value, Deferred) and payload_bytes(value) >= _SHARED_BYTES:
            value = _store(value, stored)
        if isinstance(value, Deferred):
            plain = False
            plan.append(Argument(keyword, len(value.refs), value.resolve))
            values.extend(value.refs)
        else:
            plan.append(Argument(keyword, 1, None))
            values.append(value)
    return (None, list(args)) if plain else (plan, values)


def _store(value: Any, stored: dict[int, Any]) -> Deferred:
    import ray

    if id(value) not in stored:
        stored[id(value)] = ray.put(value)
    return Deferred((stored[id(value)],), _first)


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
    import ray

    deadline = time.monotonic() + limit_s
    for member in members:
        try:
            ray.get(member.actor.ping.remote(), timeout=max(0.1, deadline - time.monotonic()))
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


def _first(values: list[Any]) -> Any:
    return values[0]
