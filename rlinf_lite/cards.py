"""Cards: descriptions of parts (environments, policies, ...) that can be read without loading the parts. A card has a
part's options and tasks, what it needs, and checks of a config.

Cards are read while a config is loaded or checked, a run is previewed, or docs are written. So the module of a card
imports neither torch nor ray nor a simulator, except inside functions. Cards of rlinf_lite and of users are found in
the same way (`registry.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _refuse_bool(value: Any) -> Any:
    """The value, unless it is a bool, which pydantic would read as 0 or 1. Raises ValueError."""
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
    """A config section. Unknown keys are refused, and values cannot be changed after loading. The text under a key is
    its help."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def __setattr__(self, name: str, value: Any) -> None:
        call = f'load_config(name, ["SECTION.{name}={value}"])'
        raise ValueError(f"{name} cannot be changed: values of a config are frozen. Load it again: {call}")


@dataclass(frozen=True)
class Problem:
    """A problem of a config. `text` says what is wrong (the value, the arithmetic), then how to fix it."""

    key: str
    text: str
    of_machine: bool = False
    """Whether this machine lacks something, so that the config may be right on another one."""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


NO_STATE = "is null, and the policy reads the state. Name the dataset's feature, or a policy that reads none"
"""Text of the problem with `data.keys.state` if a policy reads a state that a dataset's config leaves out."""


class ProblemError(ValueError):
    """A Problem as an exception, for code that cannot yield it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


@dataclass(frozen=True)
class Task:
    """Sizes of a task that are known before its simulator starts."""

    max_episode_steps: int
    state_dim: int
    """Size of a state observation; 0: none."""
    action_dim: int
    own_state_dim: int = 0
    """Size of the state that comes with images: what the robot senses of itself."""
    cameras: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Height and width of images by camera."""


@dataclass(frozen=True)
class Suite:
    """Settings of published evaluations, for `rlinf-lite eval --suite`. An evaluation with all these settings names the
    suite in its protocol."""

    about: str
    settings: Mapping[str, Any]
    """Values by config key."""


@dataclass(frozen=True)
class Observed:
    """Observations and actions of an environment, as a policy sees them."""

    action_dim: int
    state_dim: int
    """Size of the state; 0: no state."""
    cameras: dict[str, tuple[int, int]]
    """Height and width by camera."""
    has_instruction: bool = True
    """False: the environment never gives an instruction."""
    state_names: Sequence[str] | None = None
    """The simulator's names of the state's dimensions; None: it has none, or they are known only to the simulator."""
    action_names: Sequence[str] | None = None
    """The same for the dimensions of actions."""


@dataclass(frozen=True)
class EstimatorNeeds:
    """Needs of an advantage estimator, declared when it is registered; `True`: it needs that."""

    values: bool = False
    """Values of a critic, which is then trained."""
    groups: bool = False
    """Groups of episodes from the same initial state, to compare with each other."""
    whole_episodes: bool = False
    """Episodes that are not cut."""
    greedy: bool = False
    """The score of a greedy answer to the same prompt."""
    teacher: bool = False
    """A loss that learns from a teacher, because these advantages are 0."""


@dataclass(frozen=True)
class LossNeeds:
    """Needs of a policy loss, declared when it is registered; `True`: it needs that."""

    probabilities: bool = False
    """Likelihoods that are probabilities, as for tokens. (Densities of continuous actions may be above 1.)"""
    behaviour: bool = False
    """The log-probabilities of the policy that acted. The loss uses ratios to these, and so corrects by itself for an
    older version or another engine; `algorithm.correction` is refused."""
    clips_below: bool = False
    """`algorithm.clip_ratio_low` below 1. A larger one has no effect: a ratio is never below 0, and a probability
    cannot fall by more than 1."""
    unread: tuple[str, ...] = ()
    """Keys of `algorithm` that other losses read but this one does not; setting one is a mistake. With `adv_type` among
    them it reads no advantages."""
    teacher: bool = False
    """The log-probabilities of a teacher (`teacher.model_dir`)."""


@dataclass(frozen=True)
class OffPolicyNeeds:
    """Needs of off-policy losses, declared when they are registered."""

    imitation: bool = False
    """Whether they need the policy's imitation loss on the batch (`Policy.sft_loss`)."""
    unread: tuple[str, ...] = ()
    """Keys of `off_policy` that other losses read but these do not; setting one is a mistake."""


