"""Turns `component_placement` lines into processes on slots. Pure functions: needs neither ray nor torch.

    component_placement := { names : spec }+      names  := name ("," name)*
    spec      := scalar | {placement: scalar, node_group: label}
    scalar    := part ("," part)*                 part   := resources [":" processes]
    resources := "all" | INT | INT "-" INT        processes := INT | INT "-" INT

Both are numbers or inclusive ranges: slots before the colon, process ranks after it. `0-3` is four processes with a
slot each, `0:0-1` two processes sharing slot 0, `0-3:0-1` two processes with two slots each, `0-3:0` one with all four.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

from rlinf_lite.scheduler.errors import PlacementError

_PART = re.compile(r"(?:(all)|(\d+)(?:\s*-\s*(\d+))?)(?:\s*:\s*(\d+)(?:\s*-\s*(\d+))?)?")
_NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")


class NodeGroup(Protocol):
    """A labelled set of nodes: an entry of `cluster.node_groups`."""

    @property
    def label(self) -> str: ...
    @property
    def nodes(self) -> str | int: ...
    @property
    def env_vars(self) -> Mapping[str, str]: ...


class ClusterSettings(Protocol):
    """The keys of a config's `cluster` section that the scheduler reads."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def num_gpus_per_node(self) -> int | None: ...
    @property
    def accelerator(self) -> str: ...
    @property
    def component_placement(self) -> Mapping[str, Any]: ...
    @property
    def fuse(self) -> str | None: ...
    @property
    def node_groups(self) -> Sequence[NodeGroup]: ...
    @property
    def start_timeout_s(self) -> float: ...
    @property
    def runtime(self) -> Literal["ray", "local"]: ...


class HasCluster(Protocol):
    """A config of any kind of run."""

    @property
    def cluster(self) -> ClusterSettings: ...


@dataclass(frozen=True)
class ProcessPlacement:
    """One process of a component: its rank, and the slots that it owns or shares."""

    rank: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class ClusterShape:
    """The number of nodes and slots, and the kind of a slot (`cuda` or `cpu`)."""

    num_nodes: int
    slots_per_node: int
    accelerator: str

    @property
    def num_slots(self) -> int:
        return self.num_nodes * self.slots_per_node

    def node_of(self, slot: int) -> int:
        return slot // self.slots_per_node

    def describe(self) -> str:
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''} x {self.slots_per_node}"
        return f"0..{self.num_slots - 1} ({nodes}, accelerator={self.accelerator})"


@dataclass(frozen=True)
class ComponentPlacement:
    """The processes of a component and their slots, numbered over the whole cluster; an argument of `launch`."""

    component: str
    spec: str
    processes: tuple[ProcessPlacement, ...]
    pool: str | None = None

    @property
    def world_size(self) -> int:
        return len(self.processes)

    @property
    def slots(self) -> frozenset[int]:
        return frozenset(slot for process in self.processes for slot in process.slots)


@dataclass(frozen=True)
class _Part:
    text: str
    slots: range
    first_rank: int | None
    num_processes: int


