"""The nodes of a Ray cluster: waiting for them, ordering them, reserving their slots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlinf_lite.scheduler.context import RAY_NAMESPACE
from rlinf_lite.scheduler.errors import ClusterError
from rlinf_lite.scheduler.placement import ClusterShape
from rlinf_lite.scheduler.runtime import Node


def driver_node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def detached_actor(cls: type[Any], name: str, **options: Any) -> Any:
    """A class whose `remote(...)` starts an actor that outlives this process, on this node, or on another if this node
    is gone. Ray's soft NodeAffinitySchedulingStrategy would start an actor without resources on any node."""
    return ray.remote(cls).options(
        name=name,
        namespace=RAY_NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        enable_task_events=False,
        label_selector={"ray.io/node-id": driver_node_id()},
        fallback_strategy=[{"label_selector": {}}],
        **options,
    )


def find_nodes(num_nodes: int, limit_s: float) -> list[Node]:
    """Wait until `num_nodes` nodes have joined. Order: nodes with GPUs first, then the driver's node, then by address.

    Raises ClusterError after `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while len(alive := [node for node in ray.nodes() if node["Alive"]]) < num_nodes:
        if time.monotonic() >= deadline:
            addresses = ", ".join(sorted(node["NodeManagerAddress"] for node in alive))
            lost = [node for node in ray.nodes() if not node["Alive"]]  # they had joined
            gone = [f"\n  gone: {node['NodeManagerAddress']}: {node.get('DeathReasonMessage')}" for node in lost]
            raise ClusterError(
                f"cluster.num_nodes: {num_nodes}, but only {len(alive)} joined within {limit_s:g} s ({addresses}). "
                f"Run `ray start --address=...` on the others, or raise cluster.start_timeout_s.{''.join(gone)}"
            )
        time.sleep(0.2)
    driver = driver_node_id()

    def order(node: dict[str, Any]) -> tuple[Any, ...]:
        numbers = [part.zfill(3) for part in node["NodeManagerAddress"].split(".")]
        return not node["Resources"].get("GPU"), node["NodeID"] != driver, numbers, node["NodeID"]

    return [
        Node(rank, node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0)))
        for rank, node in enumerate(sorted(alive, key=order)[:num_nodes])
    ]


def find_shape(nodes: Sequence[Node], accelerator: str, num_gpus_per_node: int | None) -> ClusterShape:
    """The kind and number of slots. Raises ClusterError if a node has too few GPUs."""
    fewest = min(nodes, key=lambda node: node.num_gpus)
    kind = accelerator if accelerator != "auto" else ("cuda" if fewest.num_gpus else "cpu")
    if kind == "cpu":
        return ClusterShape(len(nodes), num_gpus_per_node or 1, kind)
    slots = num_gpus_per_node or fewest.num_gpus
    if fewest.num_gpus < max(1, slots):
        asked = f"cluster.num_gpus_per_node: {slots}" if num_gpus_per_node else "cluster.accelerator: cuda"
        raise ClusterError(
            f"{asked}, but node {fewest.rank} ({fewest.ip}) has {fewest.num_gpus} GPUs. "
            "Lower it, or set cluster.accelerator: cpu for virtual slots."
        )
    return ClusterShape(len(nodes), slots, kind)


def reserve(nodes: Sequence[Node], bundle: dict[str, float], limit_s: float) -> list[Any]:
    """Reserve our slots with a placement group on each node, so that other jobs do not use them. Raises
    ClusterError."""
    groups = [
        placement_group([dict(bundle)], bundle_label_selector=[{"ray.io/node-id": node.node_id}]) for node in nodes
    ]
    try:
        ray.get([group.ready() for group in groups], timeout=limit_s)
    except ray.exceptions.GetTimeoutError as error:
        for group in groups:
            remove_placement_group(group)
        raise ClusterError(
            f"waited {limit_s:g} s to reserve {bundle} on each of {len(nodes)} nodes, but other jobs hold them "
            f"(free now: {ray.available_resources()})."
        ) from error
    return groups


def find_devices(groups: Sequence[Any], num_gpus: int, limit_s: float) -> list[list[str]]:
    """The ids of the physical GPUs of each placement group."""

    def visible_gpus() -> list[str]:
        return sorted((str(gpu) for gpu in ray.get_gpu_ids()), key=lambda gpu: (len(gpu), gpu))

    probe = ray.remote(visible_gpus)
    probes = []
    for group in groups:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        probes.append(probe.options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=strategy).remote())
    devices: list[list[str]] = ray.get(probes, timeout=limit_s)
    return devices


def find_substitute(lost: Node, nodes: Sequence[Node], slots: int, kind: str, limit_s: float) -> Node:
    """A node that takes the place of a lost one: an unused node, for which it waits up to `limit_s`, else, for virtual
    slots, the remaining node with the fewest ranks. Raises ClusterError."""
    deadline = time.monotonic() + limit_s
    while True:
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        mine = {node.node_id for node in nodes}
        for node_id, found in alive.items():
            if node_id not in mine and (kind == "cpu" or found["Resources"].get("GPU", 0) >= slots):
                return Node(lost.rank, node_id, found["NodeManagerAddress"], int(found["Resources"].get("GPU", 0)))
        if time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    left = [node for node in nodes if node.node_id in alive]
    if kind == "cpu" and left:
        fewest = min(left, key=lambda node: [other.node_id for other in nodes].count(node.node_id))
        return Node(lost.rank, fewest.node_id, fewest.ip, fewest.num_gpus)
    raise ClusterError(
        f"node {lost.rank} ({lost.ip}) is gone, and no other with {slots} GPUs joined within {limit_s:g} s. Start one "
        "with `ray start --address=...`, and resume the run from its last checkpoint."
    )
