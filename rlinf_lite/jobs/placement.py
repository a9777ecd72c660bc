"""A job's placement: which devices the workers of each role get. Pure: needs neither ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_lite.jobs.spec import JobSpec, JobSpecError, RoleSpec
from rlinf_lite.scheduler.placement import ProcessPlacement


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
            placed[role.role] = [_place(role, rank, first_slots) for rank in range(role.total)]
        for node, need in zip(nodes[unit.name], unit.needs, strict=True):
            used[node] += need
    return placed


def _on_node(role: RoleSpec, node: int) -> int:
    """Workers on the role's first node (0), its second, and so on."""
    return max(0, min(role.per_node, role.total - node * role.per_node))


def _devices(role: RoleSpec, workers: int) -> int:
    return workers * round(role.share) if role.share >= 1 else -(-workers // round(1 / role.share))


def _place(role: RoleSpec, rank: int, first_slots: list[int]) -> ProcessPlacement:
    local = rank % role.per_node
    # 1/k: workers 0..k-1 on the first slot; n: worker 0 on the first n
    offset = local * round(role.share) if role.share >= 1 else local // round(1 / role.share)
    first = first_slots[rank // role.per_node] + offset
    return ProcessPlacement(rank, tuple(range(first, first + max(1, round(role.share)))))


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
            raise JobSpecError([_no_room(unit, free)])
        nodes[unit.name] = fitting[0]
        for node, need in zip(fitting[0], unit.needs, strict=True):
            free[node] -= need
    return nodes


def _no_room(unit: _Unit, free: list[int]) -> str:
    return (
        f"{unit.roles[0].call}: {unit.name} needs {', '.join(map(str, unit.needs))} devices on {len(unit.needs)} "
        f"node(s); the other roles leave {', '.join(map(str, free))} free, by node. Change per_node of some role, "
        "raise .node_num or .device_per_node, or use .with_collocation."
    )
