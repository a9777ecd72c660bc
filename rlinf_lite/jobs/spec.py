"""A job's description as plain data, and the devices of its workers. Needs neither ray nor torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rlinf_lite.scheduler.placement import ProcessPlacement

NAMED_ROLES = ("trainer", "actor", "rollout", "reference", "reward", "critic")
"""Roles with a builder call of their own; others are named with `.role(name, ...)`."""


class JobSpecError(ValueError):
    """A job's description has problems, which are found before anything starts.

    `problems` has one line for each: `.builder(call): what is wrong (the value, the arithmetic). how to fix it`.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        return "\n".join([f"job: {count}", *(f"  - {problem}" for problem in self.problems)])


@dataclass(frozen=True)
class RoleSpec:
    """A role: its class, the number of its workers, and their devices."""

    role: str
    module: str
    cls: str
    total: int = 1
    per_node: int = 1
    share: float = 1.0
    """Devices per worker: an integer, or 1/integer if several workers share a device."""
    env: dict[str, str] = field(default_factory=dict)

    @property
    def call(self) -> str:
        """The builder call that names the role, for messages."""
        return builder_call(self.role)

    def devices_on(self, node: int) -> int:
        """The number of devices that the role's workers need on its node number `node` (0: its first)."""
        workers = max(0, min(self.per_node, self.total - node * self.per_node))
        return workers * round(self.share) if self.share >= 1 else -(-workers // round(1 / self.share))


@dataclass(frozen=True)
class JobSpec:
    """A job: machines, roles, and the roles that share devices. `dataclasses.asdict` gives JSON."""

    num_nodes: int
    devices_per_node: int
    device_type: str
    """GPU, or CPU for virtual devices."""
    config: dict[str, Any]
    env: dict[str, str]
    trainer: RoleSpec
    roles: tuple[RoleSpec, ...]
    collocations: tuple[tuple[str, ...], ...] = ()
    omegaconf: bool = False
    """Whether the config was a DictConfig."""
    name: str = ""
    """The name that the job was submitted under."""

    def user_config(self) -> Any:
        """The config for trainer and workers: a dict, or a DictConfig if the job was given one."""
        if not self.omegaconf:
            return self.config
        from omegaconf import OmegaConf  # takes longer to import than everything else here

        return OmegaConf.create(self.config)

    def role(self, name: str) -> RoleSpec:
        """The role, with the number of its workers (`total`) and their devices (`share`)."""
        return next(role for role in self.roles if role.role == name)

    def collocated(self, name: str) -> tuple[str, ...]:
        """All roles on a role's devices, the role itself included."""
        return next((roles for roles in self.collocations if name in roles), (name,))


def builder_call(role: str) -> str:
    return f".{role}(...)" if role in NAMED_ROLES else f".role({role!r}, ...)"


@dataclass(frozen=True)
class _Unit:
    """Roles on the same devices: a single one, or those of a collocation."""

    roles: tuple[RoleSpec, ...]

    @property
    def name(self) -> str:
        return "+".join(role.role for role in self.roles)

    @cached_property
    def needs(self) -> list[int]:
        """The number of devices on the unit's first node, its second, and so on; never increasing."""
        num_nodes = max(-(-role.total // role.per_node) for role in self.roles)
        return [max(role.devices_on(node) for role in self.roles) for node in range(num_nodes)]


def place_roles(spec: JobSpec) -> dict[str, list[ProcessPlacement]]:
    """The processes of every role by rank; slot = node * devices_per_node + device. Raises JobSpecError.

    A role fills its nodes one after the other, with `per_node` workers on each. A role that does not need all nodes
    gets those with the most free devices. Collocated roles get the same slots; other roles never share a slot.
    """
    together = dict.fromkeys(spec.collocated(role.role) for role in spec.roles)
    units = [_Unit(tuple(map(spec.role, names))) for names in together]
    if problems := list(_device_problems(spec, units)):
        raise JobSpecError(problems)
    nodes = _choose_nodes(spec, units)
    used = [0] * spec.num_nodes
    placed: dict[str, list[ProcessPlacement]] = {}
    for unit in units:
        first_slots = [node * spec.devices_per_node + used[node] for node in nodes[unit.name]]
        for role in unit.roles:
            # 1/k devices: workers 0..k-1 on the first slot; n devices: worker 0 on the first n
            size, sharers = max(1, round(role.share)), max(1, round(1 / role.share))
            offsets = [local // sharers * size for local in range(role.per_node)]
            starts = [first + offset for first in first_slots for offset in offsets][: role.total]
            slots = [tuple(range(start, start + size)) for start in starts]
            placed[role.role] = [ProcessPlacement(rank, its) for rank, its in enumerate(slots)]
        for node, need in zip(nodes[unit.name], unit.needs, strict=True):
            used[node] += need
    return placed


def _device_problems(spec: JobSpec, units: list[_Unit]) -> Iterator[str]:
    has = spec.devices_per_node
    for role in spec.roles:
        if (need := role.devices_on(0)) > has:
            call = f"{role.call}.per_node({role.per_node}).share({role.share:g})"
            fix = "Lower per_node or share, or raise .device_per_node."
            yield f"{call}: needs {need} devices on a node, a node has {has}. {fix}"
    needed, there = sum(sum(unit.needs) for unit in units), spec.num_nodes * has
    if needed > there:
        parts = ", ".join(f"{unit.name} {sum(unit.needs)}" for unit in units)
        text = f"the job has {there} devices, its roles need {needed} ({parts})"
        fix = "Raise these, lower total or share, or use .with_collocation."
        yield f".node_num({spec.num_nodes}).device_per_node({has}): {text}. {fix}"


def _choose_nodes(spec: JobSpec, units: list[_Unit]) -> dict[str, list[int]]:
    """The nodes of each unit, by its name; units that need the most devices on a node choose first. Raises
    JobSpecError."""
    free = [spec.devices_per_node] * spec.num_nodes
    nodes: dict[str, list[int]] = {}
    for unit in sorted(units, key=lambda unit: unit.needs, reverse=True):
        freest = sorted(range(spec.num_nodes), key=lambda node: -free[node])[: len(unit.needs)]
        orders = (sorted(freest), freest)  # in node order if the unit fits then
        fitting = [order for order in orders if all(free[n] >= k for n, k in zip(order, unit.needs, strict=True))]
        if not fitting:
            needs, left = (", ".join(map(str, counts)) for counts in (unit.needs, free))
            text = f"{unit.name} needs {needs} devices on {len(unit.needs)} node(s)"
            fix = "Change per_node of some role, raise .node_num or .device_per_node, or use .with_collocation."
            call = unit.roles[0].call
            raise JobSpecError([f"{call}: {text}; the other roles leave {left} free, by node. {fix}"])
        nodes[unit.name] = fitting[0]
        for node, need in zip(fitting[0], unit.needs, strict=True):
            free[node] -= need
    return nodes
