"""The machines and slots of a run, and the groups that run there."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlinf_lite.scheduler.channel import leave_channels
from rlinf_lite.scheduler.context import RAY_NAMESPACE, NodeAgent, ProcessContext, agent_name, get_context, set_context
from rlinf_lite.scheduler.errors import ClusterError, PlacementError, SchedulerError
from rlinf_lite.scheduler.forked import ForkedWorkers
from rlinf_lite.scheduler.handle import Calls, RunningGroup
from rlinf_lite.scheduler.local_ray import SLOT_RESOURCE, keeping_sigterm, knock, local_ray, local_ray_has_ended
from rlinf_lite.scheduler.nodes import (
    Node,
    driver_node_id,
    find_devices,
    find_nodes,
    find_shape,
    find_substitute,
    reserve,
)
from rlinf_lite.scheduler.placement import (
    ClusterSettings,
    ClusterShape,
    ComponentPlacement,
    HybridComponentPlacement,
    NodeGroup,
    ProcessPlacement,
    check_nodes,
    detect_slots,
    parse_node_ranks,
    parse_placement,
    place_component,
)
from rlinf_lite.scheduler.post import close_sockets
from rlinf_lite.scheduler.processes import Processes
from rlinf_lite.scheduler.scratch import ScratchDirs

log = logging.getLogger(__name__)

LOST_NODE_S = 5.0
"""How long a substitute for a lost node is waited for, before virtual slots move to the nodes that are left."""

_TINY_SHARE = 0.001  # of a slot: enough for Ray to show who is on it, however many share it


class Launchable(Protocol):
    """A WorkerGroup that is not running yet."""

    def launch(
        self, cluster: Cluster, placement_strategy: ComponentPlacement = ..., name: str | None = ...
    ) -> object: ...


Group = TypeVar("Group", bound=Launchable)


class Cluster:
    """Joins the Ray at RAY_ADDRESS (or the one this process is connected to), else starts one on this machine.

    Slots are GPUs where every node has some, else virtual: `num_gpus_per_node` of them per node. Raises ClusterError.
    Ends by itself with the process; `shutdown` (or a `with` block) ends it earlier.
    """

    num_nodes: int
    shape: ClusterShape
    nodes: list[Node]
    processes: list[Processes]
    pools: dict[str, frozenset[int]]  # the slots of each resource pool
    calls: Calls

    _current: Cluster | None = None

    @classmethod
    def from_config(cls, cfg: ClusterSettings) -> Cluster:
        """The cluster that a config's `cluster` section describes."""
        slots, limit_s, forked = cfg.num_gpus_per_node, cfg.start_timeout_s, cfg.forked_workers
        return cls(cfg.num_nodes, slots, cfg.accelerator, cfg.node_groups, limit_s, forked_workers=forked)

    def __init__(
        self,
        num_nodes: int = 1,
        num_gpus_per_node: int | None = None,
        accelerator: str = "auto",
        node_groups: Sequence[NodeGroup] = (),
        start_timeout_s: float = 120.0,
        log_to_driver: bool = True,
        forked_workers: bool = True,
    ) -> None:
        if Cluster._current is not None:
            raise ClusterError("this process has a Cluster already: shut it down before making another")
        self.num_nodes, self.start_timeout_s = num_nodes, start_timeout_s
        self.processes, self.pools, self.calls = [], {}, Calls()
        self._launching: list[Processes] | None = None
        self._said: set[str] = set()
        self._undo = ExitStack()
        Cluster._current = self
        atexit.register(self.shutdown)
        try:
            # directories on this node
            dirs = ScratchDirs()
            self._undo.callback(dirs.remove)

            # variables that workers on a node have
            self._env_vars: list[dict[str, str]] = [{} for _ in range(num_nodes)]
            for group in node_groups:
                for rank in parse_node_ranks(group.nodes, num_nodes, group.label):
                    self._env_vars[rank].update(group.env_vars)

            # connect to Ray, or start it
            self._forked = ForkedWorkers(dirs.temp) if forked_workers and sys.platform == "linux" else None
            is_own_ray = self._connect(dirs.temp, num_gpus_per_node, accelerator, log_to_driver)

            # know the nodes and what a slot is
            self.nodes = find_nodes(num_nodes, start_timeout_s)
            self.shape = find_shape(self.nodes, accelerator, num_gpus_per_node)

            # take the slots, so that other jobs of the same Ray stay off them; another program's Ray does not know our
            # resource, and virtual slots take nothing from it
            slots = self.shape.slots_per_node
            virtual = {SLOT_RESOURCE: float(slots)} if is_own_ray else {"CPU": _TINY_SHARE}
            self._bundle = {"GPU": float(slots)} if self.accelerator == "cuda" else virtual
            self._reserved = reserve(self.nodes, self._bundle, start_timeout_s)
            self._undo.callback(self._give_back_slots)
            on_gpus = self._reserved if self.accelerator == "cuda" else ()
            self._devices = find_devices(on_gpus, slots, start_timeout_s)

            # what every process on a node has to know
            driver = driver_node_id()
            node_ids = {node.node_id for node in self.nodes} | {driver}
            if node_ids == {driver} and (is_own_ray or self._forked is None):
                self._contexts = {driver: ProcessContext(dirs.uid, driver, dirs.temp, dirs.shm)}
            else:
                self._contexts = self._start_agents(dirs.uid, sorted(node_ids))
            set_context(self._contexts[driver])
            if self._forked is not None:
                for node in self.nodes:
                    self._forked.start(node.node_id, self._env_vars[node.rank])
            self._undo.callback(set_context, None)
            self._undo.callback(close_sockets)
            self._undo.callback(leave_channels)
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
    def groups(self) -> dict[str, RunningGroup]:
        """Those that run, by name."""
        return {group.name: group for processes in self.processes for group in processes.groups}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End all groups, and Ray if this process started or joined it. A second call does nothing."""
        if Cluster._current is not self:
            return
        Cluster._current = None
        atexit.unregister(self.shutdown)
        for processes in list(self.processes):
            with suppress(Exception):  # Ray itself may be gone; what follows must run all the same
                self.end(processes)
        self._undo.close()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Start the groups that are launched inside the block side by side; its end waits until all are there.

        Where one does not start, none is left. Outside of such a block, `launch` waits.
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
        """Start groups side by side, each where the component of its name is placed; those that `cluster.fuse` names in
        the same processes, in which workers are constructed in the order given here."""
        together: Any = {name: group for name, group in groups.items() if name in placement.fused}
        with self.launching():
            if together:
                first = next(iter(together))
                together[first].launch_fused(together, self, placement.get_strategy(first))
            for name, group in groups.items():
                if name not in together:
                    group.launch(self, placement.get_strategy(name), name=name)
        return groups

    def start(
        self,
        groups: Sequence[RunningGroup],
        placed: ComponentPlacement,
        env_vars: Mapping[str, str] = MappingProxyType({}),
    ) -> Processes:
        """Start processes with a worker of every group in each, and wait until they are there; inside `launching`, its
        end does. Raises ClusterError for a name that is taken, PlacementError for slots of another pool."""
        processes = Processes(groups, self, placed, env_vars)
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
        """Start new workers in the place of some (by group; of all, where none are named) and of those fused with
        them, side by side, and give them the last `init` calls of those before them, which have `timeout_s`. Goes on
        where some do not start, and then raises the first error."""
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
        # workers of one process get theirs one after the other, in the order in which they were constructed
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
        """A placement of this cluster's slots from whatever `launch` was given. Raises PlacementError."""
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

    def prepare(
        self, node: Node, slots: Sequence[int], env_vars: Mapping[str, str]
    ) -> tuple[dict[str, Any], ProcessContext, dict[str, str]]:
        """For a process on a node's reserved slots: how to start its Ray actor, what it is to know of the cluster, and
        its variables: these, those of its node group, and its slots as the only visible devices."""
        local = [slot % self.shape.slots_per_node for slot in slots]
        visible = [self._devices[node.rank][slot] for slot in local] if self._devices else []
        variables = {**env_vars, **self._env_vars[node.rank], "CUDA_VISIBLE_DEVICES": ",".join(visible)}
        strategy = PlacementGroupSchedulingStrategy(self._reserved[node.rank], placement_group_bundle_index=0)
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": strategy, "enable_task_events": False}
        if "GPU" in self._bundle:
            options["num_gpus"] = _TINY_SHARE
        elif SLOT_RESOURCE in self._bundle:
            options["resources"] = {SLOT_RESOURCE: _TINY_SHARE}
        if self._forked is not None:
            options["runtime_env"] = self._forked.runtime_env(node.node_id, variables)
        return options, self.context(node.rank), variables

    def context(self, node: int) -> ProcessContext:
        return self._contexts[self.nodes[node].node_id]

    def note_plain(self, reasons: Iterable[str]) -> None:
        """Say once why workers were not forked. A worker that was gives an empty reason."""
        for reason in {reason for reason in reasons if reason} - self._said:
            self._said.add(reason)
            log.warning("workers were started by plain Python, which takes longer: %s", reason)

    def _connect(self, temp_dir: str, num_gpus_per_node: int | None, accelerator: str, log_to_driver: bool) -> bool:
        """Returns whether Ray is our own."""
        given = os.environ.get("RAY_ADDRESS")
        if ray.is_initialized():
            return False
        if not (sys.stdout.isatty() and sys.stderr.isatty()):
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # where what workers print is passed on
        if not given and self.num_nodes == 1:

            def warm_up() -> None:  # side by side with the start of Ray, in the environment of its workers
                if self._forked is not None:
                    self._undo.callback(self._forked.end)
                    self._forked.start_own(self._env_vars[0])

            kind, slots = detect_slots(accelerator, num_gpus_per_node)
            self._undo.enter_context(local_ray(temp_dir, slots, 0 if kind == "cpu" else None, log_to_driver, warm_up))
            if self._forked is not None:
                self._forked.ray_is_up()
            return True
        address = given or "auto"
        what = f"RAY_ADDRESS={given}" if given else f"cluster.num_nodes: {self.num_nodes}"
        if "://" in address:
            raise ClusterError(f"{what}: the driver has to run on a node of that Ray. There, set RAY_ADDRESS=auto.")
        try:
            address = canonicalize_bootstrap_address_or_die(address)
            knock(address)
            with keeping_sigterm():
                ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.WARNING)
        except (ConnectionError, ValueError) as error:
            alone = "Unset RAY_ADDRESS, and one is started on this machine. " if self.num_nodes == 1 else ""
            raise ClusterError(
                f"{what}: no Ray answers at {address}, or it has another token ({error}). {alone}For several machines, "
                "run `ray start --head` on one node and `ray start --address=<it>` on the others, then set RAY_ADDRESS."
            ) from error
        self._undo.callback(ray.shutdown)
        return False

    def _give_back_slots(self) -> None:
        for reserved in self._reserved:
            _quietly(remove_placement_group, reserved)

    def watch(self, monitor: str) -> None:
        """Have the workers of groups that are launched from now on tell a Ray actor every other second what they do."""
        self._contexts = {node: replace(context, monitor=monitor) for node, context in self._contexts.items()}

    def replace_lost_nodes(self) -> None:
        """Give the place of nodes that are gone to others, for what is started from now on. Raises ClusterError."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for lost in [node for node in self.nodes if node.node_id not in alive]:
            node = find_substitute(lost, self.nodes, self.shape.slots_per_node, self.accelerator, LOST_NODE_S)
            log.warning("node %d (%s) is gone; %s takes its place", lost.rank, lost.ip, node.ip)
            _quietly(remove_placement_group, self._reserved[node.rank])
            self._reserved[node.rank] = reserve([node], self._bundle, self.start_timeout_s)[0]
            if self.accelerator == "cuda":
                found = find_devices([self._reserved[node.rank]], self.shape.slots_per_node, self.start_timeout_s)
                self._devices[node.rank] = found[0]
            if node.node_id not in self._contexts:
                known = get_context()
                context = self._start_agents(known.uid, [node.node_id])[node.node_id]
                self._contexts[node.node_id] = replace(context, monitor=self._contexts[known.node_id].monitor)
            self.nodes[node.rank] = node
            if self._forked is not None:
                self._forked.start(node.node_id, self._env_vars[node.rank])

    def _start_agents(self, uid: str, node_ids: Sequence[str]) -> dict[str, ProcessContext]:
        agents = []
        for node_id in node_ids:
            agent: Any = ray.remote(NodeAgent).options(
                name=agent_name(uid, node_id),
                namespace=RAY_NAMESPACE,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            agents.append(agent.remote(uid, node_id))
            self._undo.callback(_quietly, _end_agent, agents[-1])
        contexts = ray.get([agent.call.remote(get_context) for agent in agents], timeout=self.start_timeout_s)
        return {context.node_id: context for context in contexts}


def _end_agent(agent: Any) -> None:
    ray.get(agent.close.remote(), timeout=10)
    ray.kill(agent)


def _quietly(function: Callable[..., Any], *args: Any) -> None:
    with suppress(Exception):  # nodes may be gone, with what is asked of them
        if ray.is_initialized() and not local_ray_has_ended():
            function(*args)


def _listed(slots: Iterable[int]) -> str:
    return ", ".join(str(slot) for slot in sorted(slots))


class ResourcePool:
    """Slots of a cluster under a name: no other pool, and no group outside this one, can be placed on them.

    Groups of a pool may share its slots. Raises PlacementError where another pool or a running group has some already.
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
        """What `launch` takes; slots in `spec` are numbered within the pool. Raises PlacementError."""
        accelerator, has = self._cluster.accelerator, f"the pool {self.name!r} has"
        local = parse_placement(spec, len(self.slots), component=component, accelerator=accelerator, where=has)
        placed = tuple(ProcessPlacement(p.rank, tuple(self.slots[slot] for slot in p.slots)) for p in local)
        where = f"{spec} of the pool {self.name!r}"
        return self._cluster.place(ComponentPlacement(component, where, placed, pool=self.name), component)

    def release(self) -> None:
        """Give the slots back. Its groups keep running."""
        self._cluster.pools.pop(self.name, None)
