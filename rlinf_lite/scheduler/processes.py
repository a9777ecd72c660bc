"""The processes behind a group, or behind groups that are fused: starting them, starting some again, ending them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from rlinf_lite.scheduler.context import Address, publish, run_on
from rlinf_lite.scheduler.errors import CallTimeoutError, WorkerDiedError
from rlinf_lite.scheduler.handle import Handle
from rlinf_lite.scheduler.host import host_class
from rlinf_lite.scheduler.nodes import free_port, tail_logs

if TYPE_CHECKING:
    from rlinf_lite.scheduler.cluster import Cluster
    from rlinf_lite.scheduler.group import WorkerGroup
    from rlinf_lite.scheduler.nodes import Node
    from rlinf_lite.scheduler.placement import ComponentPlacement

SHARED_BYTES = 100_000
"""Arguments from this size on that several workers get are stored once; below it Ray sends them inside the call."""

ExplainDeath = Callable[[str, int, str], str]
"""Why a worker (`env[1]`) with this process id has died, of which Ray says that; empty: no more is known."""

_END_S = 10.0
_TERM_S = 1.0
"""How long a process may take to end by itself before it is killed."""


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

    @property
    def log_paths(self) -> list[str]:
        return list(ray.get(self.process, timeout=5)[1])

    def death(self, ray_message: str, explain: ExplainDeath | None = None) -> WorkerDiedError:
        """The error for a dead worker, with the tail of its log; tidies up what it left. `explain`: see `Cluster`."""
        where, tail, reason = f"node {self.node.rank} ({self.node.ip})", "", ""
        with suppress(ray.exceptions.RayError):  # it may have died before it could say who it is
            where = f"{where}, pid {self.pid}"
            if explain is not None:
                reason = explain(f"{self.group}[{self.rank}]", self.pid, ray_message)
            try:
                tail = run_on(self.node.node_id, tail_logs, self.log_paths)
            except Exception as error:  # the node may be gone with the worker; its death is still reported
                tail = f"(the log could not be read: {error})"
        self.unlink_socket()
        return WorkerDiedError(self.group, self.rank, where, reason or exit_reason(ray_message), tail)

    def unlink_socket(self) -> None:
        """Tell senders that nobody reads here any more."""
        if self.address is not None:
            with suppress(Exception):  # already gone, with or without its node
                run_on(self.address.node_id, os.unlink, self.address.socket)


class Processes:
    """One process for each rank of `groups`, which are fused where there are several. `roles`: those of the groups."""

    def __init__(
        self,
        groups: Sequence[WorkerGroup],
        cluster: Cluster,
        placed: ComponentPlacement,
        roles: Sequence[str],
        env_vars: Mapping[str, str],
    ) -> None:
        self.groups, self._cluster, self._placed, self._roles = groups, cluster, placed, roles
        self._env_vars = dict(env_vars)
        payload = cloudpickle.dumps([(group._cls, group._args, group._kwargs) for group in groups])
        self._payload = ray.put(payload) if len(payload) > SHARED_BYTES else payload
        self._host = ray.remote(host_class(groups[0]._cls.__name__, [group._methods for group in groups]))
        self._ports: list[int] = []
        self._begun: list[list[Member]] = []
        self._building: list[Any] = []

    def begin_again(self, ranks: Sequence[int]) -> None:
        """End those of some ranks, dead or alive, and start new ones in their place; on another node where theirs is
        lost."""
        self.end([member for member in self.groups[0].members if member.rank in ranks])
        for group in self.groups:
            for rank in ranks:
                group.members[rank].unlink_socket()
        self._cluster.replace_lost_nodes()
        self.begin(ranks)

    def end(self, members: Sequence[Member]) -> None:
        """Kill processes and wait until Ray has seen them die; those that do not end by themselves get SIGKILL."""
        deadline = time.monotonic() + _END_S
        actors = {member.actor._actor_id for member in members}
        self._cluster.calls.give_up(lambda member: member.actor._actor_id in actors)
        if self._cluster.ray_has_ended():  # they end with it, unless something holds them up
            for member in members:
                with suppress(Exception):
                    end_process(member.pid, 0.0)
            return
        for member in members:
            ray.kill(member.actor)
        for member in members:
            with suppress(Exception):  # its node may be gone, or it died before it could say who it is
                run_on(member.node.node_id, end_process, member.pid, _TERM_S)
            if not _is_gone(member, deadline):
                raise CallTimeoutError(f"{member.group}[{member.rank}] did not stop within {_END_S:g} s")

    def begin(self, ranks: Sequence[int] | None = None) -> None:
        """Start those of some ranks, or all. Nobody may call them before `wait`."""
        cluster = self._cluster
        nodes = [cluster.nodes[cluster.shape.node_of(process.slots[0])] for process in self._placed.processes]
        processes = [process for process in self._placed.processes if ranks is None or process.rank in ranks]
        if len(processes) == len(nodes):
            self._ports = [run_on(nodes[0].node_id, free_port) for _ in self.groups]
        common = {
            "world_size": len(nodes),
            "device": "cuda:0" if cluster.accelerator == "cuda" else "cpu",
            "master_addr": nodes[0].ip,
        }
        self._begun, self._building = [], []
        for process in processes:
            node, name = nodes[process.rank], "+".join(group.name for group in self.groups)
            env_vars = self._env_vars | cluster.env_vars(node, process.slots)
            actor: Any = self._host.options(**cluster.actor_options(node, env_vars)).remote(name, process.rank)
            born = actor._process.remote()
            self._begun.append([Member(g.name, process.rank, node, actor, born, i) for i, g in enumerate(self.groups)])
            mine = common | {
                "rank": process.rank,
                "local_rank": nodes[: process.rank].count(node),
                "local_world_size": nodes.count(node),
                "node_rank": node.rank,
            }
            identities = [
                mine | {"name": group.name, "role": role, "master_port": port}
                for group, role, port in zip(self.groups, self._roles, self._ports, strict=True)
            ]
            context = cluster.context(node.rank)
            self._building.append(actor._build.remote(identities, context, env_vars, cluster.epoch, self._payload))
        for members in self._begun:
            for group, member in zip(self.groups, members, strict=True):
                group.members[member.rank : member.rank + 1] = [member]

    def wait(self) -> None:
        """Wait until the workers of processes that have begun are constructed."""
        first = [members[0] for members in self._begun]
        handle = Handle(self.groups[0], "__init__", first, self._building, with_peers=False)
        for members, addresses in zip(self._begun, handle.wait(self._cluster.start_timeout_s), strict=True):
            for member, address in zip(members, addresses, strict=True):
                member.address = address
        self._cluster.note_plain([ray.get(member.process)[2] for member in first])
        for group in self.groups:
            publish("group", group.name, [member.address for member in group.members])


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


def process_exists(pid: int) -> bool:
    """Whether a process of this machine lives, or waits for its end to be noticed."""
    return os.path.exists(f"/proc/{pid}")


def _is_gone(member: Member, deadline: float) -> bool:
    """Whether Ray has seen it die, by the deadline."""
    try:
        while True:
            ray.get(member.actor._ping.remote(), timeout=max(0.05, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
    except ray.exceptions.GetTimeoutError:
        return False
    except ray.exceptions.RayError:
        return True


def exit_reason(ray_message: str) -> str:
    """What Ray says of a worker's end, in a line."""
    _, found, detail = ray_message.partition("Worker exit type: ")
    if not found:
        return ray_message.strip().splitlines()[-1] if ray_message.strip() else "unknown"
    kind, _, text = detail.partition(" Worker exit detail: ")
    reason = f"{kind.strip()}: {text.split('. Some common causes')[0].strip().rstrip('.')}"
    if "connection error" in reason:
        reason += " (the process was killed by a signal, such as the out-of-memory killer's, or crashed)"
    return reason
