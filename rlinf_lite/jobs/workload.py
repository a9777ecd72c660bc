"""The base class of a job's workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlinf_lite.jobs.ported import PortedWorkload
from rlinf_lite.jobs.spec import JobSpec
from rlinf_lite.scheduler.worker import Worker


@dataclass(frozen=True)
class JobInfo:
    """The job, as its workers and its trainer know it. The dicts are by role."""

    name: str
    master: str
    """Ray's name for the job's master."""
    collocated: dict[str, tuple[str, ...]]
    """All roles on a role's devices, itself included."""
    shares: dict[str, float]
    """Devices per worker."""
    roles: dict[str, int]
    """Workers."""

    @classmethod
    def of(cls, spec: JobSpec, name: str, master: str) -> JobInfo:
        return cls(
            name,
            master,
            collocated={role.role: spec.collocated(role.role) for role in spec.roles},
            shares={role.role: role.share for role in spec.roles},
            roles={role.role: role.total for role in spec.roles},
        )


class BaseWorkload(PortedWorkload, Worker):
    """A worker of a job. `role`, `rank`, `world_size`, `local_rank` and the rest are those of a Worker; its group is
    called as its role.

    `config`: a DictConfig where the job was given one.
    """

    def __init__(self, config: Any, job: JobInfo) -> None:
        self.config, self.job = config, job

    @property
    def name(self) -> str:  # type: ignore[override]
        """Of this worker alone, as in errors and `rlinf-lite job status`: `actor[1]`."""
        return f"{self.role}[{self.rank}]"

    @property
    def torch_master_addr(self) -> str:
        """Address of rank 0's node, for torch's process groups."""
        return self.master_addr

    @property
    def torch_master_port(self) -> int:
        return self.master_port

    @property
    def master_handle(self) -> Any:
        """The Ray actor that is the job's master. Raises ValueError where it is gone."""
        import ray

        from rlinf_lite.scheduler.context import RAY_NAMESPACE

        return ray.get_actor(self.job.master, namespace=RAY_NAMESPACE)

    @property
    def device_collocation(self) -> tuple[str, ...]:
        """All roles on this worker's devices, its own included."""
        return self.job.collocated.get(self.role, (self.role,))

    def is_collocated_with(self, role: str) -> bool:
        return role in self.device_collocation

    def is_actor_role(self) -> bool:
        return self.role == "actor"

    def is_rollout_role(self) -> bool:
        return self.role == "rollout"

    def is_reference_role(self) -> bool:
        return self.role == "reference"

    def is_reward_role(self) -> bool:
        return self.role == "reward"

    def is_critic_role(self) -> bool:
        return self.role == "critic"