def parse_placement(
    spec: str | int,
    num_slots: int,
    *,
    component: str = "",
    slots_per_node: int | None = None,
    accelerator: str = "cpu",
    where: str = "this cluster has",
) -> list[ProcessPlacement]:
    """The processes that `spec` asks for on slots 0..num_slots-1, by rank. Raises PlacementError."""
    per_node = slots_per_node or num_slots
    shape = ClusterShape(max(1, num_slots // per_node), per_node, accelerator)
    try:
        text = str(spec).strip()
        if text == "auto":
            raise PlacementError(
                f"{spec}: slots are chosen in training runs (`rlinf-lite train`). Here, name them: `all`, `0` or `0-3`."
            )
        if isinstance(spec, bool) or not text:
            hint = "Write slots such as `all`, `0`, `0-3` or `0-3:0-7`."
            raise PlacementError(f"{spec}: this is not a placement. {hint}")
        parts = [_parse_part(part.strip(), num_slots, f"{spec}") for part in text.split(",")]
        _check_ascending(parts, f"{spec}")
        _check_range(parts, shape, f"{spec}", where)
        processes: list[ProcessPlacement] = []
        for part in parts:
            if part.first_rank is not None and part.first_rank != len(processes):
                raise PlacementError(
                    f"{spec}: the part `{part.text}` starts at rank {part.first_rank}, but the next rank is "
                    f"{len(processes)}. Ranks start at 0 and leave no gap: two processes are written `:0-1`."
                )
            for i in range(part.num_processes):
                begin = i * len(part.slots) // part.num_processes
                count = max(1, len(part.slots) // part.num_processes)
                processes.append(ProcessPlacement(len(processes), tuple(part.slots[begin : begin + count])))
        if slots_per_node is not None:
            check_nodes(processes, shape, f"{spec}")
    except PlacementError as error:
        raise PlacementError(error.text, component) from None
    return processes


def _parse_part(text: str, num_slots: int, prefix: str) -> _Part:
    match = _PART.fullmatch(text)
    if match is None:
        hint = "Write slots such as `all`, `0` or `0-3`, then optionally processes, such as `0-3:0-7` or `0-3:0`."
        raise PlacementError(f"{prefix} has the part `{text}`, which is not a placement. {hint}")
    everything, first, last, low, high = match.groups()
    start, stop = (0, num_slots - 1) if everything else (int(first), int(last or first))
    if stop < start:
        raise PlacementError(f"{prefix} has the slots {start}-{stop}, which run backwards. Write {stop}-{start}.")
    slots = range(start, stop + 1)
    if low is None:
        return _Part(text, slots, None, len(slots))
    first, last = int(low), int(high or low)
    if last < first:
        raise PlacementError(f"{prefix} has the ranks {low}-{high}, which run backwards. Write {high}-{low}.")
    count = last - first + 1
    if count % len(slots) and len(slots) % count:
        raise PlacementError(
            f"{prefix} puts {count} processes on {len(slots)} slots (`{text}`): neither number divides the other. "
            f"Give {len(slots)}, a multiple of it, or a divisor of it."
        )
    return _Part(text, slots, first, count)


def _check_ascending(parts: Sequence[_Part], prefix: str) -> None:
    for before, after in pairwise(parts):
        if after.slots[0] <= before.slots[-1]:
            overlap = after.slots[-1] >= before.slots[0]
            problem = "share slots" if overlap else "are not in ascending order"
            fix = "To put several processes on a slot, write `0:0-1`." if overlap else "Write the lower slots first."
            raise PlacementError(f"{prefix}: the parts `{before.text}` and `{after.text}` {problem}. {fix}")


def _check_range(parts: Sequence[_Part], shape: ClusterShape, prefix: str, where: str) -> None:
    low, high = parts[0].slots[0], parts[-1].slots[-1]
    if high < shape.num_slots:
        return
    needed = f"slots {low}..{high}" if high > low else f"slot {high}"
    per_node = -(-(high + 1) // shape.num_nodes)
    if shape.accelerator == "cpu":
        word = _NUMBER_WORDS[per_node] if per_node < len(_NUMBER_WORDS) else str(per_node)
        each = " on each node" if shape.num_nodes > 1 else ""
        fix = f"Set cluster.num_gpus_per_node: {per_node} to run {word} virtual slots{each} on CPU."
    else:
        fix = f"Use slots up to {shape.num_slots - 1}, or give the cluster more GPUs or nodes (cluster.num_nodes)."
    raise PlacementError(f"{prefix} needs {needed}, {where} {shape.describe()}. {fix}")


def check_nodes(processes: Sequence[ProcessPlacement], shape: ClusterShape, prefix: str) -> None:
    """Raise PlacementError for a process whose slots are on several nodes."""
    for process in processes:
        low, high = min(process.slots), max(process.slots)
        if shape.node_of(low) != shape.node_of(high):
            raise PlacementError(
                f"{prefix}: rank {process.rank} would own slots {low}..{high}, which lie on two nodes of "
                f"{shape.slots_per_node} slots. Use more processes, so that each stays on one node."
            )


def detect_num_gpus() -> int:
    """Number of GPUs that this process may use, from CUDA_VISIBLE_DEVICES and the driver's device files."""
    present = len(glob.glob("/dev/nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])


def detect_slots(accelerator: str, num_gpus_per_node: int | None) -> tuple[str, int]:
    """The accelerator ("cuda" or "cpu") and the slots per node, from the GPUs of this machine. Raises
    PlacementError."""
    found = detect_num_gpus() if accelerator != "cpu" else 0
    kind = accelerator if accelerator != "auto" else ("cuda" if found else "cpu")
    if kind == "cuda" and num_gpus_per_node is None and not found:
        raise PlacementError(
            "cuda, but this machine has no GPU. Set cluster.num_gpus_per_node to plan for machines that have some, or "
            "cluster.accelerator: cpu to run here.",
            about="cluster.accelerator",
        )
    return kind, num_gpus_per_node or (found if kind == "cuda" else 1)


def parse_node_ranks(nodes: str | int, num_nodes: int, label: str) -> list[int]:
    """The node ranks in a text such as `0`, `2-3` or `0,2-3`. Raises PlacementError."""
    prefix = f"cluster.node_groups: {label} (nodes: {nodes})"
    parts = [_parse_part(part.strip(), num_nodes, prefix) for part in str(nodes).split(",")]
    if any(":" in part.text for part in parts):
        raise PlacementError(f"{prefix} has a colon. Nodes are written `0`, `2-3` or `0,2-3`.")
    _check_ascending(parts, prefix)
    ranks = [rank for part in parts for rank in part.slots]
    if ranks[-1] >= num_nodes:
        raise PlacementError(
            f"{prefix} needs node {ranks[-1]}, this cluster has nodes 0..{num_nodes - 1}. Set cluster.num_nodes."
        )
    return ranks


def resolve_placements(
    cluster: ClusterSettings, num_slots_per_node: int, accelerator: str
) -> dict[str, tuple[ProcessPlacement, ...]]:
    """The processes of every component, on slots numbered over the whole cluster. Raises PlacementError."""
    shape = ClusterShape(cluster.num_nodes, num_slots_per_node, accelerator)
    return {name: placed.processes for name, placed in _place_all(cluster, shape).items()}


def _place_all(cluster: ClusterSettings, shape: ClusterShape) -> dict[str, ComponentPlacement]:
    lines = cluster.component_placement
    if not isinstance(lines, Mapping):
        raise PlacementError(
            f"{lines}: slots are chosen in training runs (`rlinf-lite train`). "
            "Here, give each component a line, for example `actor,rollout,env: all`.",
            about="cluster.component_placement",
        )
    placed: dict[str, ComponentPlacement] = {}
    for names, spec in lines.items():
        for name in (part.strip() for part in names.split(",")):
            if not name:
                text = f"`{names}` has an empty name. Write `actor,rollout: 0-3`."
                raise PlacementError(text, about="cluster.component_placement")
            if name in placed:
                text = f"{name} is placed twice. Keep one line for it."
                raise PlacementError(text, about="cluster.component_placement")
            placed[name] = place_component(name, spec, shape, cluster.node_groups)
    return placed


def place_component(
    name: str, spec: Any, shape: ClusterShape, node_groups: Sequence[NodeGroup] = ()
) -> ComponentPlacement:
    """The processes of one component, from its line in `component_placement`. Raises PlacementError."""
    nodes, where = list(range(shape.num_nodes)), "this cluster has"
    if not isinstance(spec, str | int):
        label, spec = spec.node_group, spec.placement
        if label is not None:
            groups = {group.label: group for group in node_groups}
            if label not in groups:
                known = ", ".join(sorted(groups)) or "none"
                raise PlacementError(f"node_group {label} is not in cluster.node_groups (known: {known}).", name)
            nodes, where = parse_node_ranks(groups[label].nodes, shape.num_nodes, label), f"node group {label} has"
    per_node = shape.slots_per_node
    local = parse_placement(
        spec,
        len(nodes) * per_node,
        component=name,
        slots_per_node=per_node,
        accelerator=shape.accelerator,
        where=where,
    )
    placed = [
        ProcessPlacement(p.rank, tuple(nodes[slot // per_node] * per_node + slot % per_node for slot in p.slots))
        for p in local
    ]
    return ComponentPlacement(name, str(spec), tuple(placed))


class HybridComponentPlacement:
    """The placement of every component of a config: collocated, disaggregated, or a mix.

    The slots are those of this process's Cluster. Without a Cluster (`--dry-run`), there are
    `cluster.num_gpus_per_node` slots per node, else one per GPU of this machine. Raises PlacementError.
    """

    def __init__(self, cfg: HasCluster) -> None:
        module = sys.modules.get("rlinf_lite.scheduler.cluster")  # which imports this one
        running = module.Cluster.current() if module else None
        if running is not None:
            self.shape: ClusterShape = running.shape
        else:
            kind, slots = detect_slots(cfg.cluster.accelerator, cfg.cluster.num_gpus_per_node)
            self.shape = ClusterShape(cfg.cluster.num_nodes, slots, kind)
        self._components = _place_all(cfg.cluster, self.shape)
        self._is_local = cfg.cluster.runtime == "local"
        self.fused = [name.strip() for name in (cfg.cluster.fuse or "").split(",")]
        """Names of the components whose workers share processes."""

    def get_strategy(self, name: str) -> ComponentPlacement:
        """The placement of a component, for `launch`. Raises PlacementError for a component without a line."""
        if name not in self._components:
            known = ", ".join(self._components)
            raise PlacementError(
                f"{name} has no line in cluster.component_placement (placed: {known}). Add one, e.g. `{name}: all`."
            )
        return self._components[name]

    def describe(self, names: Sequence[str] | None = None) -> str:
        """A table with a row per slot and a column per component (`names`; None: all); the cells are ranks."""
        names = [name for name in self._components if names is None or name in names]
        rows = [["slot", "node", *names]]
        for slot in range(self.shape.num_slots):
            rows.append([str(slot), str(self.shape.node_of(slot))])
            for name in names:
                ranks = [p.rank for p in self._components[name].processes if slot in p.slots]
                rows[-1].append("-".join(map(str, dict.fromkeys([ranks[0], ranks[-1]]))) if ranks else "-")
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        where = ", threads of this process" if self._is_local else ""
        return "\n".join([f"slots {self.shape.describe()}; cells are ranks{where}", *lines])