@dataclass(frozen=True)
class StepRewardNeeds:
    """Needs of a reward function of observations, declared when it is registered; `True`: it needs that."""

    classifier: bool = False
    """A success classifier in `env.train.reward.model_dir`."""


@dataclass(frozen=True)
class StrategyNeeds:
    """Needs of a training strategy, declared when it is registered; `True`: it needs that."""

    ranks_per_model: bool = False
    """The argument `actor.tensor_model_parallel_size` of its class: the number of ranks that compute the layers of a
    language model together."""
    fsdp_size: bool = False
    """The argument `actor.fsdp_size` of its class: the number of ranks that divide the model; None: all."""
    copies: bool = False
    """Nothing of the model's: every rank has the whole of it."""


class Card:
    """Base of the cards of environments and policies. A subclass sets attributes that differ from these defaults."""

    Options: type[Section] | None = None
    """Schema of the part's own settings, `env.options` or `model.options`; None: any names and values, unchecked."""
    free_options: tuple[str, ...] = ()
    """Dotted names of options that may change when a run is continued or measured. Demonstrations do not depend on
    them."""
    package: str | None = None
    """A module that has to be installed."""
    extra: str | None = None
    """The extra of rlinf_lite that installs it."""

    def __init__(self, name: str = "", part: Any = None) -> None:
        """`name`: the name of the part in configs. `part`: the object of that name, if it is not a card."""
        self.name, self.part = name, part

    @classmethod
    def of(cls, part: Any, name: str) -> Self:
        """The card of a part: the part itself if it is a card, its attribute `card`, or an empty card. Raises TypeError
        for an attribute of another type."""
        carried = part if _is_card(part) else getattr(part, "card", cls)
        kind = carried if isinstance(carried, type) else type(carried)
        if not issubclass(kind, cls):
            raise TypeError(f"the attribute card of {name} is {carried!r}, which is no {cls.__name__}")
        return kind(name, None if _is_card(part) else part)

    def options(self, given: Any) -> Any:
        """A config's section as Options. Raises ValueError (pydantic's, key by key)."""
        if self.Options is not None:
            return self.Options.model_validate(given)
        if isinstance(given, Mapping):
            return dict(given)
        raise ValueError("must be a section of keys")


