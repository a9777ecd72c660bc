"""Checks of `cluster.component_placement`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlinf_lite.cards import Problem
from rlinf_lite.config.plan import place, slots
from rlinf_lite.config.rules import touches
from rlinf_lite.config.schema import ClusterConfig
from rlinf_lite.registry import did_you_mean

if TYPE_CHECKING:
    from rlinf_lite.scheduler.placement import ProcessPlacement

PLACEMENT = "cluster.component_placement"
_CLUSTER = ("cluster.num_nodes", "cluster.num_gpus_per_node", "cluster.accelerator")


def placements(
    cluster: ClusterConfig, known: Sequence[str], required: Sequence[str], suspects: set[str]
) -> tuple[dict[str, Sequence[ProcessPlacement]], list[Problem]]:
    """Processes of every component that is placed well, and what is wrong with the others.

    `known`: components that there are; those `required` need a line. `suspects` as in `rules.violations`.
    """
    if touches(_CLUSTER, suspects):
        return {}, []
    try:
        slots(cluster)
    except ValueError as error:
        return {}, [_said("cluster.accelerator", error)]
    placed, problems = _component_names(cluster, known)
    if not touches((PLACEMENT,), suspects):
        missing = [name for name in required if name not in placed]
        problems += [Problem(PLACEMENT, f"{name} is not placed. Add a line such as '{name}: all'") for name in missing]
    found: dict[str, Sequence[ProcessPlacement]] = {}
    for names, spec in cluster.component_placement.items():
        try:
            of_entry = place(cluster, names)
        except ValueError as error:
            if touches(("cluster.node_groups",), suspects):
                continue  # the node group that this entry misses may be the one that could not be read
            said = next((name for name in map(str.strip, names.split(",")) if str(error).startswith(name + ":")), "")
            problem = _said(f"{PLACEMENT}.{said}", error, said) if said else _said(PLACEMENT, error)
            problems.append(Problem(problem.key, problem.text + _base_60_hint(spec)))
        else:
            found |= {name: of_entry[name] for name in known if placed.get(name) == [names]}
    return found, list(dict.fromkeys(problems))


def _said(key: str, error: ValueError, begins: str | None = None) -> Problem:
    """The scheduler's error, whose messages begin with what they are about."""
    return Problem(key, str(error).removeprefix(f"{begins or key}: "))


def _component_names(cluster: ClusterConfig, known: Sequence[str]) -> tuple[dict[str, list[str]], list[Problem]]:
    """The entries of `component_placement` that mention each component, and what is wrong with the names."""
    placed: dict[str, list[str]] = {}
    for names in cluster.component_placement:
        for name in names.split(","):
            placed.setdefault(name.strip(), []).append(names)
    problems = []
    for name, entries in placed.items():
        if name not in known:
            problems.append(Problem(PLACEMENT, f"no component is called {name!r}. {did_you_mean(name, known)}"))
        elif len(entries) > 1:
            where = " and ".join(map(repr, entries))
            text = f"{name} is placed twice, by {where}. Keep one; an inherited config's lines stay"
            problems.append(Problem(PLACEMENT, text))
    return placed, problems


def _base_60_hint(spec: object) -> str:
    if not isinstance(spec, int) or spec < 60:
        return ""
    meant = f"{spec // 60}:{spec % 60}"
    return f" (YAML reads an unquoted {meant} as {spec}: if that was meant, write '{meant}' in quotes)"
