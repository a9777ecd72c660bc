"""The arithmetic of one training step, from the config alone: who gets how many environments, samples and updates.

Imports point from scheduler to config. `slots` and `place` go back, inside the function and to the pure part only, so
that a bad placement is found together with every other problem, and by the code that will place the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rlinf_lite.config.names import COMPONENTS
from rlinf_lite.config.schema import ClusterConfig, Config, EnvSplitConfig

if TYPE_CHECKING:
    from rlinf_lite.scheduler.placement import ProcessPlacement


@dataclass(frozen=True)
class Task:
    """What is known of a task before its simulator starts."""

    max_episode_steps: int
    state_dim: int
    """Numbers of a state observation."""
    action_dim: int
    own_state_dim: int = 0
    """Numbers that come with images alone: what the robot senses of itself."""
    cameras: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observed:
    """What a policy sees of an environment and answers to it."""

    action_dim: int
    state_dim: int
    """0: no state."""
    cameras: dict[str, tuple[int, int]]
    """Height and width by name."""


# A test compares these numbers with the simulators. ManiSkill's action dimensions are those of pd_joint_delta_pos.
TASKS = {
    ("maniskill", "PushCube-v1"): Task(50, 35, 8, 25, ("base_camera",)),
    ("maniskill", "PickCube-v1"): Task(50, 42, 8, 29, ("base_camera",)),
    ("maniskill", "StackCube-v1"): Task(50, 48, 8, 25, ("base_camera", "hand_camera")),
    ("maniskill", "PegInsertionSide-v1"): Task(100, 43, 8, 25, ("base_camera", "hand_camera")),
    ("gymnasium", "Pendulum-v1"): Task(200, 3, 1),
    ("tabletop", "pick"): Task(24, 16, 3, 4, ("top",)),
    ("tabletop", "push"): Task(40, 16, 3, 4, ("top",)),
    ("tabletop", "place"): Task(32, 16, 3, 4, ("top",)),
    ("tabletop", "all"): Task(40, 16, 3, 4, ("top",)),
}
_CONTROLLERS = {"pd_joint_delta_pos": 8, "pd_ee_delta_pose": 7, "pd_ee_delta_pos": 4}


def observed(config: Config) -> Observed | None:
    """What the policy will see; None where only the simulator knows."""
    env = config.env
    task, controller = TASKS.get((env.id, env.task)), env.maniskill.control_mode
    if task is None or env.kwargs or (env.id == "maniskill" and controller not in _CONTROLLERS):
        return None
    mode, size = {
        "maniskill": (env.maniskill.obs_mode, env.maniskill.camera_size),
        "tabletop": (env.tabletop.obs_mode, (64, 64)),
    }.get(env.id, ("state", (0, 0)))
    return Observed(
        action_dim=_CONTROLLERS[str(controller)] if env.id == "maniskill" else task.action_dim,
        state_dim=task.own_state_dim if mode == "rgb" else task.state_dim,
        cameras={} if mode == "state" else dict.fromkeys(task.cameras, size),
    )


def slots(cluster: ClusterConfig) -> tuple[str, int]:
    """What a slot is (cuda or cpu) and how many there are per node; raises PlacementError, a ValueError."""
    from rlinf_lite.scheduler.placement import detect_slots

    return detect_slots(cluster.accelerator, cluster.num_gpus_per_node)


def place(cluster: ClusterConfig, names: str) -> Mapping[str, Sequence[ProcessPlacement]]:
    """Processes of the components that one entry of `component_placement` names; raises PlacementError."""
    from rlinf_lite.scheduler.placement import resolve_placements

    alone = cluster.model_copy(update={"component_placement": {names: cluster.component_placement[names]}})
    accelerator, num_slots = slots(cluster)
    return resolve_placements(alone, num_slots, accelerator)


def episode_steps(config: Config, split: EnvSplitConfig) -> int | None:
    """Time limit of an episode in env steps; None where only the simulator knows it."""
    known = TASKS.get((config.env.id, config.env.task))
    return split.max_episode_steps or (known.max_episode_steps if known else None)


@dataclass(frozen=True)
class Plan:
    """Sizes of one training step. A group's size is None where its placement is not valid."""

    config: Config
    placements: dict[str, Sequence[ProcessPlacement]]

    def size(self, component: str) -> int | None:
        """Processes of a component."""
        return len(self.placements[component]) if component in self.placements else None

    @property
    def num_steps(self) -> int:
        """Runner steps of the run."""
        runner = self.config.runner
        return runner.max_steps if runner.max_steps > 0 else runner.max_epochs

    @cached_property
    def num_chunks(self) -> int | None:
        """T: decisions per environment and step."""
        limit = episode_steps(self.config, self.config.env.train)
        whole_episode = None if limit is None else -(-limit // self.config.model.num_action_chunks)
        return self.config.rollout.num_chunks or whole_episode

    @property
    def num_samples(self) -> int | None:
        """Decisions of all environments in one step."""
        return None if self.num_chunks is None else self.config.env.train.num_envs * self.num_chunks


def complete_plan(config: Config) -> Plan:
    """The plan of a config that has passed its checks."""
    placements: dict[str, Sequence[ProcessPlacement]] = {}
    for names in config.cluster.component_placement:
        placements |= place(config.cluster, names)
    return Plan(config, {name: placements[name] for name in COMPONENTS})
