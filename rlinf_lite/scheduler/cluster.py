"""The cluster of a run: its slots, and the worker groups that run on them."""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

from rlinf_lite.scheduler.errors import ClusterError, PlacementError, SchedulerError, WorkerError
from rlinf_lite.scheduler.handle import Calls, RunningGroup
from rlinf_lite.scheduler.placement import (
    ClusterSettings,
    ClusterShape,
    ComponentPlacement,
    HybridComponentPlacement,
    NodeGroup,
    ProcessPlacement,
    check_nodes,
    parse_placement,
    place_component,
)
from rlinf_lite.scheduler.processes import Processes
from rlinf_lite.scheduler.runtime import Node, Runtime


class Launchable(Protocol):
    """A WorkerGroup that is not running yet."""

    def launch(
        self, cluster: Cluster, placement_strategy: ComponentPlacement = ..., name: str | None = ...
    ) -> object: ...


Group = TypeVar("Group", bound=Launchable)


class Cluster:
    """The slots of a run and the worker groups on them. It joins the Ray at RAY_ADDRESS, or the Ray that this process
    is connected to, and otherwise starts one on this machine. With `runtime="local"` there is no Ray: workers are
    threads of this process, and one of them computes at a time.

    Slots are GPUs where every node has GPUs, otherwise virtual: `num_gpus_per_node` of them per node. The cluster ends
    with the process; `shutdown` (or a `with` block) ends it earlier. Raises ClusterError.
    """

    num_nodes: int
    runtime: Runtime
    processes: list[Processes]
    pools: dict[str, frozenset[int]]  # the slots of each resource pool
    calls: Calls

    _current: Cluster | None = None

    @classmethod
    def from_config(cls, cfg: ClusterSettings) -> Cluster:
        """The cluster that a config's `cluster` section describes."""
        places = (cfg.num_nodes, cfg.num_gpus_per_node, cfg.accelerator, cfg.node_groups, cfg.start_timeout_s)
        return cls(*places, runtime=cfg.runtime)

    def __init__(
        self,
        num_nodes: int = 1,
        num_gpus_per_node: int | None = None,
        accelerator: str = "auto",
        node_groups: Sequence[NodeGroup] = (),
        start_timeout_s: float = 120.0,
        log_to_driver: bool = True,
        runtime: Literal["ray", "local"] = "ray",
    ) -> None:
        if Cluster._current is not None:
            raise ClusterError("this process has a Cluster already: shut it down before making another")
        if runtime == "local":
            if num_nodes != 1:
                raise ClusterError(f"a local runtime is this process: num_nodes is 1 there, not {num_nodes}")
            from rlinf_lite.scheduler.local_runtime import LocalRuntime

            self.runtime = LocalRuntime(num_gpus_per_node, accelerator, node_groups)
        else:
            from rlinf_lite.scheduler.ray_runtime import RayRuntime  # only now: importing Ray takes a second

            places = (num_nodes, num_gpus_per_node, accelerator, node_groups, start_timeout_s)
            self.runtime = RayRuntime(*places, log_to_driver)
        self.num_nodes, self._start_timeout_s = num_nodes, start_timeout_s
        self.processes, self.pools, self.calls = [], {}, Calls(self.runtime)
        self._launching: list[Processes] | None = None
        Cluster._current = self
        atexit.register(self.shutdown)

    @classmethod
    def current(cls) -> Cluster | None:
        """The cluster of this process, or None."""
        return cls._current

    @property
    def shape(self) -> ClusterShape:
        """The number of nodes and slots."""
        return self.runtime.shape

    @property
    def nodes(self) -> list[Node]:
        """The machines, by their rank."""
        return self.runtime.nodes

    @property
    def accelerator(self) -> str:
        """The kind of a slot: `cuda` or `cpu`."""
        return self.shape.accelerator

    @property
    def groups(self) -> dict[str, RunningGroup]:
        """The running groups, by name."""
        return {group.name: group for processes in self.processes for group in processes.groups}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.shutdown()
        if isinstance(error, WorkerError) and error.original is not None:
            raise error.original  # raised in a thread of this process, with its own traceback

    def shutdown(self) -> None:
        """End all groups, and Ray if this process started or joined it. A second call does nothing."""
        if Cluster._current is not self:
            return
        Cluster._current = None
        atexit.unregister(self.shutdown)
        for processes in list(self.processes):
            with suppress(Exception):  # Ray itself may be gone; the steps after this one must still run
                self.end(processes)
        self.runtime.close()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Start the groups that are launched inside the block in parallel; the end of the block waits for all of them.

        If one group fails to start, all of them are ended. Outside such a block, `launch` itself waits.
        """
        begun: list[Processes] = []
        self._launching = begun
        try:
            yield
            for processes in begun:
                processes.wait()
        except BaseException:
            for processes in begun:
                self.end(processes)
            raise
        finally:
            self._launching = None

    def launch(self, placement: HybridComponentPlacement, **groups: Group) -> dict[str, Group]:
        """Start groups in parallel, each on the slots of the component of its name. Groups that `cluster.fuse` names
        share processes, in which the workers are constructed in the order of the arguments."""
        fused: Any = {name: group for name, group in groups.items() if name in placement.fused}
        with self.launching():
            if fused:
                first = next(iter(fused))
                fused[first].launch_fused(fused, self, placement.get_strategy(first))
            for name, group in groups.items():
                if name not in fused:
                    group.launch(self, placement.get_strategy(name), name=name)
        return groups

    def start(
        self,
        groups: Sequence[RunningGroup],
        placed: ComponentPlacement,
        env_vars: Mapping[str, str] = MappingProxyType({}),
    ) -> Processes:
        """Start processes that hold one worker of every group, and wait until the workers are constructed (inside
        `launching`, the end of the block waits). Raises ClusterError for a name that is taken, PlacementError for slots
        of another pool."""
        processes = Processes(groups, self.calls, placed, env_vars, self._start_timeout_s)
        for name in {group.name for group in groups} & self.groups.keys():
            raise ClusterError(f"a group named {name!r} is running: shut it down, or launch with another name")
        for pool, slots in self.pools.items():
            if pool != placed.pool and placed.slots & slots:
                raise PlacementError(
                    f"{processes.name} needs slots {_listed(placed.slots & slots)}, which belong to the resource pool "
                    f"{pool!r}."
                )
        self.processes.append(processes)
        try:
            processes.begin()
            if self._launching is None:
                processes.wait()
            else:
                self._launching.append(processes)
        except BaseException:
            self.end(processes)
            raise
        return processes

    def restart(self, ranks: Mapping[str, Sequence[int]], timeout_s: float | None = None) -> None:
        """Replace workers, and those fused with them, by new ones, in parallel, and repeat the last `init` call of each
        (limit: `timeout_s`). `ranks`: by group; an empty sequence means all ranks. If some workers do not start, the
        others still do, and then the first error is raised."""
        again: dict[Processes, set[int]] = {}
        for name, some in ranks.items():
            if name not in self.groups:
                raise ClusterError(f"no group named {name!r} is running: it cannot start again")
            processes = next(found for found in self.processes if self.groups[name] in found.groups)
            again.setdefault(processes, set()).update(some or range(len(self.groups[name].members)))
        errors: list[SchedulerError] = []
        begun: list[Processes] = []
        for processes, chosen in again.items():
            try:
                processes.begin_again(sorted(chosen))
                begun.append(processes)
            except SchedulerError as error:
                errors.append(error)
        started: list[Processes] = []
        for processes in begun:
            try:
                processes.wait()
                started.append(processes)
            except SchedulerError as error:
                errors.append(error)
        # workers of one process get their `init` one after the other, in the order in which they were constructed
        for fused in zip_longest(*(processes.groups for processes in started)):
            pairs = zip(fused, started, strict=True)
            calls = [group.init_again(sorted(again[processes])) for group, processes in pairs if group]
            for handle in calls:
                try:
                    handle.wait(timeout_s)
                except SchedulerError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def end(self, processes: Processes) -> None:
        """Kill processes, and wait until they are gone. A second call does nothing."""
        if processes in self.processes:
            try:
                processes.end()
            finally:
                self.processes.remove(processes)

    def place(self, strategy: ComponentPlacement | Sequence[ProcessPlacement] | str, name: str) -> ComponentPlacement:
        """The placement on this cluster that `launch`'s argument describes. Raises PlacementError."""
        if isinstance(strategy, str | int):
            return place_component(name, strategy, self.shape)
        if not isinstance(strategy, ComponentPlacement):
            strategy = ComponentPlacement(name, "processes", tuple(strategy))
        highest = max(strategy.slots)
        if highest >= self.shape.num_slots:
            raise PlacementError(
                f"{strategy.component}: {strategy.spec} was planned for at least {highest + 1} slots, this cluster has "
                f"{self.shape.describe()}. Set cluster.num_nodes and cluster.num_gpus_per_node to what the cluster has."
            )
        check_nodes(strategy.processes, self.shape, f"{strategy.component}: {strategy.spec}")
        return strategy