class EnvCard(Card):
    """An environment's card. For a `make_env` without a card, nothing is known before the environment is built."""

    simulator: str = ""
    """Import path, `pkg.module:attribute`, of the function or class that makes the environments; it is called like a
    `make_env`. A card whose module loads nothing heavy may define `make` instead."""
    tasks: Mapping[str, Task] = {}
    """Tasks by name; the first is the default."""
    has_other_tasks: bool = False
    """Whether there are tasks that `tasks` does not list."""
    simulator_bytes: tuple[int, int] | None = None
    """Bytes of the simulator in a process, and of each environment without its observations; None: not known."""
    suites: Mapping[str, Suite] = {}
    """Published evaluations, by name."""
    task_groups: Mapping[str, Sequence[str]] = {}
    """Sets of tasks, by name, whose success evaluations also report."""
    initial_states: str = "balanced_seed(seed, episode, tasks): the same ones at every evaluation"
    """Description of the initial states of evaluations, for their protocol."""
    probe_options: Mapping[str, Any] = {}
    """Options with which `rlinf-lite doctor` tries the first task."""

    def make(self, num_envs: int, cfg: Any, split: Literal["train", "eval"]) -> Any:
        """Build `num_envs` environments of `cfg` (an EnvConfig): a VecEnv, a Simulator, a gymnasium.vector.VectorEnv,
        or one gymnasium.Env; in the last case it is called once per row. `part` is the object that `simulator`
        names."""
        takes_split = "split" in inspect.signature(self.part).parameters
        return self.part(num_envs, cfg, split) if takes_split else self.part(num_envs, cfg)

    def task(self, name: str) -> Task | None:
        """The sizes of a task; None if only the simulator knows them."""
        return self.tasks.get(name)

    def max_episode_steps(self, task: str, options: Any) -> int | None:
        """The task's own time limit; None if only the simulator knows it."""
        found = self.task(task)
        return None if found is None else found.max_episode_steps

    def num_tasks(self, task: str) -> int:
        """Number of single tasks in `task`. The seed of an episode, modulo this number, selects its task. Evaluations
        and demonstrations play each equally often. Published initial states count as separate tasks."""
        return 1

    def num_scenes(self, task: str) -> int:
        """Number of simulations that are built for `task`, where each takes seconds: the seed of an episode, modulo
        this number, selects one. A divisor of `num_tasks`. 1: a row is built once."""
        return 1

    def steps_per_s(self, task: str, options: Any) -> float | None:
        """Env steps per second of simulated time, for written datasets (default of `data.fps`); None: it has no
        clock."""
        return None

    def sentences(self, task: str) -> Sequence[str]:
        """The instruction of each single task in `task`; (): only the simulator knows them."""
        return ()

    def one_hot(self, task: str, options: Any) -> Sequence[str]:
        """The tasks, in order, of the one-hot at the end of states; (): there is none."""
        return ()

    def observed(self, task: str, options: Any) -> Observed | None:
        """The observations and actions of a task; None if only the simulator knows them."""
        found = self.task(task)
        return None if found is None else Observed(found.action_dim, found.state_dim, dict(found.cameras))

    def simulator_memory(self, options: Any, accelerator: str) -> tuple[int, int] | None:
        """Host memory, as in `simulator_bytes`, on slots of `accelerator`, cuda or cpu."""
        return self.simulator_bytes

    def lacks_state(self, options: Any) -> Problem | None:
        """A problem for policies that see only the state, if it does not hold all that the task needs; else None."""
        return None

    def lacks_expert(self, task: str, options: Any) -> str | None:
        """The reason why there is no scripted expert; None: there is one, or only the simulator knows."""
        return None

    def problems(self, config: Any) -> Iterator[Problem]:
        """Problems of a run's config (a Config) with this environment."""
        yield from ()

    def probes(self) -> dict[str, Probe]:
        """The checks of `rlinf-lite doctor`, by their name in its report."""
        wheel = f"rlinf_lite[{self.extra}]" if self.extra else "rlinf_lite"
        return {self.name: Probe("rlinf_lite.cli.probes:simulator", f"pip install --force-reinstall '{wheel}'")}


class PolicyCard(Card):
    """A policy's card. A Policy class has it as its attribute `card`, or the card names the class."""

    policy: str = ""
    """Import path, `pkg.module:Class`, of the subclass of `rlinf_lite.models.Policy`."""
    reads_state: bool = False
    """Whether the policy sees only the state."""
    probabilities: bool = False
    """Whether its likelihoods are probabilities of action tokens; False: densities of continuous actions, or
    unknown."""

    off_policy: bool = False
    """Whether off-policy learning can train it: it has `sample_with_logprob`."""
    reads_condition: bool = False
    """Whether RECAP can train it: its prompts can have a condition (`models.conditions`), with which it acts."""

    def recognises(self, directory: Path, config: Mapping[str, Any]) -> bool:
        """Whether a directory that `save_pretrained` has not written is a published checkpoint of this policy; `config`
        is its config.json."""
        return config.get("model_type") == self.name

    def problems(self, config: Any, seen: Observed | None) -> Iterator[Problem]:
        """Problems of a run's config (a Config) with this policy; `seen` are the environment's observations and
        actions."""
        yield from ()

    def notes(self, directory: Path, model: Any, seen: Observed | None = None) -> Iterator[str]:
        """Lines for users of the policy in `directory`: on settings that its files leave open, and on those that
        `model` (the section of a run; None: no run) changes. `seen` are the environment's observations; None: not
        known."""
        yield from ()


@dataclass(frozen=True)
class Probe:
    """A check of `rlinf-lite doctor`, which runs in its own process."""

    function: str
    """Import path of a function that is called with the environment's name. It returns text on what it found or
    measured, and raises if the check fails."""
    fix: str
    """The command that fixes a failure."""
    fixes: Mapping[str, str] = field(default_factory=dict)
    """Other commands, by a part of the failure's text."""
    unless: str = ""
    """The feature that does not work after a failure, if all others do; a failure is then only a warning."""


def _is_card(part: Any) -> bool:
    return issubclass(part, Card) if isinstance(part, type) else isinstance(part, Card)
