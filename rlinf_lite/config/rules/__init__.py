"""The rules between the keys of a config, one module per subject.

A rule is a function with the decorator `rule` that yields a Problem for each mistake. `checks.py` imports the subjects
and runs the rules. A rule is skipped if a key that it reads is already known to be wrong, so that each mistake is
reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from rlinf_lite.cards import Problem

Kind = Literal["embodied", "off_policy", "sft", "eval", "reasoning"]
SIMULATED: tuple[Kind, ...] = ("embodied", "off_policy", "sft", "eval")
TRAINED: tuple[Kind, ...] = ("embodied", "off_policy", "sft")
"""The kinds of runs in simulators that train."""
PLAYED: tuple[Kind, ...] = ("embodied", "off_policy")
"""The kinds of runs in simulators that learn from what they play."""
DEMONSTRATED: tuple[Kind, ...] = ("off_policy", "sft")
"""The kinds of runs that may read demonstrations."""
REINFORCED: tuple[Kind, ...] = ("embodied", "reasoning")
ALL: tuple[Kind, ...] = ("embodied", "off_policy", "sft", "eval", "reasoning")

Rule = Callable[[Any, Any], Iterator[Problem]]
"""A rule, called as `rule(config, plan)`."""
RULES: list[tuple[tuple[str, ...], tuple[Kind, ...], Rule]] = []
"""All rules, as (keys that the rule reads, kinds of runs that it is for, rule)."""


def rule(*keys: str, kinds: tuple[Kind, ...] = ALL) -> Callable[[Rule], Rule]:
    """Decorator of a rule that reads these keys or sections, for these kinds of runs (`runner.task_type`)."""

    def add(function: Rule) -> Rule:
        RULES.append((keys, kinds, function))
        return function

    return add


def quotient(value: int, divisor: int) -> str:
    """A text such as `30 / 4 = 7.5`."""
    return f"{value} / {divisor} = {value / divisor:.4g}"


def near_multiples(value: int, unit: int) -> str:
    """A text such as `28 or 32`: the multiples of `unit` next to a value that is not one."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else str(above)


def largest_divisor(value: int, at_most: int) -> int:
    """The largest divisor of `value` that is at most `at_most`."""
    return max(size for size in range(1, min(at_most, value) + 1) if value % size == 0)
