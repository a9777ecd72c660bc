"""The machines and slots of a run, and everything that groups need from them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlinf_lite.scheduler.agent import NodeAgent, free_port, tail_logs
from rlinf_lite.scheduler.context import (
    RAY_NAMESPACE,
    PeerAddress,
    ProcessContext,
    agent_name,
    publish_group,
    set_context,
)
from rlinf_lite.scheduler.errors import ClusterError, PlacementError
from rlinf_lite.scheduler.local_ray import SLOT_RESOURCE, LocalRay, join_ray
from rlinf_lite.scheduler.mailbox import SocketPool, abort_frames
from rlinf_lite.scheduler.nodes import TINY_SHARE, Node, driver_node_id, find_devices, find_nodes, find_shape, reserve
from rlinf_lite.scheduler.placement import (
    ClusterShape,
    ComponentPlacement,
    ProcessPlacement,
    detect_slots,
    parse_node_ranks,
    parse_placement,
)
from rlinf_lite.scheduler.scratch import ScratchDirs

if TYPE_CHECKING:
    from rlinf_lite.config.schema import ClusterConfig, NodeGroup
    from rlinf_lite.scheduler.group import WorkerGroup


class Cluster:
    """Joins the Ray at RAY_ADDRESS (or the one this process is connected to), else starts one on this machine.

    Slots are GPUs where every node has some, else virtual: `num_gpus_per_node` of them per node. Raises ClusterError.
    Ends by itself with the process; `shutdown` (or a `with` block) ends it earlier.
    """

    num_nodes: int
    shape: ClusterShape
    nodes: list[Node]
    epoch: int
    oldest_epochs: dict[str, int]
    groups: dict[str, WorkerGroup]

    _current: Cluster | None = None

    @classmethod
    def from_config(cls, cfg: ClusterConfig) -> Cluster:
        """The cluster that a config's `cluster` section describes."""
        return cls(cfg.num_nodes, cfg.num_gpus_per_node, cfg.accelerator, cfg.node_groups, cfg.start_timeout_s)

    def __init__(
        self,
        num_nodes: int = 1,
        num_gpus_per_node: int | None = None,
        accelerator: str = "auto",
        node_groups: Sequence[NodeGroup] = (),
        start_timeout_s: float = 120.0,
        log_to_driver: bool = True,
    ) -> None:
        if Cluster._current is not None:
            raise ClusterError("this process has a Cluster already: shut it down before making another")
        self.num_nodes, self.start_timeout_s = num_nodes, start_timeout_s
        self.epoch, self.oldest_epochs, self.groups = 0, {}, {}
        self._node_groups = node_groups
        self._pools: dict[str, frozenset[int]] = {}
        self._placements: dict[str, ComponentPlacement] = {}
        self._sockets = SocketPool()
        self._agents: dict[str, Any] = {}
        self._local: LocalRay | None = None
        self._joined = False
        self._placement_group: Any = None
        self._dirs = ScratchDirs()
        Cluster._current = self
        atexit.register(self.shutdown)
        try:
            # connect to Ray, or start it
            self._connect(num_gpus_per_node, accelerator, log_to_driver)

            # know the nodes and what a slot is
            self.nodes = find_nodes(num_nodes, start_timeout_s)
            self.shape = find_shape(self.nodes, accelerator, num_gpus_per_node)

            # reserve the slots, so that other jobs of the same Ray stay off them
            slot_resource = self._local is not None
            self._placement_group = reserve(self.nodes, self.shape, slot_resource, start_timeout_s)
            self._devices = find_devices(self.nodes, self.shape, self._placement_group, start_timeout_s)

            # give every node its directories
            self._contexts = self._make_contexts()
            self._env_vars = self._merge_env_vars()
            set_context(self._contexts[driver_node_id()])
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def current(cls) -> Cluster | None:
        """The cluster of this process."""
        return cls._current

    @property
    def accelerator(self) -> str:
        """What a slot is: cuda or cpu."""
        return self.shape.accelerator

    @property
    def num_slots(self) -> int:
        return self.shape.num_slots

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End all groups, and Ray if this process started or joined it. A second call does nothing."""
        import ray

        if Cluster._current is not self:
            return
        Cluster._current = None
        atexit.unregister(self.shutdown)
        for group in list(self.groups.values()):
            with suppress(Exception):  # Ray itself may be gone; what follows must run all the same
                group.shutdown()
        if ray.is_initialized():
            with suppress(Exception):
                self._release_ray()
        if self._local is not None:
            self._local.stop()
        elif self._joined:
            ray.shutdown()
        self._sockets.close()
        self._dirs.remove()
        set_context(None)

    def place(self, strategy: ComponentPlacement | Sequence[ProcessPlacement] | str, name: str) -> ComponentPlacement:
        """A placement of this cluster's slots from whatever `launch` was given. Raises PlacementError."""
        if isinstance(strategy, str | int):
            processes = parse_placement(
                strategy,
                self.num_slots,
                component=name,
                slots_per_node=self.shape.slots_per_node,
                accelerator=self.accelerator,
            )
            return ComponentPlacement(name, str(strategy), tuple(processes))
        if not isinstance(strategy, ComponentPlacement):
            strategy = ComponentPlacement(name, "processes", tuple(strategy))
        highest = max(slot for process in strategy.processes for slot in process.slots)
        if highest >= self.num_slots:
            raise PlacementError(
                f"{strategy.component}: {strategy.spec} was planned for at least {highest + 1} slots, this cluster has "
                f"{self.shape.describe()}. Set cluster.num_nodes and cluster.num_gpus_per_node to what the cluster has."
            )
        return strategy

    def claim(self, group: WorkerGroup, placed: ComponentPlacement) -> None:
        """Register a group that is about to start. Raises PlacementError for slots of another pool."""
        if group.name in self.groups:
            raise ClusterError(f"a group named {group.name!r} is running: shut it down, or launch with another name")
        used = {slot for process in placed.processes for slot in process.slots}
        for pool, slots in self._pools.items():
            if pool != placed.pool and used & slots:
                raise PlacementError(
                    f"{group.name} needs slots {_listed(used & slots)}, which belong to the resource pool {pool!r}."
                )
        self.groups[group.name] = group
        self._placements[group.name] = placed

    def release(self, group: WorkerGroup) -> None:
        if self.groups.get(group.name) is group:
            del self.groups[group.name], self._placements[group.name]
            publish_group(group.name, None)

    def add_pool(self, name: str, slots: frozenset[int]) -> None:
        """Reserve slots for a pool. Raises PlacementError where another pool or a group uses them."""
        for other, taken in self._pools.items():
            if other == name or taken & slots:
                raise PlacementError(
                    f"the resource pool {name!r} needs slots {_listed(slots)}; {other!r} has {_listed(taken)}."
                )
        for group, placed in self._placements.items():
            used = {slot for process in placed.processes for slot in process.slots}
            if used & slots:
                raise PlacementError(
                    f"the resource pool {name!r} needs slots {_listed(slots)}; {group} runs on {_listed(used)}."
                )
        self._pools[name] = slots

    def remove_pool(self, name: str) -> None:
        self._pools.pop(name, None)

    def node_of(self, slot: int) -> int:
        return self.shape.node_of(slot)

    def actor(self, cls: type, node: int) -> Any:
        """A Ray actor class bound to a node's reserved slots; `.remote(...)` starts it."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._placement_group, placement_group_bundle_index=node)
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": strategy, "enable_task_events": False}
        if self.accelerator == "cuda":
            options["num_gpus"] = TINY_SHARE
        elif self._local is not None:
            options["resources"] = {SLOT_RESOURCE: TINY_SHARE}
        return ray.remote(cls).options(**options)

    def context(self, node: int) -> ProcessContext:
        return self._contexts[self.nodes[node].node_id]

    def env_vars(self, node: int, slots: Sequence[int]) -> dict[str, str]:
        """Environment of a worker: its node group's variables, and its slots as the only visible devices."""
        local = [slot % self.shape.slots_per_node for slot in slots]
        devices = self._devices[node]
        visible = ",".join(devices[slot] for slot in local) if self.accelerator == "cuda" else ""
        return self._env_vars[node] | {"CUDA_VISIBLE_DEVICES": visible}

    def free_port(self, node: Node) -> int:
        return int(self._on_node(node.node_id, free_port, "free_port"))

    def tail(self, node_id: str, paths: Sequence[str]) -> str:
        try:
            return str(self._on_node(node_id, tail_logs, "tail", list(paths)))
        except Exception as error:  # the node may be gone with the worker; its death is still reported
            return f"(the log could not be read: {error})"

    def unlink(self, node_id: str, path: str) -> None:
        with suppress(Exception):  # already gone, with or without its node
            self._on_node(node_id, os.unlink, "unlink", path)

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def push_abort(self, address: PeerAddress, epoch: int, reason: str) -> None:
        self._on_node(address.node_id, self._sockets.push, "push", address.socket, abort_frames(epoch, reason))

    def _connect(self, num_gpus_per_node: int | None, accelerator: str, log_to_driver: bool) -> None:
        import ray

        address = os.environ.get("RAY_ADDRESS") or ("auto" if self.num_nodes > 1 else None)
        if ray.is_initialized():
            return
        if address is None:
            kind, slots = detect_slots(accelerator, num_gpus_per_node)
            self._local = LocalRay(self._dirs.temp, slots, 0 if kind == "cpu" else None, log_to_driver)
            return
        try:
            join_ray(address, log_to_driver)
        except ConnectionError as error:
            raise ClusterError(
                f"cluster.num_nodes: {self.num_nodes}: no Ray answers at {address}, or it has another token ({error}). "
                "Run `ray start --head` "
                "on one node and `ray start --address=<it>` on the others, then set RAY_ADDRESS."
            ) from error
        self._joined = True

    def _make_contexts(self) -> dict[str, ProcessContext]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        driver = driver_node_id()
        node_ids = {node.node_id for node in self.nodes} | {driver}
        if node_ids == {driver}:
            return {driver: ProcessContext(self._dirs.uid, driver, self._dirs.temp, self._dirs.shm, single_node=True)}
        for node_id in sorted(node_ids):
            options = {
                "name": agent_name(self._dirs.uid, node_id),
                "namespace": RAY_NAMESPACE,
                "num_cpus": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
            }
            self._agents[node_id] = ray.remote(NodeAgent).options(**options).remote(self._dirs.uid, node_id)
        contexts = ray.get([agent.context.remote() for agent in self._agents.values()], timeout=self.start_timeout_s)
        return {context.node_id: context for context in contexts}

    def _merge_env_vars(self) -> list[dict[str, str]]:
        merged: list[dict[str, str]] = [{} for _ in self.nodes]
        for group in self._node_groups:
            for rank in parse_node_ranks(group.nodes, self.num_nodes, group.label):
                merged[rank].update(group.env_vars)
        return merged

    def _on_node(self, node_id: str, local: Callable[..., Any], remote: str, *args: Any) -> Any:
        """Run something on a node: here where it is this one, else through its agent."""
        import ray

        agent = self._agents.get(node_id)
        return local(*args) if agent is None else ray.get(getattr(agent, remote).remote(*args), timeout=30)

    def _release_ray(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._agents:
            ray.get([agent.close.remote() for agent in self._agents.values()], timeout=10)
            for agent in self._agents.values():
                ray.kill(agent)
        if self._placement_group is not None:
            remove_placement_group(self._placement_group)


def _listed(slots: Iterable[int]) -> str:
    return ", ".join(str(slot) for slot in sorted(slots))
