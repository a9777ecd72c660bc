"""The plan of a run, from the config alone: its processes and their slots, and the sizes of one training step."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from rlinf_lite.cards import EnvCard, Observed, PolicyCard, Problem
from rlinf_lite.config.names import COMPONENTS, ROLES, roles_of, touches
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import BaseConfig, ClusterConfig, Config, EnvSplitConfig
from rlinf_lite.registry import PartError, did_you_mean, env_card, policy_card
from rlinf_lite.scheduler.errors import PlacementError
from rlinf_lite.scheduler.placement import ProcessPlacement, detect_slots, resolve_placements

PLACEMENT = "cluster.component_placement"
SLOTS = ("cluster.num_nodes", "cluster.num_gpus_per_node", "cluster.accelerator")
"""The keys that determine the number of slots."""


def env_card_of(config: Config) -> EnvCard | None:
    """The card of a config's environment; None if there is no such environment, which another rule reports."""
    try:
        return env_card(config.env.id)
    except PartError:
        return None


def policy_card_of(config: Config) -> PolicyCard | None:
    """The card of a config's policy; None if there is no such policy, which another rule reports."""
    try:
        return policy_card(config.model.id)
    except PartError:
        return None


def observed(config: Config) -> Observed | None:
    """The observations and actions of a run's environment, by its card; None if only the simulator knows them."""
    card = env_card_of(config)
    return None if card is None else card.observed(config.env.task, config.env.options)


def slots(cluster: ClusterConfig) -> tuple[str, int]:
    """The kind of a slot (cuda or cpu) and the number of slots per node. Raises PlacementError, a ValueError."""
    return detect_slots(cluster.accelerator, cluster.num_gpus_per_node)


def episode_steps(config: Config, split: EnvSplitConfig) -> int | None:
    """The time limit of an episode in env steps; None if only the simulator knows it."""
    if split.max_episode_steps is not None:
        return split.max_episode_steps
    card = env_card_of(config)
    return None if card is None else card.max_episode_steps(config.env.task, config.env.options)


def kept_scenes(config: Config) -> int:
    """The number of scenes (see `EnvCard.num_scenes`) that are divided evenly among the groups of training
    environments, each of which keeps its scene. 1: there is one, or they cannot be divided so, and each episode plays
    any of them."""
    num_scenes = env_card(config.env.id).num_scenes(config.env.task)
    num_groups = config.env.train.num_envs // config.algorithm.group_size
    return 1 if num_groups % num_scenes else num_scenes


@dataclass(frozen=True)
class _Placed:
    placements: dict[str, Sequence[ProcessPlacement]]
    """The processes by component; components with an invalid placement are left out."""

    def size(self, component: str) -> int | None:
        """The number of processes of a component or role; None if its placement is invalid."""
        return len(self.placements[component]) if component in self.placements else None


@dataclass(frozen=True)
class Plan(_Placed):
    """The processes and step sizes of a run in a simulator."""

    config: Config

    @property
    def num_steps(self) -> int:
        """The number of runner steps of the run."""
        runner = self.config.runner
        return runner.max_steps if runner.max_steps > 0 else runner.max_epochs

    @cached_property
    def num_chunks(self) -> int | None:
        """T: the number of decisions per environment and step."""
        limit = episode_steps(self.config, self.config.env.train)
        whole_episode = None if limit is None else -(-limit // self.config.model.num_action_chunks)
        return self.config.rollout.num_chunks or whole_episode

    @property
    def num_samples(self) -> int | None:
        """The number of decisions of all environments in one step."""
        return None if self.num_chunks is None else self.config.env.train.num_envs * self.num_chunks


@dataclass(frozen=True)
class ReasoningPlan(_Placed):
    """The processes and step sizes of a language run."""

    config: ReasoningConfig

    @property
    def num_samples(self) -> int:
        """The number of responses that a step trains on."""
        return self.config.data.num_prompts * self.config.algorithm.group_size


def plan_of(config: BaseConfig) -> Plan | ReasoningPlan:
    """The plan of a config that has passed its checks."""
    return plan_and_problems(config, set())[0]


def plan_and_problems(config: BaseConfig, suspects: Set[str]) -> tuple[Plan | ReasoningPlan, list[Problem]]:
    """The plan, with the processes of every component that has a valid placement, and the problems of the others.
    `suspects` as in `find_problems`."""
    if isinstance(config, ReasoningConfig):
        found, problems = _placements(config.cluster, ROLES, roles_of(config), suspects)
        return ReasoningPlan(found, config), problems
    assert isinstance(config, Config)
    found, problems = _placements(config.cluster, COMPONENTS, COMPONENTS, suspects)
    return Plan(found, config), problems


def _placements(
    cluster: ClusterConfig, known: Sequence[str], required: Sequence[str], suspects: Set[str]
) -> tuple[dict[str, Sequence[ProcessPlacement]], list[Problem]]:
    """The processes by component, and problems. `known`: all components of this kind of run; `required` ones must have
    a line."""
    if touches(SLOTS, suspects):
        return {}, []
    accelerator, num_slots = slots(cluster)

    placed: dict[str, list[str]] = {}  # entries that mention a component, by component
    for names in cluster.component_placement:
        for name in names.split(","):
            placed.setdefault(name.strip(), []).append(names)
    problems = []
    for name, entries in placed.items():
        if name not in known:
            problems.append(Problem(PLACEMENT, f"no component is called {name!r}. {did_you_mean(name, known)}"))
        elif len(entries) > 1:
            where = " and ".join(map(repr, entries))
            text = f"{name} is placed twice, by {where}. Keep one; an inherited config's lines stay"
            problems.append(Problem(PLACEMENT, text))
    if not touches((PLACEMENT,), suspects):
        missing = [name for name in required if name not in placed]
        problems += [Problem(PLACEMENT, f"{name} is not placed. Add a line such as '{name}: all'") for name in missing]

    found: dict[str, Sequence[ProcessPlacement]] = {}
    for names, spec in cluster.component_placement.items():
        if isinstance(spec, int) and spec >= 60:
            meant = f"{spec // 60}:{spec % 60}"
            text = f"is {spec}, as which YAML reads an unquoted {meant} too. Write '{meant}' or '{spec}', in quotes"
            problems.append(Problem(f"{PLACEMENT}.{names}", text))
            continue
        entry = cluster.model_copy(update={"component_placement": {names: spec}})
        try:
            of_entry = resolve_placements(entry, num_slots, accelerator)
        except PlacementError as error:
            if touches(("cluster.node_groups",), suspects):
                continue  # the missing node group may be the one that could not be read
            key = f"{PLACEMENT}.{error.about}" if error.about in placed else PLACEMENT
            problems.append(Problem(key, error.text))
        else:
            found |= {name: of_entry[name] for name in known if placed.get(name) == [names]}
    return found, list(dict.fromkeys(problems))
