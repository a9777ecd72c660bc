"""BaseWorkload, the base class of a job's workers."""

from __future__ import annotations

from typing import Any

from rlinf_lite.jobs.spec import JobSpec
from rlinf_lite.scheduler.worker import Worker


class BaseWorkload(Worker):
    """A worker of a job. It has `role`, `rank`, `world_size`, `local_rank` and the other attributes of Worker; its
    group is named after its role. `config` is a DictConfig if the job was given one.
    """

    def __init__(self, config: Any, job: JobSpec) -> None:
        self.config = self._config = config  # DLRover's workloads read `_config`
        self.job = job

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of this worker, such as `actor[1]`, as in errors and `rlinf-lite job status`."""
        return f"{self.role}[{self.rank}]"

    @property
    def torch_master_addr(self) -> str:
        """The address of rank 0's node, for torch's process groups."""
        return self.master_addr

    @property
    def torch_master_port(self) -> int:
        return self.master_port

    @property
    def master_handle(self) -> Any:
        """The Ray actor of the job's master. Raises ValueError if it is gone."""
        from rlinf_lite.control.context import find_master  # imported here: describing a job must not need ray

        return find_master(self.job.name)

    @property
    def device_collocation(self) -> tuple[str, ...]:
        """All roles on this worker's devices, its own included."""
        return self.job.collocated(self.role)

    def is_collocated_with(self, role: str) -> bool:
        return role in self.device_collocation

    def get_device_collocation(self) -> str | None:
        """All roles on this worker's devices, such as `actor,rollout`; None if there is only its own."""
        return ",".join(self.device_collocation) if self.has_device_collocation() else None

    def has_device_collocation(self) -> bool:
        return len(self.device_collocation) > 1

    def is_actor_or_rollout_device_collocation(self) -> bool:
        """Whether this is an actor or a rollout on devices that these two roles share."""
        return self.role in ("actor", "rollout") and {"actor", "rollout"} <= {*self.device_collocation}

    def is_actor_role(self) -> bool:
        return self.role == "actor"

    def is_rollout_role(self) -> bool:
        return self.role == "rollout"

    def is_reference_role(self) -> bool:
        return self.role == "reference"

    is_ref_role = is_reference_role

    def is_reward_role(self) -> bool:
        return self.role == "reward"

    def is_critic_role(self) -> bool:
        return self.role == "critic"
