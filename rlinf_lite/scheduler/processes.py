"""The processes behind a group, or behind groups that are fused: starting them, starting some again, ending them."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import ray
from ray import cloudpickle

from rlinf_lite.registry import of_main
from rlinf_lite.scheduler.context import ProcessContext, publish, run_on, withdraw
from rlinf_lite.scheduler.errors import CallTimeoutError
from rlinf_lite.scheduler.handle import Calls, Handle, Member, RunningGroup
from rlinf_lite.scheduler.host import DUMP_SIGNAL, SHARED_BYTES, host_class
from rlinf_lite.scheduler.local_ray import local_ray_has_ended
from rlinf_lite.scheduler.nodes import Node, free_port
from rlinf_lite.scheduler.placement import ClusterShape, ComponentPlacement

log = logging.getLogger(__name__)

_END_S = 10.0
_TERM_S = 1.0  # how long a process may take to end by itself before it is killed


def _can_be_sent(name: str, part: Any) -> bool:
    """Of `__main__`; a cell of long ago may have left what cannot, which a worker that asks for it then says."""
    try:
        cloudpickle.dumps(part)
    except Exception as error:  # whatever a user's object raises
        log.warning("__main__:%s cannot be sent to workers: %s: %s", name, type(error).__name__, error)
        return False
    return True


class Site(Protocol):
    """What processes need of the cluster that they are started on."""

    nodes: list[Node]
    shape: ClusterShape
    start_timeout_s: float
    calls: Calls

    def prepare(
        self, node: Node, slots: Sequence[int], env_vars: Mapping[str, str]
    ) -> tuple[dict[str, Any], ProcessContext, dict[str, str]]: ...
    def note_plain(self, reasons: Iterable[str]) -> None: ...
    def replace_lost_nodes(self) -> None: ...


class Processes:
    """One process for each rank of `groups`, which are fused where there are several."""

    def __init__(
        self, groups: Sequence[RunningGroup], site: Site, placed: ComponentPlacement, env_vars: Mapping[str, str]
    ) -> None:
        self.groups, self.placed = groups, placed
        self._site, self._env_vars = site, dict(env_vars)
        parts, registered = of_main()
        parts = {name: part for name, part in parts.items() if _can_be_sent(name, part)}
        registered = [item for item in registered if _can_be_sent(item[1], item[2])]
        payload = cloudpickle.dumps(((parts, registered), [(group.cls, *group.arguments) for group in groups]))
        self._payload = ray.put(payload) if len(payload) > SHARED_BYTES else payload
        self._host = ray.remote(host_class(groups[0].cls.__name__, [group.methods for group in groups]))
        self._ports: list[int] = []
        self._begun: list[list[Member]] = []
        self._building: list[Any] = []

    @property
    def name(self) -> str:
        return "+".join(group.name for group in self.groups)

    def begin(self, ranks: Sequence[int] | None = None) -> None:
        """Start those of some ranks, or all. Nobody may call them before `wait`."""
        site = self._site
        nodes = [site.nodes[site.shape.node_of(process.slots[0])] for process in self.placed.processes]
        processes = [process for process in self.placed.processes if ranks is None or process.rank in ranks]
        if len(processes) == len(nodes):
            self._ports = [run_on(nodes[0].node_id, free_port) for _ in self.groups]
        common = {
            "world_size": len(nodes),
            "device": "cuda:0" if site.shape.accelerator == "cuda" else "cpu",
            "master_addr": nodes[0].ip,
        }
        self._begun, self._building = [], []
        for process in processes:
            node = nodes[process.rank]
            options, context, env_vars = site.prepare(node, process.slots, self._env_vars)
            actor: Any = self._host.options(**options).remote(self.name, process.rank)
            born = actor._process.remote()
            self._begun.append([Member(g.name, process.rank, node, actor, born, i) for i, g in enumerate(self.groups)])
            mine = common | {
                "rank": process.rank,
                "local_rank": nodes[: process.rank].count(node),
                "local_world_size": nodes.count(node),
                "node_rank": node.rank,
            }
            identities = [
                mine | {"name": group.name, "role": group.role, "master_port": port}
                for group, port in zip(self.groups, self._ports, strict=True)
            ]
            self._building.append(actor._build.remote(identities, context, env_vars, site.calls.epoch, self._payload))
        for members in self._begun:
            for group, member in zip(self.groups, members, strict=True):
                group.members[member.rank : member.rank + 1] = [member]

    def wait(self) -> None:
        """Wait until the workers of processes that have begun are constructed."""
        first = [members[0] for members in self._begun]
        handle = Handle(self.groups[0], "__init__", first, self._building, with_peers=False, of_user=False)
        for members, addresses in zip(self._begun, handle.wait(self._site.start_timeout_s), strict=True):
            for member, address in zip(members, addresses, strict=True):
                member.address = address
        self._site.note_plain([ray.get(member.process)[2] for member in first])
        for group in self.groups:
            publish("group", group.name, [member.address for member in group.members])

    def begin_again(self, ranks: Sequence[int]) -> None:
        """End those of some ranks, dead or alive, and start new ones in their place; on another node where theirs is
        lost."""
        self._kill([member for member in self.groups[0].members if member.rank in ranks])
        for group in self.groups:
            group.mesh_places.clear()
            for rank in ranks:
                group.members[rank].remove_inbox()
        self._site.replace_lost_nodes()
        self.begin(ranks)

    def end(self) -> None:
        """Kill all and wait until they are gone; nobody can call the groups any more."""
        try:
            self._kill(self.groups[0].members)
        finally:
            for group in self.groups:
                for member in group.members:
                    member.remove_inbox()
                if group.members and not local_ray_has_ended():
                    withdraw("group", group.name)
                group.members, group.has_ended = [], True

    def _kill(self, members: Sequence[Member]) -> None:
        """Wait until Ray has seen processes die; those that do not end by themselves get SIGKILL."""
        deadline = time.monotonic() + _END_S
        actors = {member.actor._actor_id for member in members}
        self._site.calls.give_up(lambda member: member.actor._actor_id in actors)
        if local_ray_has_ended():  # they end with it, unless something holds them up
            for member in members:
                with suppress(Exception):  # it died before it could say who it is
                    end_process(member.pid, 0.0)
            return
        for member in members:
            ray.kill(member.actor)
        for member in members:
            with suppress(Exception):  # its node may be gone, or it died before it could say who it is
                run_on(member.node.node_id, end_process, member.pid, _TERM_S)
            while True:  # until Ray has seen it die
                try:
                    ray.get(member.actor._ping.remote(), timeout=max(0.05, deadline - time.monotonic()))
                    is_late = time.monotonic() >= deadline
                except ray.exceptions.GetTimeoutError:
                    is_late = True
                except ray.exceptions.RayError:
                    break
                if is_late:
                    raise CallTimeoutError(f"{member} did not stop within {_END_S:g} s")
                time.sleep(0.01)


def dump_stacks(pid: int) -> None:
    """Have a worker's process write the stacks of its Python threads to its log, the main thread's last."""
    if is_ray_process(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)


def end_process(pid: int, grace_s: float) -> None:
    """Wait until one of Ray's processes has ended; SIGKILL where that takes longer than `grace_s`, as when it is
    stopped."""
    deadline = time.monotonic() + grace_s
    while is_ray_process(pid):
        if time.monotonic() >= deadline:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.005)


def is_ray_process(pid: int) -> bool:
    """Whether it lives, and is not another's that got its id since."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().startswith(b"ray::")
    except OSError:
        return False
