"""pydantic's findings in the words of a config's author."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlinf_lite.cards import Problem
from rlinf_lite.config.names import cards_of, schema_keys
from rlinf_lite.config.schema import Config, NodeGroup, PlacementSpec
from rlinf_lite.registry import nearest

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text (in quotes)",
    "list_type": "a list, such as [a, b]",
    "tuple_type": "a list, such as [a, b]",
    "dict_type": "a section of keys",
    "model_type": "a section of keys",
}
_NESTED: dict[str, type[BaseModel]] = {
    "cluster.node_groups": NodeGroup,
    "cluster.component_placement": PlacementSpec,
}


def explain_validation(
    error: ValidationError, content: dict[str, Any], schema: type[BaseModel] = Config
) -> tuple[list[Problem], set[str], dict[str, Any]]:
    """What is wrong, which keys cannot be judged because of it, and `content` without those values.

    What remains is valid, so that the checks between keys still run on the rest.
    """
    grouped: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        grouped.setdefault(_existing_part(details["loc"], content), []).append(details)
    grouped = {location: found for location, found in grouped.items() if not _is_noise(location, grouped)}
    problems, suspects, remaining = list[Problem](), set[str](), copy.deepcopy(content)
    known = schema_keys(schema, cards_of(content, schema))
    for location, found in grouped.items():
        key = _dotted(location)
        if found[0]["type"] == "extra_forbidden":
            meant, advice = _nearest_key(location, known)
            problems.append(Problem(key, f"there is no such key. {advice}"))
            suspects |= {meant} if meant else set()
        else:
            problems.append(Problem(key, _wrong_value(found)))
            suspects.add(key)
        _remove(remaining, location)
    return problems, suspects, remaining


def _existing_part(location: tuple[str | int, ...], content: Any) -> tuple[str | int, ...]:
    """`location` without what pydantic adds to it for members of unions."""
    kept: list[str | int] = []
    for part in location:
        if isinstance(content, dict | list) and _has(content, part):
            content = content[part]  # type: ignore[index]
            kept.append(part)
        elif not _is_union_member(part):
            break
    return tuple(kept) or location[:1]


def _has(content: dict[Any, Any] | list[Any], part: str | int) -> bool:
    return part in content if isinstance(content, dict) else isinstance(part, int) and part < len(content)


def _is_noise(location: tuple[str | int, ...], locations: Iterable[tuple[str | int, ...]]) -> bool:
    """A union's other members did not fit, which does not matter where one fits but for a key within."""
    return any(other[: len(location)] == location != other for other in locations)


def _is_union_member(part: str | int) -> bool:
    return part in ("str", "int", "PlacementSpec")


def _dotted(location: tuple[str | int, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _wrong_value(found: list[ErrorDetails]) -> str:
    details = found[0]
    value = f"is {details['input']!r}"
    if details["type"] == "missing":
        return f"a key is missing ({details['loc'][-1]}). Add it"
    if len(found) > 1:  # no member of a union fits
        wanted = " or ".join(dict.fromkeys(_EXPECTED.get(item["type"], item["msg"]) for item in found))
        return f"{value}. It must be {wanted}"
    if details["type"] in _EXPECTED:
        return f"{value}. It must be {_EXPECTED[details['type']]}"
    if details["type"] == "literal_error":
        return f"{value}. It must be one of {details['ctx']['expected'].replace(' or ', ', ')}"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input should ")
    return f"{value}. It {message if message.startswith('must') else f'must {message}'}"


def _nearest_key(location: tuple[str | int, ...], keys: list[str]) -> tuple[str | None, str]:
    """The key that an unknown one probably stands for, and the advice that says so."""
    *parents, name = (str(part) for part in location)
    section = _dotted(location[:-1])
    siblings = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]
    if not siblings:  # within a list or a dict of sections
        nested = _NESTED.get(".".join(parents[:2]))
        siblings = [] if nested is None else list(nested.model_fields)
    elsewhere = [key for key in keys if key.rpartition(".")[2] == name and key.rpartition(".")[0] != section]
    near = nearest(name, siblings, count=1, cutoff=0.75)
    if near:
        meant = f"{section}.{near[0]}" if section else near[0]
        return meant, f"Did you mean {meant}?"
    if elsewhere:
        return elsewhere[0], f"{name} belongs in {' or '.join(elsewhere)}"
    anywhere = nearest(name, {key.rpartition(".")[2] for key in keys}, count=1, cutoff=0.75)
    if anywhere:
        meant = next(key for key in keys if key.rpartition(".")[2] == anywhere[0])
        return meant, f"Did you mean {meant}?"
    return None, f"Known in {section or 'a config'}: {', '.join(siblings) or 'nothing'}"


def _remove(content: Any, location: tuple[str | int, ...]) -> None:
    """Delete the value at `location`, or the list or placement that cannot be valid without it."""
    *parents, last = location
    lists = [index for index, part in enumerate(location) if isinstance(part, int)]
    if lists:
        *parents, last = location[: lists[0]]
    for part in parents:
        if part not in content:
            return  # deleted already, together with its list
        content = content[part]
    content.pop(last, None)
