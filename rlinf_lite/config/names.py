"""Names in a config (roles, and keys including those of options), and values that depend on several keys."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlinf_lite import registry
from rlinf_lite.cards import Card, EstimatorNeeds, LossNeeds
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config

COMPONENTS = ("actor", "rollout", "env")
"""The components of a run in a simulator."""
ROLES = ("actor", "rollout", "reference", "critic", "reward")
"""The roles that a reasoning run may have."""
SHARING = {
    "embodied": ("actor", "rollout"),
    "off_policy": (),
    "sft": (),
    "eval": ("actor", "rollout"),
    "reasoning": ROLES,
}
"""Roles that may share a process, by kind of run. Environments may not: their processes do not load torch."""

MAX_FILE_NAME = 255
"""Most bytes of a file name on Linux file systems."""

Cards = Mapping[str, Sequence[Card]]
"""Cards by the key of the section that they describe."""


def cards_of(content: Mapping[str, Any], schema: type[BaseModel] = Config) -> Cards:
    """The cards of a config's environment and policy (or language model). Unknown parts have none."""
    if issubclass(schema, ReasoningConfig):
        return {"model": [registry.language_card()]}
    found = {f"{section}.options": registry.card_in(section, content) for section in ("env", "model")}
    return {key: [card] for key, card in found.items() if card is not None}


def built_in_cards(schema: type[BaseModel] = Config) -> Cards:
    """The cards of all parts that come with rlinf_lite."""
    if issubclass(schema, ReasoningConfig):
        return {"model": [registry.language_card()]}
    return {
        "env.options": [registry.env_card(name) for name in registry.ENVIRONMENTS.names()],
        "model.options": [registry.policy_card(name) for name in registry.POLICIES.names()],
    }


def walk(
    model: type[BaseModel], cards: Cards, prefix: str = "", part: str = ""
) -> Iterator[tuple[str, FieldInfo, str]]:
    """All keys and sections, each section before its keys, as (dotted name, field, name of the part that an option
    belongs to, or ""). Keys inside lists are left out."""
    for name, field in model.model_fields.items():
        key, annotation = prefix + name, field.annotation
        yield key, field, part
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from walk(annotation, cards, f"{key}.", part)
        for card in cards.get(key, ()):
            if card.Options is not None:
                yield from walk(card.Options, cards, f"{key}.", card.name)


def schema_keys(schema: type[BaseModel] = Config, cards: Cards | None = None) -> list[str]:
    """The dotted names of all keys and sections; `cards=None`: with the options of all built-in parts."""
    return [key for key, _, _ in walk(schema, built_in_cards(schema) if cards is None else cards)]


def touches(keys: tuple[str, ...], suspects: Set[str]) -> bool:
    """Whether a suspect is one of these keys, or inside one of them, or a section that contains one."""
    return any(f"{key}.".startswith(f"{bad}.") or f"{bad}.".startswith(f"{key}.") for key in keys for bad in suspects)


def needs_of(config: Any) -> EstimatorNeeds:
    """The needs of a run's estimator; those of the default one if the name is unknown."""
    try:
        return registry.estimator_needs(config.algorithm.adv_type)
    except registry.PartError:  # reported by its own rule
        return registry.estimator_needs(registry.ESTIMATORS.default)


def loss_needs_of(config: Any) -> LossNeeds:
    """The needs of a run's loss; none if the name is unknown."""
    try:
        return registry.loss_needs(config.algorithm.loss_type)
    except registry.PartError:  # reported by its own rule
        return LossNeeds()


def reads_demonstrations(config: Any) -> bool:
    """Whether a run collects or reads demonstrations."""
    kind = config.runner.task_type
    return bool(kind == "sft" or (kind == "off_policy" and config.replay.shares.get("demonstrations", 0.0) > 0))


def builds_training_envs(config: Any) -> bool:
    """Whether a run builds the environments of training: if it plays in them, or evaluates in none."""
    kind, data = config.runner.task_type, config.data
    plays = kind != "sft" or data.source != "folder" or data.rounds.rounds > 0
    return kind != "eval" and (plays or config.runner.val_check_interval <= 0)


def max_staleness(config: Any) -> int:
    """The largest number of versions by which the acting weights may be older than the training weights."""
    return config.runner.max_staleness if config.runner.mode == "async" else 0


def compared_staleness(config: Any) -> int:
    """`max_staleness`, where log-probabilities are compared with those of acting; 0 where nothing reads them."""
    return 0 if config.runner.task_type == "off_policy" else max_staleness(config)


def recomputed_logprobs(config: Any) -> tuple[bool, str]:
    """Whether the actor recomputes the log-probabilities of a step's actions before its updates, and why."""
    asked, correction = config.algorithm.recompute_logprobs, config.algorithm.correction
    if asked != "auto":
        return asked, f"algorithm.recompute_logprobs is {str(asked).lower()}"
    if correction.kind != "none":
        if correction.proximal == "interpolate":
            return False, "algorithm.correction.proximal is interpolate"
        return True, "algorithm.correction compares them with those of acting"
    if max_staleness(config):
        return True, "older weights act, and metrics say how far the policy has moved since"
    if config.runner.task_type == "reasoning":
        return True, "token by token and as a whole, responses round differently"
    if config.actor.precision != "fp32":
        return True, f"in {config.actor.precision} acting and training round differently"
    if config.rollout.dtype == "bf16":
        return True, "rollout.dtype is bf16, and acting and training round differently"
    return False, "in fp32 the weights that acted give the same numbers again"


def coarsest_precision(config: Any) -> str:
    """bf16 if acting or training computes in it, else fp32."""
    return "bf16" if "bf16" in (config.actor.precision, config.rollout.dtype) else "fp32"


def rollout_dtype(config: Any, device: str) -> str:
    """The data type of a rollout worker's own parameters on this kind of device: fp32 or bf16."""
    usual = "fp32" if device == "cpu" else config.actor.precision
    return str(config.rollout.dtype or usual)


def roles_of(config: ReasoningConfig) -> list[str]:
    """The roles of a language run."""
    roles = ["actor", "rollout", "reward"]
    if config.algorithm.kl.place != "none" or loss_needs_of(config).teacher:
        roles.append("reference")
    if needs_of(config).values:
        roles.append("critic")
    return roles


def names_in_fuse(config: Any) -> list[str]:
    return [name.strip() for name in (config.cluster.fuse or "").split(",") if name.strip()]


def fused_roles(config: Any) -> list[str]:
    """The names in `cluster.fuse`, without roles that this run does not have."""
    lacking = set(ROLES) - set(roles_of(config)) if isinstance(config, ReasoningConfig) else set()
    return [name for name in names_in_fuse(config) if name not in lacking]


def as_file_name(text: str, max_bytes: int) -> str:
    """`text` as a part of a file name: letters and digits of any script and `.+-_` stay, other characters become `_`;
    may be ""."""
    plain = re.sub(r"[^\w.+-]+", "_", unicodedata.normalize("NFC", text)).lstrip(".-")
    return plain.encode()[:max_bytes].decode(errors="ignore")
