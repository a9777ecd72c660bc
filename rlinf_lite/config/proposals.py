"""The placements that `cluster.component_placement: auto` tries. Imports neither Ray nor torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple, TypeVar, cast

from rlinf_lite.config.names import COMPONENTS, SHARING, fused_roles, names_in_fuse, roles_of, rollout_dtype
from rlinf_lite.config.plan import slots
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import AUTO, ClusterConfig, Config, PlacementSpec
from rlinf_lite.scheduler.errors import PlacementError
from rlinf_lite.scheduler.placement import ClusterShape, place_component

C = TypeVar("C", bound=Config | ReasoningConfig)


class Template(NamedTuple):
    """A placement pattern: for each role its range of slots, as fractions (first, end). With a single slot, all roles
    share it."""

    env: tuple[float, float] = (0, 1)
    rollout: tuple[float, float] = (0, 1)  # of `reward`, too
    actor: tuple[float, float] = (0, 1)  # of `reference` and `critic`, too
    stages: int = 0  # rollout.pipeline_stage_num; 0: the config's own
    env_per_core: bool = False  # on CPU slots, one env worker per core


_COLLOCATED = Template()
_APART = [Template((0, 0.5), (0.5, 1), (0.5, 1), stages=2), Template((0, 0.5), (0.5, 0.75), (0.75, 1), stages=2)]
_HYBRID = Template((0, 0.5), (0.5, 1), (0, 1), stages=2)  # all slots train while env and rollout wait
_BORDERS = [Template((0, border), (0, border), (border, 1)) for border in (0.5, 0.75, 0.25)]  # training is apart
_SIMULATORS = Template(stages=1, env_per_core=True)
_TEMPLATES = {
    ("embodied", "sync"): [_COLLOCATED, Template(stages=2), _SIMULATORS, _HYBRID, *_APART],
    ("embodied", "async"): [_COLLOCATED, _SIMULATORS, *_BORDERS, *_APART],
    ("reasoning", "sync"): [_COLLOCATED, _BORDERS[0]],
    ("reasoning", "async"): [_COLLOCATED, *_BORDERS],
}


def is_auto(cluster: ClusterConfig) -> bool:
    """Whether the run chooses the slots of some role."""
    return any(_is_auto(spec) for spec in cluster.component_placement.values())


def proposals(config: C) -> list[C]:
    """The config with the placement of each template, collocated first; `find_problems` says which of them are valid.

    Lines that name slots stay. Roles with a node group share the slots of that group. Roles that may share a process
    and have the same line as the actor share one, if that changes no result. Collocated roles are also proposed with
    the config's own `cluster.fuse`, and with separate processes.
    """
    lines = config.cluster.component_placement
    fixed: dict[str, Any] = {names: spec for names, spec in lines.items() if not _is_auto(spec)}
    chosen: dict[str | None, list[str]] = {}  # roles by node group
    for names in (names for names in lines if names not in fixed):
        group = chosen.setdefault(getattr(lines[names], "node_group", None), [])
        group += [name.strip() for name in names.split(",")]
    found: list[C] = []
    for template in _TEMPLATES[config.runner.task_type, config.runner.mode]:
        stages, placement = template.stages or config.rollout.pipeline_stage_num, dict(fixed)
        for label, roles in chosen.items():
            for role, line in _lines(config, template, label, roles).items():
                placement[role] = line if label is None else {"placement": line, "node_group": label}
        for fuse in _fuses(config, placement, template is _COLLOCATED):
            content = config.model_dump()
            content["cluster"] |= {"component_placement": placement, "fuse": fuse}
            content["rollout"]["pipeline_stage_num"] = stages
            found.append(cast(C, type(config).model_validate(content)))
    return [one for number, one in enumerate(found) if one not in found[:number]]


def _lines(config: C, template: Template, label: str | None, roles: Sequence[str]) -> dict[str, str]:
    """The placement lines, by role, of roles that share the slots of the node group `label` (None: of the cluster)."""
    cluster, (accelerator, per_node) = config.cluster, slots(config.cluster)
    shape = ClusterShape(cluster.num_nodes, per_node, accelerator)
    try:
        every = place_component("", PlacementSpec(placement="all", node_group=label), shape, cluster.node_groups)
    except PlacementError:  # the checks refuse the group
        return dict.fromkeys(roles, "all")
    known = {"env": template.env, **dict.fromkeys(("rollout", "reward"), template.rollout)}
    known |= dict.fromkeys(("actor", "reference", "critic"), template.actor)
    shares = {role: known.get(role, (0, 1)) for role in roles}  # the checks refuse other names
    # the roles may use only a part of a template's range; stretch it over all slots of this group
    low, high = min(first for first, _ in shares.values()), max(end for _, end in shares.values())
    lines = {}
    for role, share in shares.items():
        first, end = (int((edge - low) / (high - low) * len(every.processes)) for edge in share)
        end = max(end, first + 1)
        lines[role] = f"{first}-{end - 1}" if end - first > 1 else f"{first}"
        if role == "env" and template.env_per_core and accelerator == "cpu" and isinstance(config, Config):
            cores = 2 ** (max(len(os.sched_getaffinity(0)) // per_node, 1).bit_length() - 1)
            several = gcd(cores, config.env.train.num_envs // (end - first))  # equally many environments each
            lines[role] += f":0-{(end - first) * several - 1}" if several > 1 else ""
    return lines


def _fuses(config: C, placement: Mapping[str, Any], is_collocated: bool) -> list[str | None]:
    """The values of `cluster.fuse` to propose with these lines. Only the config's own value if that is wrong, or if
    acting in the actor's process would give other results."""
    own, known = fused_roles(config), SHARING[config.runner.task_type]
    is_wrong = set(own) - set(known) or len(set(own)) < len(own) or len(names_in_fuse(config)) == 1
    if is_wrong or rollout_dtype(config, slots(config.cluster)[0]) == "bf16":
        return [config.cluster.fuse]
    lines = {name.strip(): spec for names, spec in placement.items() for name in names.split(",")}
    apart = {"reward", "rollout"} if config.runner.mode == "async" else {"reward"}
    present = set(roles_of(config) if isinstance(config, ReasoningConfig) else COMPONENTS) - apart
    alike = [role for role in known if role in present and lines.get(role) == lines.get("actor")]
    alike = alike if len(alike) > 1 else []
    return list({frozenset(x): ",".join(x) or None for x in ([own, [], alike] if is_collocated else [alike])}.values())


def _is_auto(spec: Any) -> bool:
    return bool(getattr(spec, "placement", spec) == AUTO)
