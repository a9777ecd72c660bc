"""What a job consists of, as plain data. Needs neither ray nor torch."""

from __future__ import annotations

import difflib
import importlib
import inspect
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

    def load_classes(self) -> dict[str, type]:
        """The classes of the trainer (under "trainer") and of all roles. Raises one JobSpecError for all that fail."""
        from rlinf_lite.jobs.trainer import BaseTrainer
        from rlinf_lite.scheduler.worker import Worker

        wanted: list[tuple[RoleSpec, type]] = [(self.trainer, BaseTrainer), *((role, Worker) for role in self.roles)]
        loaded = {spec.role: _load(spec, base) for spec, base in wanted}
        problems = [problem for problem in loaded.values() if isinstance(problem, str)]
        if problems:
            raise JobSpecError(problems)
        return {name: cls for name, cls in loaded.items() if isinstance(cls, type)}


def builder_call(role: str) -> str:
    return f".{role}(...)" if role in NAMED_ROLES else f".role({role!r}, ...)"


def _load(spec: RoleSpec, base: type) -> type | str:
    """The class, or what is wrong with it."""
    try:
        module = importlib.import_module(spec.module)
    except Exception as error:  # whatever a user's module raises while it is imported
        reason = f"{type(error).__name__}: {error}"
        return f"{spec.call}: the module {spec.module!r} cannot be imported ({reason}). Correct it or its path."
    found = getattr(module, spec.cls, None)
    if found is None:
        close = difflib.get_close_matches(spec.cls, dir(module), n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "Name a class that is there."
        return f"{spec.call}: the module {spec.module!r} has no {spec.cls!r}. {hint}"
    where = f"{spec.call}: {spec.module}.{spec.cls}"
    if not isinstance(found, type) or not issubclass(found, base):
        return f"{where} is not a subclass of {base.__name__}. Derive it from {base.__module__}.{base.__name__}."
    if inspect.isabstract(found):
        return f"{where} is abstract. Define {', '.join(sorted(found.__abstractmethods__))}."  # type: ignore[attr-defined]
    return found
