"""The placements that `cluster.component_placement: auto` chooses from. Pure: needs neither ray nor torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product
from typing import Any, TypeVar, cast

from rlinf_lite.config.names import COMPONENTS, ROLES, fused_roles, names_in_fuse, roles_of, rollout_dtype
from rlinf_lite.config.plan import slots
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import AUTO, BaseConfig, ClusterConfig, Config
from rlinf_lite.scheduler.errors import PlacementError
from rlinf_lite.scheduler.placement import parse_node_ranks

C = TypeVar("C", bound=Config | ReasoningConfig)
Ways = list[dict[str, str]]
"""Of some roles, a line for each."""

MAX_CUTS = 8  # parts of a cluster's slots that may go to one role or another

_DIVISIONS = {
    "embodied": (
        (("env", "rollout", "actor"),),
        (("env",), ("rollout",), ("actor",)),
        (("env",), ("rollout", "actor")),
        (("env", "rollout"), ("actor",)),
    ),
    "reasoning": (
        (("rollout", "reward", "actor", "reference", "critic"),),
        (("rollout", "reward"), ("actor", "reference", "critic")),
    ),
}
"""Roles that share slots, by the kind of run; those of different brackets have slots of their own."""
SHARING = {"embodied": ("actor", "rollout"), "sft": (), "eval": ("actor", "rollout"), "reasoning": ROLES}
"""Roles that may share a process: an environment's has no torch."""


def is_auto(cluster: ClusterConfig) -> bool:
    """Whether some role's slots are to be chosen."""
    return AUTO in map(_slots_of, cluster.component_placement.values())


def proposals(config: C) -> list[C]:
    """The config on every placement worth a thought, those with all roles together first; its `find_problems` says
    which of them are possible. Lines that name slots stay, and roles with a node group stay within it. On slots that
    are a machine's cores, a slot may have several simulators and policies, each a process.

    Each with processes of their own and with one for all roles that have the actor's line, besides the config's own
    `cluster.fuse`, where that changes no number; of runs in simulators also one pipeline stage and two, besides what
    the config has.
    """
    is_reasoning = isinstance(config, ReasoningConfig)
    roles: Sequence[str] = roles_of(config) if isinstance(config, ReasoningConfig) else COMPONENTS
    fixed: dict[str, Any] = {}
    chosen: dict[str | None, list[str]] = {}  # by node group
    for names, spec in config.cluster.component_placement.items():
        if _slots_of(spec) != AUTO:
            fixed[names] = spec
            continue
        of_group = chosen.setdefault(getattr(spec, "node_group", None), [])
        named = [name.strip() for name in names.split(",")]
        of_group += [name for name in named if name in roles]
        fixed |= {name: "all" for name in named if name not in (*COMPONENTS, *ROLES)}  # which the checks will say
    ways = [_ways(config, label, of_group) for label, of_group in chosen.items()]
    stages = [config.rollout.pipeline_stage_num]
    stages += [] if is_reasoning else [number for number in (1, 2) if number not in stages]
    found = []
    for combined in product(*ways):
        placed = dict(fixed)
        for label, way in zip(chosen, combined, strict=True):
            for role, line in way.items():
                placed[role] = line if label is None else {"placement": line, "node_group": label}
        found += [_with(config, placed, fuse, number) for fuse in _fuses(config, placed) for number in stages]
    return found


def _with(config: C, placement: dict[str, Any], fuse: str | None, stages: int) -> C:
    content = config.model_dump()
    content["cluster"] |= {"component_placement": placement, "fuse": fuse}
    content["rollout"]["pipeline_stage_num"] = stages
    return cast(C, type(config).model_validate(content))


def _fuses(config: C, placement: Mapping[str, Any]) -> list[str | None]:
    """Which roles may share processes where they have these lines; the config's own alone where that is wrong."""
    own, known = fused_roles(config), SHARING[config.runner.task_type]
    is_alone = len(names_in_fuse(config)) == 1
    if set(own) - set(known) or len(set(own)) < len(own) or is_alone:  # which the checks will say
        return [config.cluster.fuse]
    try:
        if rollout_dtype(config, slots(config.cluster)[0]) == "bf16":  # with the actor's parameters it acts in fp32
            return [config.cluster.fuse]
    except PlacementError:  # said where the lines are checked
        return [config.cluster.fuse]
    lines = {name.strip(): spec for names, spec in placement.items() for name in names.split(",")}
    alike = [role for role in known if role in lines and lines[role] == lines.get("actor") and role != "reward"]
    fuses: list[list[str]] = [[], *[alike] * (len(alike) > 1)]
    if len(own) > 1 and set(own) != set(alike) and all(lines.get(role) == lines.get(own[0]) for role in own):
        fuses.append(own)
    return [",".join(roles) or None for roles in fuses]


def _ways(config: BaseConfig, label: str | None, roles: Sequence[str]) -> Ways:
    """Lines for roles that share out the slots of a node group, or of the whole cluster."""
    cluster = config.cluster
    if not roles:
        return [{}]
    try:
        accelerator, per_node = slots(cluster)
        groups = {group.label: group.nodes for group in cluster.node_groups}
        nodes = cluster.num_nodes if label is None else len(parse_node_ranks(groups[label], cluster.num_nodes, label))
    except (PlacementError, KeyError):  # said where the lines are checked
        return [dict.fromkeys(roles, "all")]
    num_slots = per_node * nodes
    cores = len(os.sched_getaffinity(0)) if accelerator == "cpu" else 0
    found: Ways = []
    for division in _DIVISIONS[config.runner.task_type]:
        parts = [part for group in division if (part := [role for role in group if role in roles])]
        if len(parts) == 1:
            found += _together(parts[0], num_slots, cores // per_node)
            continue
        own_slots = [parts]
        if config.runner.mode == "sync" and parts[-1] == ["actor"] and len(parts) > 2:
            own_slots.append(parts[:-1])  # the others wait while it trains
        for having in own_slots:
            for borders in combinations(_cuts(num_slots), len(having) - 1):
                edges = [0, *borders, num_slots]
                ranges = [_range(first, end) for first, end in pairwise(edges)]
                lines = {role: line for part, line in zip(having, ranges, strict=True) for role in part}
                found.append({role: lines.get(role, _range(0, num_slots)) for part in parts for role in part})
    return [way for number, way in enumerate(found) if way not in found[:number]]


def _together(roles: Sequence[str], num_slots: int, cores_per_slot: int) -> Iterator[dict[str, str]]:
    """All on every slot: one process each, then several where a slot has several cores. One actor uses them all."""
    numbers = [2**power for power in range(max(cores_per_slot, 1).bit_length())]
    lines = {number: f"{_range(0, num_slots)}:0-{num_slots * number - 1}" for number in numbers}
    lines[1] = _range(0, num_slots)
    for first, second in product(numbers, numbers):
        several = {"env": first, "rollout": second}
        if "reward" in roles:  # of a language model, whose policies generate and train in turn
            several = {role: second if role == "rollout" else first for role in roles if role != "reward"}
        yield {role: lines[several.get(role, 1)] for role in roles}


def _cuts(num_slots: int) -> list[int]:
    """Where slots may be parted."""
    step = -(-num_slots // MAX_CUTS)
    return list(range(step, num_slots, step))


def _range(first: int, end: int) -> str:
    return f"{first}-{end - 1}" if end - first > 1 else f"{first}"


def _slots_of(spec: Any) -> Any:
    return getattr(spec, "placement", spec)
