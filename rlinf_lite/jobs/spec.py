"""What a job consists of, as plain data. Needs neither ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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

    def role(self, name: str) -> RoleSpec:
        return next(role for role in self.roles if role.role == name)

    def collocated(self, name: str) -> tuple[str, ...]:
        """All roles on a role's devices, itself included."""
        return next((roles for roles in self.collocations if name in roles), (name,))


def builder_call(role: str) -> str:
    return f".{role}(...)" if role in NAMED_ROLES else f".role({role!r}, ...)"
