"""Names that code written for DLRover uses, and the names to write here if they differ (docs/coming_from.md)."""

from __future__ import annotations

from enum import StrEnum


class RLRoleType(StrEnum):
    """DLRover's names of the roles. Each member, its `name` and its `value` equal the role's name here."""

    trainer = TRAINER = "trainer"
    actor = ACTOR = "actor"
    rollout = ROLLOUT = "rollout"
    reference = REFERENCE = "reference"
    reward = REWARD = "reward"
    critic = CRITIC = "critic"


FOREIGN_ARGUMENTS = {"master_handle", "actor_handles", "actor_metas", "handles", "classes"}
"""Constructor arguments of DLRover that have no counterpart here."""

CONFIG_ARGUMENTS = {"config", "configs", "conf", "cfg"}
"""Usual names of a constructor's argument for the config."""

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
"""Options of DLRover's `submit`, each with what to do here instead."""
