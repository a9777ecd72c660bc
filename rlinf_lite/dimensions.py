"""Names of the dimensions of states and actions, as environments, datasets and checkpoints give them, and the order of
columns that follows from them.

Names that only count (`motor_0`, `motor_1`, ...) say nothing about what is in a column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf_lite.cards import Observed, Problem

FILE = "dimension_names.json"
"""Beside a policy's weights: by `state` and `action`, the names of what it was trained on, where these have some."""
VECTORS = ("state", "action")
_COUNTED = re.compile(r"(.*?)(\d+)\D?")


def flat_names(given: Any, width: int) -> tuple[str, ...] | None:
    """`names` of a feature of `width` numbers in info.json: a list, lists by group ({"motors": [...]}), or numbers by
    name ({"x": 0, "y": 1}). Names that occur in several groups begin with their group's. None where these are not
    `width` names."""
    if isinstance(given, Mapping) and given and sorted(map(str, given.values())) == sorted(map(str, range(len(given)))):
        given = sorted(given, key=lambda name: int(given[name]))
    found = tuple(_leaves(given))
    if isinstance(given, Mapping) and len(set(found)) < len(found):  # a left arm and a right one with the same joints
        found = tuple(f"{group}.{name}" for group, names in given.items() for name in _leaves(names))
    return found if len(found) == width else None


def counted(names: Sequence[str]) -> bool:
    """Whether names are one word and the number of each, in order: `state_0`, `state_1`, ..."""
    found = [_COUNTED.fullmatch(name) for name in names]
    words, numbers = {x and x[1] for x in found}, [int(x[2]) if x else -1 for x in found]
    return None not in words and len(words) == 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def numbered_names(name: str, num_dims: int) -> list[str]:
    """What the dimensions of an environment that names none are called in the datasets that we write."""
    return [f"{name}_{i}" for i in range(num_dims)]


def order_of(wanted: Sequence[str] | None, found: Sequence[str] | None) -> tuple[int, ...] | None:
    """The columns of `found` in the order of `wanted`; None: as they are, or one side has no names that say anything.

    Raises:
        ValueError: where both have such names and they are not the same ones, or one occurs twice.
    """
    if wanted is None or found is None or list(wanted) == list(found):
        return None
    if set(wanted) == set(found) and len(set(wanted)) == len(wanted) == len(found):
        return tuple(list(found).index(name) for name in wanted)
    if counted(wanted) or counted(found):
        return None
    raise ValueError("these are not the same names, each once")


def names_in(directory: Path | None) -> dict[str, list[str]]:
    """The names in a policy's directory, by `state` and `action`; those that it does not say are absent."""
    file = None if directory is None else directory / FILE
    return dict(json.loads(file.read_text())) if file is not None and file.is_file() else {}


def write_names(directory: Path, names: Mapping[str, Sequence[str]]) -> None:
    if names:
        (directory / FILE).write_text(json.dumps({name: list(x) for name, x in names.items()}, indent=2) + "\n")


def own_names(shown: Any) -> dict[str, list[str]]:
    """The names that an environment gives, by `state` and `action`; `shown`: its Observed or EnvSpec."""
    found = {name: getattr(shown, f"{name}_names") for name in VECTORS}
    return {name: list(x) for name, x in found.items() if x is not None}


def policy_misfits(key: str, directory: Path | None, shown: Observed | Any) -> Iterator[Problem]:
    """Where a policy was trained on states or actions that have other names, or these in another order, than those of
    the environment. `key`: what names its directory."""
    there = own_names(shown)
    for name, trained in names_in(directory).items():
        if len(there.get(name, trained)) != len(trained):
            continue  # which is refused for itself
        try:
            order = order_of(there.get(name), trained)
        except ValueError:
            order = ()
        if order is not None:
            text = f"the policy's {name} is {', '.join(trained)}, and the environment's {', '.join(there[name])}"
            advice = f"Name a policy that was trained on these, or correct {FILE} beside it where they mean the same"
            yield Problem(key, f"{text}. {advice}")


def _leaves(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping | list | tuple):
        for one in given.values() if isinstance(given, Mapping) else given:
            yield from _leaves(one)
