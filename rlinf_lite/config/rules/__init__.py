"""Rules about what must hold between the keys of a config, a module for each subject.

A rule is a function with the decorator `rule`, which yields a Problem for each mistake that it finds. `checks.py`
imports the subjects and runs the rules. A rule is left out where a key that it reads is wrong by itself, so that one
mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from rlinf_lite.cards import Problem

Kind = Literal["embodied", "sft", "eval", "reasoning"]
SIMULATED: tuple[Kind, ...] = ("embodied", "sft", "eval")
TRAINED: tuple[Kind, ...] = ("embodied", "sft")
"""Runs in simulators that have sizes of training."""
REINFORCED: tuple[Kind, ...] = ("embodied", "reasoning")
ALL: tuple[Kind, ...] = ("embodied", "sft", "eval", "reasoning")

Rule = Callable[[Any, Any], Iterator[Problem]]
"""`rule(config, plan)`."""
RULES: list[tuple[tuple[str, ...], tuple[Kind, ...], Rule]] = []
"""The keys that a rule reads, the kinds of runs that it is for, and the rule."""


def rule(*keys: str, kinds: tuple[Kind, ...] = ALL) -> Callable[[Rule], Rule]:
    """A rule that reads these keys or sections, for runs of these kinds (`runner.task_type`)."""

    def add(function: Rule) -> Rule:
        RULES.append((keys, kinds, function))
        return function

    return add


def quotient(value: int, divisor: int) -> str:
    """`30 / 4 = 7.5`."""
    return f"{value} / {divisor} = {value / divisor:.4g}"


def near_multiples(value: int, unit: int) -> str:
    """`28 or 32`: the multiples of `unit` next to a value that is none."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else str(above)


def largest_divisor(value: int, at_most: int) -> int:
    """The largest divisor of `value` that is not above `at_most`."""
    return max(size for size in range(1, min(at_most, value) + 1) if value % size == 0)
