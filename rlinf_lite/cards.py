"""What a part says of itself without being loaded: its options, its tasks, what it needs, what does not fit.

A card is read by whoever loads a config, checks one, previews a run or writes the docs, so its module imports neither
torch nor ray nor a simulator: what does stays inside of functions. Ours and a user's are found alike (`registry.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _refuse_bool(value: Any) -> Any:
    """pydantic would read true as 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Int = Annotated[int, BeforeValidator(_refuse_bool)]
Float = Annotated[float, BeforeValidator(_refuse_bool)]
PositiveInt = Annotated[Int, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
UnitFloat = Annotated[Float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A config section: unknown keys are refused, values never change after loading. The text under a key is its
    help."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def __setattr__(self, name: str, value: Any) -> None:
        anew = f'load_config(name, ["SECTION.{name}={value}"])'
        raise ValueError(f"{name} is frozen, as all values of a config are. Load it anew: {anew}")


@dataclass(frozen=True)
class Problem:
    """Something wrong with a config. `text` says what is wrong (the value, the arithmetic), then how to mend it."""

    key: str
    text: str
    of_machine: bool = False
    """This machine lacks something; on another one the config may be right."""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


NO_STATE = "is null, and the policy reads the state. Name the dataset's feature, or a policy that reads none"
"""What `data.keys.state` is then told."""


class ProblemError(ValueError):
    """A Problem that is met where it cannot be yielded."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


@dataclass(frozen=True)
class Task:
    """What is known of a task before its simulator starts."""

    max_episode_steps: int
    state_dim: int
    """Numbers of a state observation; 0: none."""
    action_dim: int
    own_state_dim: int = 0
    """Numbers that come with images alone: what the robot senses of itself."""
    cameras: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Height and width of images by camera."""


@dataclass(frozen=True)
class Suite:
    """Settings under which results are published, for `rlinf-lite eval --suite`. An evaluation that keeps all of them
    says so."""

    about: str
    settings: Mapping[str, Any]
    """By config key."""


@dataclass(frozen=True)
class Observed:
    """What a policy sees of an environment and answers to it."""

    action_dim: int
    state_dim: int
    """0: no state."""
    cameras: dict[str, tuple[int, int]]
    """Height and width by name."""
    has_instruction: bool = True
    """False: the environment never gives one."""
    state_names: Sequence[str] | None = None
    """Names of the state's dimensions, as the simulator's; None: it has none, or only the simulator knows."""
    action_names: Sequence[str] | None = None
    """The same of actions."""


@dataclass(frozen=True)
class EstimatorNeeds:
    """What an advantage estimator says when it is registered; `True`: it needs that."""

    values: bool = False
    """A critic's values, so that one trains."""
    groups: bool = False
    """Episodes of a group, from the same beginning, to compare with each other."""
    whole_episodes: bool = False
    greedy: bool = False
    """A greedy answer to the same prompt."""


@dataclass(frozen=True)
class LossNeeds:
    """What a policy loss says when it is registered; `True`: it needs that."""

    probabilities: bool = False
    """Likelihoods that are probabilities, as those of tokens are; densities of continuous actions may be above 1."""
    behaviour: bool = False
    """The log-probabilities of the policy that acted. Its ratios are against those, so that it corrects for an older
    version or another engine by itself, and takes no `algorithm.correction`."""
    clips_below: bool = False
    """`algorithm.clip_ratio_low` below 1: a ratio is never below 0, nor does a probability fall by more than 1."""
    unread: tuple[str, ...] = ()
    """Keys of `algorithm` that other losses read and this one does not; to set one is a mistake."""


@dataclass(frozen=True)
class StrategyNeeds:
    """What a strategy of training says when it is registered; `True`: it needs that."""

    ranks_per_model: bool = False
    """`actor.tensor_model_parallel_size`, which its class is made with: so many ranks compute the layers of a language
    model together."""


class Card:
    """What environments and policies have in common. A subclass sets what differs from the defaults here."""

    Options: type[Section] | None = None
    """The part's own settings, `env.options` or `model.options`; None: names to any values, which nobody checks."""
    free_options: tuple[str, ...] = ()
    """Dotted names of options that may change when a run goes on or is measured, as they do not make it another run."""
    package: str | None = None
    """A module that has to be installed, and the extra of rlinf_lite that installs it."""
    extra: str | None = None

    def __init__(self, name: str = "", part: Any = None) -> None:
        """`name`: what the config calls it. `part`: what the name was found to be, where that is no card."""
        self.name, self.part = name, part

    @classmethod
    def of(cls, part: Any, name: str) -> Self:
        """The card of a part: itself, its attribute `card`, or one that knows nothing."""
        carried = part if _is_card(part) else getattr(part, "card", cls)
        kind = carried if isinstance(carried, type) else type(carried)
        if not issubclass(kind, cls):
            raise TypeError(f"{name} carries {carried!r}, which is no {cls.__name__}")
        return kind(name, None if _is_card(part) else part)

    def options(self, given: Any) -> Any:
        """`given`, a section of a config, as Options. Raises ValueError (pydantic's, key by key)."""
        if self.Options is not None:
            return self.Options.model_validate(given)
        if isinstance(given, Mapping):
            return dict(given)
        raise ValueError("must be a section of keys")


class EnvCard(Card):
    """An environment's card. Without one, a `make_env` is used as it is: nothing is known before it is built."""

    simulator: str = ""
    """Import path, `pkg.module:attribute`, of what makes the environments, called as a `make_env` is. A card whose
    module loads nothing heavy may define `make` instead."""
    tasks: Mapping[str, Task] = {}
    """By name; the first is that of a config that names none."""
    has_other_tasks: bool = False
    """There are tasks that `tasks` does not list."""
    simulator_bytes: tuple[int, int] | None = None
    """Memory that the simulator takes in a process, and each environment besides its observations; None: not known."""
    suites: Mapping[str, Suite] = {}
    """Published evaluations, by name."""
    task_groups: Mapping[str, Sequence[str]] = {}
    """Sets of tasks, by name, of which evaluations give the success as well."""
    initial_states: str = "balanced_seed(seed, episode, tasks): the same ones at every evaluation"
    """Those of an evaluation's episodes, for its protocol."""
    probe_options: Mapping[str, Any] = {}
    """Under which `rlinf-lite doctor` tries out the first task."""

    def make(self, num_envs: int, cfg: Any, split: Literal["train", "eval"]) -> Any:
        """Build `num_envs` environments of `cfg` (an EnvConfig): a VecEnv, a Simulator, a gymnasium.vector.VectorEnv,
        or a gymnasium.Env, of which one is then made per row. `part` is what `simulator` names."""
        takes_split = "split" in inspect.signature(self.part).parameters
        return self.part(num_envs, cfg, split) if takes_split else self.part(num_envs, cfg)

    def task(self, name: str) -> Task | None:
        """What is known of a task; None where only the simulator knows."""
        return self.tasks.get(name)

    def max_episode_steps(self, task: str, options: Any) -> int | None:
        """The task's own time limit; None where only the simulator knows."""
        found = self.task(task)
        return None if found is None else found.max_episode_steps

    def num_tasks(self, task: str) -> int:
        """How many tasks there are in a task: an episode plays that of its seed, modulo this number. Evaluations and
        demonstrations play each equally often. Initial states that are given count as tasks."""
        return 1

    def steps_per_s(self, task: str, options: Any) -> float | None:
        """Env steps in a second of the simulation, which datasets that are written say (`data.fps`); None: it has no
        clock."""
        return None

    def sentences(self, task: str) -> Sequence[str]:
        """What a policy that reads is told, of each task in a task; (): only the simulator knows."""
        return ()

    def one_hot(self, task: str, options: Any) -> Sequence[str]:
        """The tasks, in order, of the one-hot that states end in; (): there is none."""
        return ()

    def observed(self, task: str, options: Any) -> Observed | None:
        """What a policy will see; None where only the simulator knows."""
        found = self.task(task)
        return None if found is None else Observed(found.action_dim, found.state_dim, dict(found.cameras))

    def simulator_memory(self, options: Any, accelerator: str) -> tuple[int, int] | None:
        """`simulator_bytes` of the host on slots of `accelerator`, cuda or cpu."""
        return self.simulator_bytes

    def lacks_state(self, options: Any) -> Problem | None:
        """The option under which the state is not all there is to know, and why, for policies that see nothing else."""
        return None

    def lacks_expert(self, task: str, options: Any) -> str | None:
        """Why there are no demonstrations without a trained policy; None: there is an expert, or only the simulator
        knows."""
        return None

    def problems(self, config: Any) -> Iterator[Problem]:
        """All that is wrong with a run's config (a Config) for this environment."""
        yield from ()

    def probes(self) -> dict[str, Probe]:
        """What `rlinf-lite doctor` tries out, by what the report calls it."""
        wheel = f"rlinf_lite[{self.extra}]" if self.extra else "rlinf_lite"
        return {self.name: Probe("rlinf_lite.cli.probes:simulator", f"pip install --force-reinstall '{wheel}'")}


class PolicyCard(Card):
    """A policy's card. A Policy class carries it as its attribute `card`, or the card names the class."""

    policy: str = ""
    """Import path, `pkg.module:Class`, of the subclass of `rlinf_lite.models.Policy`."""
    reads_state: bool = False
    """The state is all that the policy sees."""
    probabilities: bool = False
    """Its likelihoods are probabilities, of action tokens; False: densities of continuous actions, or not known."""

    def recognises(self, directory: Path, config: Mapping[str, Any]) -> bool:
        """Whether a directory that `save_pretrained` has not written is a published checkpoint of this policy, whose
        config.json is `config`."""
        return config.get("model_type") == self.name

    def problems(self, config: Any, seen: Observed | None) -> Iterator[Problem]:
        """All that is wrong with a run's config (a Config) for this policy; `seen` is what the environment shows."""
        yield from ()

    def notes(self, directory: Path, model: Any, seen: Observed | None = None) -> Iterator[str]:
        """Lines on what a user of the policy in `directory` should know: what it leaves open, and what `model` (a run's
        section; None: there is none) makes of it. `seen` is what the environment shows; None: not known."""
        yield from ()


@dataclass(frozen=True)
class Probe:
    """One thing that `rlinf-lite doctor` tries out, in a process of its own."""

    function: str
    """Import path of what is called with the environment's name and returns what it found or measured; raising is
    failing."""
    fix: str
    """The command that mends it."""
    fixes: Mapping[str, str] = field(default_factory=dict)
    """Other commands, by what is then in the failure's text."""
    unless: str = ""
    """What fails because of it, where the rest works without: then a failure is a warning."""


def _is_card(part: Any) -> bool:
    return issubclass(part, Card) if isinstance(part, type) else isinstance(part, Card)
