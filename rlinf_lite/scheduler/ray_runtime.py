"""The Ray runtime: joins or starts Ray, reserves slots on its nodes, and starts, calls and ends workers as actors."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import cloudpickle
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlinf_lite.registry import of_main
from rlinf_lite.scheduler.context import RAY_NAMESPACE, ProcessContext, get_context, run_on, set_context
from rlinf_lite.scheduler.errors import CallTimeoutError, ClusterError, WorkerError
from rlinf_lite.scheduler.host import SHARED_BYTES, host_class
from rlinf_lite.scheduler.local_ray import (
    SLOT_RESOURCE,
    check_ray_answers,
    keeping_sigterm,
    local_ray,
    local_ray_has_ended,
)
from rlinf_lite.scheduler.nodes import driver_node_id, find_devices, find_nodes, find_shape, find_substitute, reserve
from rlinf_lite.scheduler.placement import ClusterShape, NodeGroup, detect_slots, parse_node_ranks
from rlinf_lite.scheduler.processes import end_process, tail_logs
from rlinf_lite.scheduler.ray_host import RayHost, call_id
from rlinf_lite.scheduler.ray_network import NodeAgent, RayNetwork, agent_name, leave
from rlinf_lite.scheduler.ray_private import find_address
from rlinf_lite.scheduler.runtime import CallFailed, Definition, Node, Remote
from rlinf_lite.scheduler.scratch import ScratchDirs

log = logging.getLogger(__name__)

LOST_NODE_S = 5.0
"""Longest wait for a new node in place of a lost one, before virtual slots move to the remaining nodes."""

_TINY_SHARE = 0.001  # of a slot: enough for Ray to list the process there, small enough for many to share it
_ASK_S = 5.0
_END_S = 10.0
_TERM_S = 1.0  # how long a process may take to end by itself before it is killed


@dataclass(frozen=True)
class RayRemote:
    """The `Remote` of a Ray actor. `process`: a reference to the result of `RayHost._process`."""

    node_id: str
    actor: Any
    process: Any
    env_vars: dict[str, str]

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.actor, method).remote(*args, **kwargs)

    @property
    def pid(self) -> int:
        return int(self._about()[0])

    @property
    def log_paths(self) -> list[str]:
        return list(self._about()[1])

    @property
    def actor_id(self) -> str | None:
        """Ray's id of the actor; None while it starts."""
        try:
            return str(ray.get(self.process, timeout=_ASK_S)[2])
        except ray.exceptions.RayActorError as error:  # it died before it answered
            return error.actor_id
        except ray.exceptions.GetTimeoutError:
            return None

    def log_tail(self) -> str:
        try:
            return str(run_on(self.node_id, tail_logs, self.log_paths))
        except Exception as error:  # the node may be gone with the worker; its death is still reported
            return f"(the log could not be read: {error})"

    def _about(self) -> Any:
        try:
            return ray.get(self.process, timeout=_ASK_S)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError("it is being started") from error
        except ray.exceptions.RayError as error:
            raise RayCallFailed(str(error)) from error


class RayCallFailed(CallFailed):
    """A CallFailed whose `__cause__` is Ray's exception."""

    def is_of(self, remote: Remote) -> bool:
        error = self.__cause__
        if not isinstance(error, ray.exceptions.RayActorError) or not isinstance(remote, RayRemote):
            return False
        return error.actor_id is not None and error.actor_id == remote.actor_id


