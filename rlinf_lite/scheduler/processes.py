"""The processes of a group, or of fused groups: starting, restarting and ending them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlinf_lite.scheduler.context import network, run_on
from rlinf_lite.scheduler.handle import Calls, Handle, Member, RunningGroup
from rlinf_lite.scheduler.host import DUMP_SIGNAL
from rlinf_lite.scheduler.placement import ComponentPlacement


class Processes:
    """One process per rank of `groups`; several groups are fused, that is, share these processes."""

    def __init__(
        self,
        groups: Sequence[RunningGroup],
        calls: Calls,
        placed: ComponentPlacement,
        env_vars: Mapping[str, str],
        start_timeout_s: float,
    ) -> None:
        self.groups, self.placed = groups, placed
        self._calls, self._runtime = calls, calls.runtime
        self._env_vars, self._start_timeout_s = dict(env_vars), start_timeout_s
        self._payload = self._runtime.pack([(group.cls, *group.arguments) for group in groups])
        self._ports: list[int] = []
        self._begun: list[list[Member]] = []
        self._building: list[Any] = []

    @property
    def name(self) -> str:
        return "+".join(group.name for group in self.groups)

    def begin(self, ranks: Sequence[int] | None = None) -> None:
        """Start the processes of some ranks (None: all). They must not be called before `wait`."""
        runtime = self._runtime
        nodes = [runtime.nodes[runtime.shape.node_of(process.slots[0])] for process in self.placed.processes]
        processes = [process for process in self.placed.processes if ranks is None or process.rank in ranks]
        if len(processes) == len(nodes):
            self._ports = [run_on(nodes[0].node_id, free_port) for _ in self.groups]
        self._begun, self._building = [], []
        title, methods = self.groups[0].cls.__name__, [group.methods for group in self.groups]
        for process in processes:
            node = nodes[process.rank]
            remote = runtime.start(title, self.name, process.rank, node, process.slots, self._env_vars, methods)
            self._begun.append([Member(g.name, process.rank, node, remote, i) for i, g in enumerate(self.groups)])
            common = {
                "rank": process.rank,
                "world_size": len(nodes),
                "local_rank": nodes[: process.rank].count(node),
                "local_world_size": nodes.count(node),
                "node_rank": node.rank,
                "device": runtime.device(process.slots),
                "master_addr": nodes[0].ip,
            }
            identities = [
                common | {"name": group.name, "role": group.role, "master_port": port}
                for group, port in zip(self.groups, self._ports, strict=True)
            ]
            self._building.append(runtime.build(remote, identities, self._calls.epoch, self._payload))
        for members in self._begun:
            for group, member in zip(self.groups, members, strict=True):
                group.members[member.rank : member.rank + 1] = [member]

    def wait(self) -> None:
        """Wait until the workers in the processes that `begin` started are constructed."""
        first = [members[0] for members in self._begun]
        handle = Handle(self.groups[0], "__init__", first, self._building, with_peers=False, of_user=False)
        for members, addresses in zip(self._begun, handle.wait(self._start_timeout_s), strict=True):
            for member, address in zip(members, addresses, strict=True):
                member.address = address
        for group in self.groups:
            network().publish("group", group.name, [member.address for member in group.members])

    def begin_again(self, ranks: Sequence[int]) -> None:
        """End the processes of some ranks, dead or alive, and start new ones; on another node if theirs is lost."""
        self._end([member for member in self.groups[0].members if member.rank in ranks])
        for group in self.groups:
            group.mesh_places.clear()
            for rank in ranks:
                group.members[rank].remove_inbox()
        self._runtime.replace_lost_nodes()
        self.begin(ranks)

    def end(self) -> None:
        """End all processes and wait until they are gone. The groups cannot be called after that."""
        try:
            self._end(self.groups[0].members)
        finally:
            for group in self.groups:
                for member in group.members:
                    member.remove_inbox()
                if group.members and not self._runtime.has_ended():
                    network().withdraw("group", group.name)
                group.members, group.has_ended = [], True

    def _end(self, members: Sequence[Member]) -> None:
        remotes = [member.remote for member in members]
        self._calls.give_up(lambda member: member.remote in remotes)
        self._runtime.end([(str(member), member.node, member.remote) for member in members])


def free_port() -> int:
    """A free port of this node. For a minute the kernel gives it only to programs that ask for it by number.

    The port has had a connection: while that is in TIME_WAIT, the kernel does not assign it to programs that ask for
    any free port.
    """
    with socket.create_server(("", 0)) as server:
        port = int(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            server.accept()[0].close()  # the side that closes first gets TIME_WAIT
    return port


def tail_logs(paths: list[str], num_lines: int = 30, num_bytes: int = 16384) -> str:
    """The last lines of a worker's stdout and stderr files, in that order; empty files are left out."""
    tails = []
    for path in paths:
        with suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - num_bytes))
            lines = file.read().decode(errors="replace").splitlines()
            # Ray marks its own bookkeeping lines with a leading colon
            own = [line for line in lines if not line.startswith((":actor_name:", ":job_id:", ":task_name:"))]
            tails.append("\n".join(own[-num_lines:]))
    return "\n".join(tail for tail in tails if tail)


def dump_stacks(pid: int) -> None:
    """Make a worker's process write the stacks of its Python threads to its log, the main thread's last."""
    if is_ray_process(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)


def end_process(pid: int, grace_s: float) -> None:
    """Wait until a process of Ray has ended; after `grace_s` send SIGKILL, for example to a process that is stopped."""
    deadline = time.monotonic() + grace_s
    while is_ray_process(pid):
        if time.monotonic() >= deadline:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.005)


def is_ray_process(pid: int) -> bool:
    """Whether the process lives and is one of Ray's, not another one that got its id later."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().startswith(b"ray::")
    except OSError:
        return False
