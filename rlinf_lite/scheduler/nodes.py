"""The machines of a Ray cluster: waiting for them, ordering them, reserving their slots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_lite.scheduler.errors import ClusterError
from rlinf_lite.scheduler.local_ray import SLOT_RESOURCE
from rlinf_lite.scheduler.placement import ClusterShape

TINY_SHARE = 0.001
"""Of a slot: enough for Ray to show who is on it, however many share it."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    rank: int
    node_id: str
    ip: str
    num_gpus: int


def driver_node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def find_nodes(num_nodes: int, limit_s: float) -> list[Node]:
    """Wait for nodes to join. Those with GPUs come first, among them the driver's, then by address.

    Raises ClusterError.
    """
    import ray

    deadline = time.monotonic() + limit_s
    while len(alive := [node for node in ray.nodes() if node["Alive"]]) < num_nodes:
        if time.monotonic() >= deadline:
            addresses = ", ".join(sorted(node["NodeManagerAddress"] for node in alive))
            raise ClusterError(
                f"cluster.num_nodes: {num_nodes}, but only {len(alive)} joined within {limit_s:g} s ({addresses}). "
                "Run `ray start --address=...` on the others, or raise cluster.start_timeout_s."
            )
        time.sleep(0.2)
    driver = driver_node_id()

    def order(node: dict[str, Any]) -> tuple[Any, ...]:
        address = node["NodeManagerAddress"]
        numbers = [part.zfill(3) for part in address.split(".")]
        return not node["Resources"].get("GPU"), node["NodeID"] != driver, numbers, node["NodeID"]

    return [
        Node(rank, node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0)))
        for rank, node in enumerate(sorted(alive, key=order)[:num_nodes])
    ]


def find_shape(nodes: Sequence[Node], accelerator: str, num_gpus_per_node: int | None) -> ClusterShape:
    """What a slot is, and how many there are. Raises ClusterError where a node has too few GPUs."""
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


def reserve(nodes: Sequence[Node], shape: ClusterShape, slot_resource: bool, limit_s: float) -> Any:
    """A placement group with one bundle per node, so that other jobs stay off our slots. Raises ClusterError."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    slots = float(shape.slots_per_node)
    if shape.accelerator == "cuda":
        bundle = {"GPU": slots}
    else:
        # another program's Ray does not know our resource; virtual slots take nothing from it
        bundle = {SLOT_RESOURCE: slots} if slot_resource else {"CPU": TINY_SHARE}
    group = placement_group(
        [dict(bundle) for _ in nodes],
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": node.node_id} for node in nodes],
    )
    try:
        ray.get(group.ready(), timeout=limit_s)
    except ray.exceptions.GetTimeoutError as error:
        remove_placement_group(group)
        raise ClusterError(
            f"waited {limit_s:g} s to reserve {bundle} on each of {len(nodes)} nodes, but other jobs hold them "
            f"(free now: {ray.available_resources()})."
        ) from error
    return group


def find_devices(nodes: Sequence[Node], shape: ClusterShape, placement_group: Any, limit_s: float) -> list[list[str]]:
    """The physical GPUs behind each node's slots, by node."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if shape.accelerator != "cuda":
        return [[] for _ in nodes]
    probe = ray.remote(_visible_gpus)
    probes = []
    for node in nodes:
        strategy = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=node.rank)
        options = {"num_cpus": 0, "num_gpus": shape.slots_per_node, "scheduling_strategy": strategy}
        probes.append(probe.options(**options).remote())
    devices: list[list[str]] = ray.get(probes, timeout=limit_s)
    return devices


def _visible_gpus() -> list[str]:
    import ray

    return sorted((str(gpu) for gpu in ray.get_gpu_ids()), key=lambda gpu: (len(gpu), gpu))
