"""What a job consists of, as plain data, and which devices its workers get. Needs neither ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlinf_lite.scheduler.placement import ProcessPlacement

NAMED_ROLES = ("trainer", "actor", "rollout", "reference", "reward", "critic")
"""Those that the builder has a call for; others are named with `.role(name, ...)`."""


class JobSpecError(ValueError):
    """Everything that is wrong with a job's description, found before anything starts.

    `problems` holds one line each: `.builder(call): what is wrong (the value, the arithmetic). how to fix it`.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        return "\n".join([f"job: {count}", *(f"  - {problem}" for problem in self.problems)])


@dataclass(frozen=True)
class RoleSpec:
    """A role: its class, how many workers of it run, and on what."""

    role: str
    module: str
    cls: str
    total: int = 1
    per_node: int = 1
    share: float = 1.0
    """Devices per worker: an integer, or 1/integer where several workers share one."""
    env: dict[str, str] = field(default_factory=dict)

    @property
    def call(self) -> str:
        """The builder call that named it, for messages."""
        return builder_call(self.role)


@dataclass(frozen=True)
class JobSpec:
    """A job: machines, roles, and which of these share devices. `dataclasses.asdict` gives JSON."""

    num_nodes: int
    devices_per_node: int
    device_type: str
    """GPU, or CPU: virtual devices."""
    config: dict[str, Any]
    env: dict[str, str]
    trainer: RoleSpec
    roles: tuple[RoleSpec, ...]
    collocations: tuple[tuple[str, ...], ...] = ()
    omegaconf: bool = False
    """The config was a DictConfig."""

    def user_config(self) -> Any:
        """The config as trainer and workers get it: a dict, or a DictConfig where one was given."""
        if not self.omegaconf:
            return self.config
        from omegaconf import OmegaConf

        return OmegaConf.create(self.config)

    def role(self, name: str) -> RoleSpec:
        return next(role for role in self.roles if role.role == name)

    def collocated(self, name: str) -> tuple[str, ...]:
        """All roles on a role's devices, itself included."""
        return next((roles for roles in self.collocations if name in roles), (name,))


def builder_call(role: str) -> str:
    return f".{role}(...)" if role in NAMED_ROLES else f".role({role!r}, ...)"


@dataclass(frozen=True)
class _Unit:
    """Roles on the same devices: one, or those of a collocation."""

    roles: tuple[RoleSpec, ...]

    @property
    def name(self) -> str:
        return "+".join(role.role for role in self.roles)

    @property
    def needs(self) -> list[int]:
        """Devices on its first node, its second, and so on; never increasing."""
        num_nodes = max(-(-role.total // role.per_node) for role in self.roles)
        return [max(_devices(role, _on_node(role, node)) for role in self.roles) for node in range(num_nodes)]


def place_roles(spec: JobSpec) -> dict[str, list[ProcessPlacement]]:
    """Every role's processes by rank; slot = node * devices_per_node + device. Raises JobSpecError.

    A role fills one node after the other, `per_node` workers on each; where it does not need all nodes, those with the
    most free devices. Collocated roles take the same slots, others never share one.
    """
    units = [
        _Unit(tuple(spec.role(name) for name in names))
        for names in dict.fromkeys(spec.collocated(role.role) for role in spec.roles)
    ]
    problems = _device_problems(spec, units)
    if problems:
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
            firsts = [first + offset for first in first_slots for offset in offsets][: role.total]
            placed[role.role] = [
                ProcessPlacement(rank, tuple(range(first, first + size))) for rank, first in enumerate(firsts)
            ]
        for node, need in zip(nodes[unit.name], unit.needs, strict=True):
            used[node] += need
    return placed


def _on_node(role: RoleSpec, node: int) -> int:
    """Workers on the role's first node (0), its second, and so on."""
    return max(0, min(role.per_node, role.total - node * role.per_node))


def _devices(role: RoleSpec, workers: int) -> int:
    return workers * round(role.share) if role.share >= 1 else -(-workers // round(1 / role.share))


def _device_problems(spec: JobSpec, units: list[_Unit]) -> list[str]:
    problems = []
    for role in spec.roles:
        need = _devices(role, _on_node(role, 0))
        if need > spec.devices_per_node:
            problems.append(
                f"{role.call}.per_node({role.per_node}).share({role.share:g}): needs {need} devices on a node, "
                f"a node has {spec.devices_per_node}. Lower per_node or share, or raise .device_per_node."
            )
    needed, there = sum(sum(unit.needs) for unit in units), spec.num_nodes * spec.devices_per_node
    if needed > there:
        parts = ", ".join(f"{unit.name} {sum(unit.needs)}" for unit in units)
        problems.append(
            f".node_num({spec.num_nodes}).device_per_node({spec.devices_per_node}): the job has {there} devices, its "
            f"roles need {needed} ({parts}). Raise these, lower total or share, or use .with_collocation."
        )
    return problems


def _choose_nodes(spec: JobSpec, units: list[_Unit]) -> dict[str, list[int]]:
    """The nodes of each unit; those that need most on a node choose first."""
    free = [spec.devices_per_node] * spec.num_nodes
    nodes: dict[str, list[int]] = {}
    for unit in sorted(units, key=lambda unit: unit.needs, reverse=True):
        freest = sorted(range(spec.num_nodes), key=lambda node: -free[node])[: len(unit.needs)]
        orders = (sorted(freest), freest)  # in node order, if it fits so
        fitting = [order for order in orders if all(free[n] >= k for n, k in zip(order, unit.needs, strict=True))]
        if not fitting:
            needs, left = (", ".join(map(str, counts)) for counts in (unit.needs, free))
            raise JobSpecError(
                [
                    f"{unit.roles[0].call}: {unit.name} needs {needs} devices on {len(unit.needs)} node(s); the other "
                    f"roles leave {left} free, by node. Change per_node of some role, raise .node_num or "
                    ".device_per_node, or use .with_collocation."
                ]
            )
        nodes[unit.name] = fitting[0]
        for node, need in zip(fitting[0], unit.needs, strict=True):
            free[node] -= need
    return nodes
