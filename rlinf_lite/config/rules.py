"""What must hold between keys: every rule yields problems, and says which keys it reads.

A rule is left out where one of those keys is wrong, so that one mistake is not reported twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from rlinf_lite.cards import Problem

Kind = Literal["embodied", "sft", "reasoning"]
Rule = Callable[[Any, Any], Iterator[Problem]]
"""`rule(config, plan)`."""
SIMULATED: tuple[Kind, ...] = ("embodied", "sft")
REINFORCED: tuple[Kind, ...] = ("embodied", "reasoning")
ALL: tuple[Kind, ...] = ("embodied", "sft", "reasoning")

_RULES: list[tuple[tuple[str, ...], tuple[Kind, ...], Rule]] = []


def rule(*keys: str, kinds: tuple[Kind, ...] = ALL) -> Callable[[Rule], Rule]:
    """A rule that reads these keys or sections, of runs of these kinds (`runner.task_type`)."""

    def add(function: Rule) -> Rule:
        _RULES.append((keys, kinds, function))
        return function

    return add


def violations(config: Any, plan: Any, suspects: set[str]) -> Iterator[Problem]:
    """Every violated rule of a config's kind. `suspects` are keys whose values are not what their author wrote."""
    for keys, kinds, function in _RULES:
        if config.runner.task_type in kinds and not touches(keys, suspects):
            yield from function(config, plan)


def touches(keys: tuple[str, ...], suspects: set[str]) -> bool:
    """Whether a suspect is one of these keys, within or around it."""
    return any(f"{key}.".startswith(f"{bad}.") or f"{bad}.".startswith(f"{key}.") for key in keys for bad in suspects)


def quotient(value: int, divisor: int) -> str:
    """`30 / 4 = 7.5`."""
    return f"{value} / {divisor} = {value / divisor:.4g}"


def near_multiples(value: int, unit: int) -> str:
    """`28 or 32`: what a value that is no multiple could be."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else str(above)


def largest_divisor(value: int, at_most: int) -> int:
    return max(size for size in range(1, min(at_most, value) + 1) if value % size == 0)
