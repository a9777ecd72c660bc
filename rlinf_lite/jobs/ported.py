"""Names that code written for DLRover expects, all in one place: its roles, and what its workloads and trainers have
besides what `BaseWorkload` and `BaseTrainer` call the same. What has no counterpart: docs/coming_from.md."""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class RLRoleType(StrEnum):
    """The roles, by its names: each is equal to ours, and so are its `name` and `value`."""

    trainer = TRAINER = "trainer"
    actor = ACTOR = "actor"
    rollout = ROLLOUT = "rollout"
    reference = REFERENCE = "reference"
    reward = REWARD = "reward"
    critic = CRITIC = "critic"


FOREIGN_ARGUMENTS = ("master_handle", "actor_handles", "actor_metas", "handles", "classes")
"""Of constructors there, which nothing is given for here."""

CONFIG_ARGUMENTS = ("config", "configs", "conf", "cfg")
"""What a constructor's config is called: what is called so, and is given something else, is a mistake."""

_LIMIT = "write control=ControlConfig({}=...), with ControlConfig of rlinf_lite.config.schema"
FOREIGN_OPTIONS = {
    "master_cpu": "the master takes no CPU of Ray's. Leave it out",
    "master_mem": "the master's memory is not limited. Leave it out",
    "master_memory": "the master's memory is not limited. Leave it out",
    "master_max_restart": "a master that dies is always started again. Leave it out",
    "job_max_restart": _LIMIT.format("max_job_restarts"),
    "workload_max_restart": _LIMIT.format("max_role_restarts"),
    "trainer_max_restart": _LIMIT.format("max_restarts"),
    "master_state_backend_type": _LIMIT.format("backend"),
}
"""Of `submit` there, and what to write here instead."""


def without_ray_remote(cls: Any) -> Any:
    """The class itself, where `@ray.remote` has wrapped it; anything else as it is."""
    metadata = getattr(cls, "__ray_metadata__", None)
    modified = getattr(metadata, "modified_class", None)
    return getattr(modified, "__ray_actor_class__", cls)


class PortedWorkload:
    """Of a workload."""

    @property
    def _config(self: Any) -> Any:
        return self.config

    @_config.setter
    def _config(self: Any, config: Any) -> None:
        self.config = config

    def get_device_collocation(self: Any) -> str | None:
        """All roles on this worker's devices, as `actor,rollout`; None where there is no other."""
        roles: tuple[str, ...] = self.device_collocation
        return ",".join(roles) if len(roles) > 1 else None

    def has_device_collocation(self: Any) -> bool:
        return len(self.device_collocation) > 1

    def is_actor_or_rollout_device_collocation(self: Any) -> bool:
        return self.role in ("actor", "rollout") and {"actor", "rollout"} <= {*self.device_collocation}

    def is_ref_role(self: Any) -> bool:
        return bool(self.is_reference_role())


class PortedTrainer:
    """Of a trainer."""

    @property
    def _config(self: Any) -> Any:
        return self.config

    @_config.setter
    def _config(self: Any, config: Any) -> None:
        self.config = config

    def get_role_groups(self: Any) -> list[str]:
        """Names under which the trainer has its groups, such as `RG_ACTOR`."""
        return [f"RG_{role.upper()}" for role in self.groups]

    @property
    def actor_handles(self: Any) -> dict[str, list[Any]]:
        """By role, a group of one for each worker, whose `method.remote()` gives a reference of Ray's."""
        return {role: list(group) for role, group in self.groups.items()}

    def get_actor_handles(self: Any, role_type: str) -> list[Any]:
        """Of a role; none where the job has no such role."""
        found: list[Any] = self.actor_handles.get(role_type.lower(), [])
        return found
