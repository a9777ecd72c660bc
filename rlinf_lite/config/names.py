"""Names that a config has: its components, and its keys, those of options among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlinf_lite.cards import Card, EstimatorNeeds
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config
from rlinf_lite.registry import (
    ENVIRONMENTS,
    ESTIMATORS,
    POLICIES,
    PartError,
    env_card,
    estimator_needs,
    language_card,
    policy_card,
)

COMPONENTS = ("actor", "rollout", "env")
"""Of an embodied run."""
ROLES = ("actor", "rollout", "reference", "critic", "reward")
"""Of a reasoning run."""

Cards = Mapping[str, Sequence[Card]]
"""By the key of a section that a card describes, the cards that do."""


def cards_of(content: Mapping[str, Any], schema: type[BaseModel] = Config) -> Cards:
    """The cards that the parts of a config have, as far as there are such parts."""
    if issubclass(schema, ReasoningConfig):
        return {"model": [language_card()]}
    found: dict[str, list[Card]] = {}
    for section, registry, card_of in (("env", ENVIRONMENTS, env_card), ("model", POLICIES, policy_card)):
        part = content.get(section)
        try:
            name = part.get("id", registry.default) if isinstance(part, Mapping) else registry.default
            found[f"{section}.options"] = [card_of(name)]
        except (PartError, TypeError):
            continue  # a check says so
    return found


def built_in_cards(schema: type[BaseModel] = Config) -> Cards:
    """Those of all parts that come with rlinf_lite."""
    if issubclass(schema, ReasoningConfig):
        return {"model": [language_card()]}
    return {
        "env.options": [env_card(name) for name in ENVIRONMENTS.names()],
        "model.options": [policy_card(name) for name in POLICIES.names()],
    }


def walk(model: type[BaseModel], cards: Cards, prefix: str = "", of: str = "") -> Iterator[tuple[str, FieldInfo, str]]:
    """Dotted names of all keys and sections, each section before its keys, with the part that a key belongs to, or "".
    Those within lists are not among them."""
    for name, field in model.model_fields.items():
        key, annotation = prefix + name, field.annotation
        yield key, field, of
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from walk(annotation, cards, f"{key}.", of)
        for card in cards.get(key, ()):
            if card.Options is not None:
                yield from walk(card.Options, cards, f"{key}.", card.name)


def schema_keys(schema: type[BaseModel] = Config, cards: Cards | None = None) -> list[str]:
    """Dotted names of all keys and sections; without `cards` with the options of all built-in parts."""
    return [key for key, _, _ in walk(schema, built_in_cards(schema) if cards is None else cards)]


def needs_of(config: Any) -> EstimatorNeeds:
    """What the estimator of a run needs; what the usual one does where there is no such estimator."""
    try:
        return estimator_needs(config.algorithm.adv_type)
    except PartError:  # said by its own rule
        return estimator_needs(ESTIMATORS.default)
