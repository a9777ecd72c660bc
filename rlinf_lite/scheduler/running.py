"""The workers of a launched group: calling them, and making them give up what they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray

from rlinf_lite.scheduler.context import run_on
from rlinf_lite.scheduler.dispatch import (
    Arguments,
    CallRule,
    Deferred,
    Execute,
    MeshPlace,
    get_dispatch_mode,
    mesh_mode,
)
from rlinf_lite.scheduler.handle import Calls, Handle, only, same
from rlinf_lite.scheduler.host import ray_method
from rlinf_lite.scheduler.mailbox import Abort
from rlinf_lite.scheduler.member import Member
from rlinf_lite.scheduler.post import push

SHARED_BYTES = 100_000
"""Arguments from this size on that several workers get are stored once; below it Ray sends them inside the call."""

_Carried = tuple[list[Any], dict[str, Any]]
"""Arguments as Ray carries them."""


@dataclass(eq=False)
class RunningGroup:
    """The workers of one group, by rank, for as long as their processes are theirs; see `Processes`."""

    name: str
    role: str
    cls: type[Any]
    arguments: Arguments
    """Of the workers' constructor."""
    methods: Mapping[str, CallRule]
    """What can be called."""
    calls: Calls
    """Of the cluster."""

    members: list[Member] = field(default_factory=list)
    has_ended: bool = False
    aborted: bool = False
    mesh_places: dict[tuple[str, int], MeshPlace | None] = field(default_factory=dict)
    """By mesh and rank, as far as somebody has asked."""
    _init_calls: dict[int, _Carried] = field(default_factory=dict)

    def call(
        self, method: str, rule: CallRule, members: Sequence[Member], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Handle:
        """Call a method of some of the workers, as a group of that size."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Handle):
                self.calls.data_flow.add((value.group.name, self.name))
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
            refs.append(_start(member, method, carried))
        return Handle(self, method, members, refs, collect, rule.timeout_s)

    def init_again(self, ranks: Sequence[int]) -> Handle:
        """Give new workers the last `init` call of those before them."""
        members = [self.members[rank] for rank in ranks if rank in self._init_calls]
        refs = [_start(member, "init", self._init_calls[member.rank]) for member in members]
        return Handle(self, "init", members, refs, with_peers=False, of_user=False)

    def abort(self, reason: str) -> None:
        """Make pending and later receives of the workers raise AbortedError, until `clear_abort`. Served at once."""
        self.calls.epoch += 1
        epoch = self.calls.oldest_epochs[self.name] = self.calls.epoch
        self.aborted = True
        self.calls.give_up(set(self.members).__contains__)
        for member in self.members:
            if member.address is None:
                continue  # it did not start
            with suppress(ray.exceptions.RayError, ValueError):  # its node is gone
                run_on(member.address.node_id, push, member.address.socket, Abort(epoch, reason))

    def clear_abort(self, timeout_s: float = 60.0) -> None:
        """Let the workers receive again. Waits for their running methods to end; drops messages of aborted groups."""
        oldest = self.calls.oldest_epochs
        epoch = oldest.get(self.name, 0)
        refs = [member.actor._clear_abort.remote(member.index, epoch, oldest) for member in self.members]
        Handle(self, "clear_abort", self.members, refs, of_user=False).wait(timeout_s)
        self.aborted = False

    def _places(self, mesh: str, members: Sequence[Member]) -> list[MeshPlace | None]:
        """Where these workers stand in a device mesh; asked once, since nobody moves."""
        if any(self.mesh_places.get((mesh, member.rank)) is None for member in members):
            refs = [member.actor._mesh_place.remote(member.index, mesh) for member in members]
            places = Handle(self, "join_mesh", members, refs, of_user=False).wait()
            self.mesh_places |= {(mesh, member.rank): place for member, place in zip(members, places, strict=True)}
        return [self.mesh_places[mesh, member.rank] for member in members]


def _start(member: Member, method: str, carried: _Carried) -> Any:
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
