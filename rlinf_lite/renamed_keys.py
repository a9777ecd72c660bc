"""Configs, runs and checkpoints from before keys were renamed: one table, and one line that says what it did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

from rlinf_lite.registry import card_in

log = logging.getLogger(__name__)


class Renamed(NamedTuple):
    """A key or section that has moved, where the run's environment or policy is `part` or built on it ("": any)."""

    old: str
    new: str
    part: str = ""
    turned: Callable[[Any], Any] = lambda value: value
    """What stands under the new name in place of the old value."""


def _correction(cap: Any) -> Any:
    return {"kind": "none"} if cap is None else {"kind": "tis", "high": cap}


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
RENAMED_IN_REASONING = (Renamed("algorithm.importance_cap", "algorithm.correction", turned=_correction),)
"""Of language models' runs."""


def new_names(content: Mapping[str, Any]) -> dict[str, str | None]:
    """Every old key, with what it is called in this config now; None: it has no effect."""
    runner = content.get("runner")
    if isinstance(runner, Mapping) and runner.get("task_type") == "reasoning":
        return {old: new for old, new, _, _ in RENAMED_IN_REASONING}
    cards = {section: card_in(section, content) for section in ("env", "model")}
    found: dict[str, str | None] = {}
    for old, new, part, _ in RENAMED:
        section = old.partition(".")[0]
        if found.get(old) is None:
            fits = not part or isinstance(cards[section], type(card_in(section, {section: {"id": part}})))
            found[old] = new if fits else None
    return found


def new_name(key: str, names: Mapping[str, str | None]) -> str | None:
    """What a dotted key is called now, by `new_names`; None: it has no effect."""
    for old, new in names.items():
        if f"{key}.".startswith(f"{old}."):
            return None if new is None else new + key.removeprefix(old)
    return key


def new_value(key: str, value: Any) -> Any:
    """What a value given to a dotted old key is under its new name."""
    turned = {row.old: row.turned for row in (*RENAMED, *RENAMED_IN_REASONING)}.get(key)
    return value if turned is None else turned(value)


def with_new_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """A nested dict whose old keys have their new names; it says which, once in a process."""
    changed, names = deepcopy(dict(content)), new_names(content)
    said: dict[str, str | None] = {}
    for old, new in names.items():
        section, _, name = old.partition(".")
        if isinstance(changed.get(section), dict) and name in changed[section]:
            value = changed[section].pop(name)
            if value == {}:
                continue
            said[old] = new
            if new is not None:
                _merge(changed, new.split("."), new_value(old, value))
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


def _merge(section: Any, path: list[str], value: Any) -> None:
    """Set what is at `path`, a section key by key."""
    if not isinstance(section, dict):
        return  # what is there is no section, which validation says
    name, *rest = path
    if rest:
        _merge(section.setdefault(name, {}), rest, value)
    elif isinstance(value, Mapping) and value:
        for key, inner in value.items():
            _merge(section.setdefault(name, {}), [key], inner)
    else:
        section[name] = value
