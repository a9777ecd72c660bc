"""Registry of rules: which function scores the rows of a `data_source`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rlinf_lite.registry import MAIN, PartError, did_you_mean, import_reward_function

RewardFn = Callable[[str, str, dict[str, Any]], Any]
"""`score(solution, ground_truth, extra_info)`: a number, or a dict with the number `score`."""
Answer = tuple[float, dict[str, float]]
"""A score, and other numbers by name."""
F = TypeVar("F", bound=RewardFn)


class RewardError(PartError):
    """A reward function that cannot be imported, lacks a package, or fails at every response of a batch."""


class UnknownSourceError(RewardError):
    """There is no rule for a data_source."""


@dataclass(frozen=True)
class Rule:
    """A reward function, by its import path. A `bounded` one ends soon for every text, so that it needs no process of
    its own."""

    path: str
    bounded: bool = False
    needs: str | None = None  # a module that it imports, from the extra `math`


_GSM8K = Rule("rlinf_lite.rewards.rules:gsm8k", bounded=True)
_BOXED = Rule("rlinf_lite.rewards.rules:boxed", needs="math_verify")
_RULES = {"openai/gsm8k": _GSM8K, "arithmetic": _GSM8K, "MATH": _BOXED, "lighteval/MATH": _BOXED}


def register_reward(*data_sources: str) -> Callable[[F], F]:
    """Register a function `(solution, ground_truth, extra_info)` as the rule of these sources.

    It runs in its own process, under the scorer's time limit. Its module has to be imported in every process that
    scores rows. Raises RewardError where a source already has a rule, or where other processes cannot import the
    function.
    """

    def register(function: F) -> F:
        path = f"{function.__module__}:{function.__qualname__}"
        if function.__module__ == MAIN or "<" in path:
            raise RewardError(f"{path} cannot be imported by another process. Move it to the top level of a module")
        for source in data_sources:
            if _RULES.get(source, Rule(path)) != Rule(path):
                raise RewardError(
                    f"data_source {source!r} has a rule already ({_RULES[source].path}). Choose another name"
                )
            _RULES[source] = Rule(path)
        return function

    return register


def known_sources() -> list[str]:
    """Names of all data_sources that have a rule."""
    return sorted(_RULES)


def rule_of(data_source: str) -> Rule:
    """The rule of a data_source. Raises UnknownSourceError."""
    if data_source not in _RULES:
        asked = f"data_source {data_source!r}" if data_source else "rows without a data_source"
        raise UnknownSourceError(
            f"no rule scores {asked}. {did_you_mean(data_source, _RULES)} Correct it, or score all rows with one "
            "function: reward.fn: pkg.module:function"
        )
    return _RULES[data_source]


def import_reward(path: str) -> RewardFn:
    """The function at `pkg.module:function`. Raises RewardError where there is none, or where it takes other arguments,
    and PartImportError where its module raises."""
    found: RewardFn = import_reward_function(path, RewardError)
    return found