class RayRuntime:
    """The `Runtime` on Ray: the Ray at RAY_ADDRESS or the one this process is connected to, else a new one on this
    machine."""

    shape: ClusterShape
    nodes: list[Node]

    def __init__(
        self,
        num_nodes: int,
        num_gpus_per_node: int | None,
        accelerator: str,
        node_groups: Sequence[NodeGroup],
        start_timeout_s: float,
        log_to_driver: bool,
    ) -> None:
        self._num_nodes, self._start_timeout_s = num_nodes, start_timeout_s
        self._undo = ExitStack()
        try:
            # directories on this node
            dirs = ScratchDirs()
            self._undo.callback(dirs.remove)
            self.network = RayNetwork(dirs.uid)

            # environment variables of the workers on each node
            self._env_vars: list[dict[str, str]] = [{} for _ in range(num_nodes)]
            for group in node_groups:
                for rank in parse_node_ranks(group.nodes, num_nodes, group.label):
                    self._env_vars[rank].update(group.env_vars)

            # connect to Ray, or start it
            is_own_ray = self._connect(dirs.temp, num_gpus_per_node, accelerator, log_to_driver)

            # find the nodes, and the kind and number of slots
            self.nodes = find_nodes(num_nodes, start_timeout_s)
            self.shape = find_shape(self.nodes, accelerator, num_gpus_per_node)

            # reserve the slots, so that other jobs of the same Ray do not use them; another program's Ray does not have
            # our slot resource, so virtual slots reserve almost nothing there
            slots, on_gpus = self.shape.slots_per_node, self.shape.accelerator == "cuda"
            virtual = {SLOT_RESOURCE: float(slots)} if is_own_ray else {"CPU": _TINY_SHARE}
            self._bundle = {"GPU": float(slots)} if on_gpus else virtual
            self._reserved = reserve(self.nodes, self._bundle, start_timeout_s)
            self._undo.callback(self._give_back_slots)
            self._devices = find_devices(self._reserved if on_gpus else (), slots, start_timeout_s)

            # the context of the processes on each node
            driver = driver_node_id()
            node_ids = {node.node_id for node in self.nodes} | {driver}
            if node_ids == {driver}:
                here = ProcessContext(dirs.uid, driver, dirs.temp, dirs.shm, self.network)
                self._contexts = {driver: here}
            else:
                self._contexts = self._start_agents(dirs.uid, sorted(node_ids))
            set_context(self._contexts[driver])
            self._undo.callback(set_context, None)
            self._undo.callback(leave)
        except BaseException:
            self.close()
            raise

    def start(
        self,
        title: str,
        name: str,
        rank: int,
        node: Node,
        slots: Sequence[int],
        env_vars: Mapping[str, str],
        methods: Sequence[Iterable[str]],
    ) -> RayRemote:
        """As in `Runtime`; the process sees its slots as its only devices."""
        strategy = PlacementGroupSchedulingStrategy(self._reserved[node.rank], placement_group_bundle_index=0)
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": strategy, "enable_task_events": False}
        if "GPU" in self._bundle:
            options["num_gpus"] = _TINY_SHARE
        elif SLOT_RESOURCE in self._bundle:
            options["resources"] = {SLOT_RESOURCE: _TINY_SHARE}
        local = [slot % self.shape.slots_per_node for slot in slots]
        visible = [self._devices[node.rank][slot] for slot in local] if self._devices else []
        variables = {**env_vars, **self._env_vars[node.rank], "CUDA_VISIBLE_DEVICES": ",".join(visible)}
        host = host_class(RayHost, title, methods, call_id)
        actor: Any = ray.remote(host).options(**options).remote(name, rank)
        return RayRemote(node.node_id, actor, actor._process.remote(), variables)

    def build(self, remote: Remote, identities: Sequence[dict[str, Any]], epoch: int, payload: Any) -> Any:
        assert isinstance(remote, RayRemote)
        context = cloudpickle.dumps(self._contexts[remote.node_id])
        return remote.actor._build.remote(list(identities), context, remote.env_vars, epoch, payload)

    def pack(self, definitions: Sequence[Definition]) -> Any:
        parts, registered = of_main()
        parts = {name: part for name, part in parts.items() if _can_be_sent(name, part)}
        registered = [item for item in registered if _can_be_sent(item[1], item[2])]
        payload = cloudpickle.dumps(((parts, registered), list(definitions)))
        return ray.put(payload) if len(payload) > SHARED_BYTES else payload

    def get(self, refs: Sequence[Any], timeout_s: float | None) -> list[Any]:
        try:
            return list(ray.get(list(refs), timeout=timeout_s))
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError from error
        except ray.exceptions.RayError as error:
            raised = getattr(error, "cause", None)
            raise RayCallFailed(str(error), raised if isinstance(raised, WorkerError) else None) from error

    def ready(self, refs: Sequence[Any]) -> list[Any]:
        return ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[0] if refs else []

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def call_id(self, ref: Any) -> str:
        return str(ref.task_id().hex())

    def drop(self, refs: Sequence[Any]) -> None:
        def mark_seen() -> None:  # so that Ray does not print their errors; fetches no results
            with suppress(Exception):  # Ray may be ending
                ray.wait(list(refs), num_returns=len(refs), fetch_local=False)

        if refs and ray.is_initialized():
            threading.Thread(target=mark_seen, daemon=True).start()

    def end(self, remotes: Sequence[tuple[str, Node, Remote]]) -> None:
        """End hosts and wait until Ray has seen their processes die; a process that does not end in time gets
        SIGKILL."""
        deadline = time.monotonic() + _END_S
        if local_ray_has_ended():  # its processes end with it, unless they hang
            for _, _, remote in remotes:
                with suppress(Exception):  # it died before it reported its process id
                    end_process(remote.pid, 0.0)
            return
        for _, _, remote in remotes:
            assert isinstance(remote, RayRemote)
            ray.kill(remote.actor)
        for name, node, remote in remotes:
            with suppress(Exception):  # its node may be gone, or it died before it reported its process id
                run_on(node.node_id, end_process, remote.pid, _TERM_S)
            while True:  # until Ray has seen it die
                try:
                    ray.get(remote.call("_ping"), timeout=max(0.05, deadline - time.monotonic()))
                    is_late = time.monotonic() >= deadline
                except ray.exceptions.GetTimeoutError:
                    is_late = True
                except ray.exceptions.RayError:
                    break
                if is_late:
                    raise CallTimeoutError(f"{name} did not stop within {_END_S:g} s")
                time.sleep(0.01)

    def has_ended(self) -> bool:
        return local_ray_has_ended()

    def device(self, slots: Sequence[int]) -> str:
        return "cuda:0" if self.shape.accelerator == "cuda" else "cpu"

    def watch(self, monitor: str) -> None:
        self._contexts = {node: replace(context, monitor=monitor) for node, context in self._contexts.items()}

    def replace_lost_nodes(self) -> None:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        kind, slots = self.shape.accelerator, self.shape.slots_per_node
        for lost in [node for node in self.nodes if node.node_id not in alive]:
            node = find_substitute(lost, self.nodes, slots, kind, LOST_NODE_S)
            log.warning("node %d (%s) is gone; %s takes its place", lost.rank, lost.ip, node.ip)
            _quietly(remove_placement_group, self._reserved[node.rank])
            self._reserved[node.rank] = reserve([node], self._bundle, self._start_timeout_s)[0]
            if kind == "cuda":
                found = find_devices([self._reserved[node.rank]], slots, self._start_timeout_s)
                self._devices[node.rank] = found[0]
            if node.node_id not in self._contexts:
                known = get_context()
                context = self._start_agents(known.uid, [node.node_id])[node.node_id]
                self._contexts[node.node_id] = replace(context, monitor=self._contexts[known.node_id].monitor)
            self.nodes[node.rank] = node

    def close(self) -> None:
        self._undo.close()

    def _connect(self, temp_dir: str, num_gpus_per_node: int | None, accelerator: str, log_to_driver: bool) -> bool:
        """Connect to Ray, or start it. Returns whether this process started it."""
        given = os.environ.get("RAY_ADDRESS")
        if ray.is_initialized():
            return False
        if not (sys.stdout.isatty() and sys.stderr.isatty()):
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # no color codes before the workers' printed lines
        if not given and self._num_nodes == 1:
            kind, slots = detect_slots(accelerator, num_gpus_per_node)
            self._undo.enter_context(local_ray(temp_dir, slots, 0 if kind == "cpu" else None, log_to_driver))
            return True
        address = given or "auto"
        what = f"RAY_ADDRESS={given}" if given else f"cluster.num_nodes: {self._num_nodes}"
        if "://" in address:
            raise ClusterError(f"{what}: the driver has to run on a node of that Ray. There, set RAY_ADDRESS=auto.")
        try:
            address = find_address(address)
            check_ray_answers(address)
            with keeping_sigterm():
                ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.WARNING)
        except (ConnectionError, ValueError) as error:
            alone = "Unset RAY_ADDRESS, and one is started on this machine. " if self._num_nodes == 1 else ""
            raise ClusterError(
                f"{what}: no Ray answers at {address}, or it has another token ({error}). {alone}For several machines, "
                "run `ray start --head` on one node and `ray start --address=<it>` on the others, then set RAY_ADDRESS."
            ) from error
        self._undo.callback(ray.shutdown)
        return False

    def _give_back_slots(self) -> None:
        for reserved in self._reserved:
            _quietly(remove_placement_group, reserved)

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
        contexts = ray.get([agent.call.remote(get_context) for agent in agents], timeout=self._start_timeout_s)
        return {context.node_id: context for context in contexts}


def _can_be_sent(name: str, part: Any) -> bool:
    """Whether an object of `__main__` can be pickled; logs a warning if not, since an old notebook cell may have left
    one that no worker needs. A worker that does need it reports that it is missing."""
    try:
        cloudpickle.dumps(part)
    except Exception as error:  # anything that a user's object raises
        log.warning("__main__:%s cannot be sent to workers: %s: %s", name, type(error).__name__, error)
        return False
    return True


def _end_agent(agent: Any) -> None:
    ray.get(agent.close.remote(), timeout=10)
    ray.kill(agent)


def _quietly(function: Callable[..., Any], *args: Any) -> None:
    with suppress(Exception):  # nodes may be gone
        if ray.is_initialized() and not local_ray_has_ended():
            function(*args)