def _listed(slots: Iterable[int]) -> str:
    return ", ".join(str(slot) for slot in sorted(slots))


class ResourcePool:
    """A named set of a cluster's slots, on which no other pool, and no group outside this pool, can be placed.

    Groups of a pool may share its slots. Raises PlacementError if another pool or a running group has some of them.
    """

    def __init__(self, cluster: Cluster, name: str, slots: str | int) -> None:
        wanted = cluster.place(str(slots), name).slots
        needs = f"the resource pool {name!r} needs slots {_listed(wanted)}"
        for other, taken in cluster.pools.items():
            if other == name or taken & wanted:
                raise PlacementError(f"{needs}; {other!r} has {_listed(taken)}.")
        for processes in cluster.processes:
            if processes.placed.slots & wanted:
                raise PlacementError(f"{needs}; {processes.name} runs on {_listed(processes.placed.slots)}.")
        cluster.pools[name] = wanted
        self._cluster, self.name, self.slots = cluster, name, tuple(sorted(wanted))

    def get_strategy(self, component: str, spec: str | int = "all") -> ComponentPlacement:
        """The placement of a component in this pool, for `launch`; slots in `spec` are numbered within the pool. Raises
        PlacementError."""
        accelerator, has = self._cluster.accelerator, f"the pool {self.name!r} has"
        local = parse_placement(spec, len(self.slots), component=component, accelerator=accelerator, where=has)
        placed = tuple(ProcessPlacement(p.rank, tuple(self.slots[slot] for slot in p.slots)) for p in local)
        where = f"{spec} of the pool {self.name!r}"
        return self._cluster.place(ComponentPlacement(component, where, placed, pool=self.name), component)

    def release(self) -> None:
        """Give the slots back to the cluster. Groups of the pool keep running."""
        self._cluster.pools.pop(self.name, None)
