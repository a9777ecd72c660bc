"""Configs, runs and checkpoints from before keys were renamed: one table, and one line that says what it did."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from rlinf_lite.cards import Card
from rlinf_lite.registry import ENVIRONMENTS, POLICIES, PartError, env_card, policy_card

log = logging.getLogger(__name__)


class Renamed(NamedTuple):
    """A key or section that has moved, where the run's environment or policy is `part` or built on it ("": any)."""

    old: str
    new: str
    part: str = ""


_OF_OPENVLA = (
    *("size", "parallel_decoding", "append_stop", "unnorm_key", "norm_type", "center_crop", "cameras", "use_proprio"),
    *("max_prompt_length", "attn_implementation", "gradient_checkpointing", "compile", "sft_label_sigma", "lora"),
)
RENAMED = (
    Renamed("env.maniskill", "env.options", "maniskill"),
    Renamed("env.tabletop", "env.options", "tabletop"),
    Renamed("env.kwargs", "env.options.kwargs", "maniskill"),
    Renamed("env.kwargs", "env.options"),
    Renamed("model.mlp", "model.options", "mlp_gaussian"),
    *(Renamed(f"model.{name}", f"model.options.{name}", "openvla") for name in _OF_OPENVLA),
    Renamed("model.kwargs", "model.options"),
)
"""Of runs in simulators. The first row that fits counts; a key of another part's had no effect, and is left out."""


def new_names(content: Mapping[str, Any]) -> dict[str, str | None]:
    """Every old key, with what it is called in this config now; None: it has no effect."""
    runner = content.get("runner")
    if isinstance(runner, Mapping) and runner.get("task_type") == "reasoning":
        return {}
    kinds = {section: card_kind(section, content) for section in ("env", "model")}
    found: dict[str, str | None] = {}
    for old, new, part in RENAMED:
        section = old.partition(".")[0]
        if found.get(old) is None:
            fits = not part or issubclass(kinds[section], card_kind(section, {section: {"id": part}}))
            found[old] = new if fits else None
    return found


def card_kind(section: str, content: Mapping[str, Any]) -> type[Card]:
    """The class of the card that the part of this section, `env` or `model`, has; Card where there is no such part."""
    part = content.get(section)
    registry, card_of = (ENVIRONMENTS, env_card) if section == "env" else (POLICIES, policy_card)
    try:
        return type(card_of(part.get("id", registry.default) if isinstance(part, Mapping) else registry.default))
    except (PartError, TypeError):
        return Card  # a check says so


def new_name(key: str, names: Mapping[str, str | None]) -> str | None:
    """What a dotted key is called now, by `new_names`; None: it has no effect."""
    for old, new in names.items():
        if f"{key}.".startswith(f"{old}."):
            return None if new is None else new + key.removeprefix(old)
    return key


def with_new_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """A nested dict whose old keys have their new names; it says which, once in a process."""
    changed, names = _copied(content), new_names(content)
    said: dict[str, str | None] = {}
    for old, new in names.items():
        section, _, name = old.partition(".")
        if isinstance(changed.get(section), dict) and name in changed[section]:
            value = changed[section].pop(name)
            if value != {}:
                said[old] = new
            if new is not None and value != {}:
                _merge(changed, new.split("."), value)
    runner = changed.get("runner")
    if isinstance(runner, dict) and isinstance(runner.get("allow_changes"), list):
        allowed = [new_name(key, names) if isinstance(key, str) else key for key in runner["allow_changes"]]
        runner["allow_changes"] = [key for key in allowed if key is not None]
    say_renamed(said)
    return changed


def say_renamed(names: Mapping[str, str | None]) -> None:
    """One line for the user about keys with new names, the first time that it is about these."""
    moved = ", ".join(f"{old} -> {new}" for old, new in names.items() if new is not None)
    without = ", ".join(old for old, new in names.items() if new is None)
    parts = [f"keys have new names: {moved}"] if moved else []
    parts += [f"keys of other parts, without effect here, are left out: {without}"] if without else []
    if parts:
        _say("; ".join(parts))


@lru_cache
def _say(line: str) -> None:
    log.warning(line)


def _copied(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in content.items()}


def _merge(target: dict[str, Any], path: list[str], value: Any) -> None:
    for key, inner in _leaves(path, value):
        section = target
        for part in key[:-1]:
            below = section.setdefault(part, {})
            if not isinstance(below, dict):
                return  # what is there is no section, which validation says
            section = below
        section[key[-1]] = inner


def _leaves(path: list[str], value: Any) -> Iterator[tuple[list[str], Any]]:
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves([*path, key], inner)
