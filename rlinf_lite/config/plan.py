"""The arithmetic of one training step, from the config alone: who gets how many environments, samples and updates.

Imports point from scheduler to config. `slots` and `place` go back, inside the function and to the pure part only, so
that a bad placement is found together with every other problem, and by the code that will place the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rlinf_lite.cards import Observed
from rlinf_lite.config.names import COMPONENTS
from rlinf_lite.config.schema import ClusterConfig, Config, EnvSplitConfig
from rlinf_lite.registry import PartError, env_card

if TYPE_CHECKING:
    from rlinf_lite.scheduler.placement import ProcessPlacement


def observed(config: Config) -> Observed | None:
    """What the policy will see; None where only the simulator knows."""
    try:
        return env_card(config.env.id).observed(config.env.task, config.env.options)
    except PartError:
        return None


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
    if split.max_episode_steps is not None:
        return split.max_episode_steps
    try:
        task = env_card(config.env.id).task(config.env.task)
    except PartError:
        return None
    return None if task is None else task.max_episode_steps


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
