"""Scoring of batches of answers. A sample whose scoring fails gets 0 and is counted; the rest is scored."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from rlinf_lite.registry import install_command
from rlinf_lite.rewards.isolated import CallFailedError, IsolatedFunction
from rlinf_lite.rewards.registry import Answer, RewardError, Rule, import_reward, rule_of
from rlinf_lite.scheduler.heartbeat import report_progress


class Scoring(NamedTuple):
    """Numbers of scored and failed samples, and the row of data (-1: none) and the reason of the first failure."""

    num_scored: int
    num_failed: int
    row: int
    why: str


@dataclass(frozen=True)
class RewardResult:
    """Scores float32 [B], 0 for samples that failed."""

    scores: np.ndarray
    failures: dict[int, str]
    """Reasons of failures by sample, in order; a traceback if a function raised."""
    metrics: Sequence[dict[str, float]] = ()
    """Other numbers that a function returned, for each sample."""
    num_cut: int = 0
    """Number of samples that were too long for a reward model, which did not read their beginning."""

    @property
    def num_failed(self) -> int:
        return len(self.failures)

    def scoring(self, rows: Sequence[int] | np.ndarray) -> Scoring:
        """The counts of this result. `rows` [B]: the row of data of each sample."""
        first, why = next(iter(self.failures.items()), (0, ""))
        return Scoring(len(self.scores), self.num_failed, int(rows[first]) if self.failures else -1, why)


class RewardScorer:
    """Scores samples with the rule of their `data_source`, or all with `fn` (`pkg.module:function`), if it is given.

    A function runs in its own process, unless it is a bounded built-in rule, and is stopped after `timeout_s` seconds
    per sample, also in a loop in C. Raises RewardError where `fn` cannot be imported.
    """

    def __init__(self, fn: str | None = None, timeout_s: float = 5.0) -> None:
        self.timeout_s = timeout_s
        self._own = None if fn is None else Rule(fn)
        self._isolated: dict[str, IsolatedFunction] = {}
        if fn is not None:
            self._function("")

    def check_sources(self, sources: Iterable[str]) -> None:
        """Import the rules of these sources. Raises UnknownSourceError for a source without a rule, and RewardError
        where the package of a rule is not installed or a function cannot be imported."""
        for source in sources:
            self._function(source)

    def score_batch(
        self,
        solutions: Sequence[str],
        ground_truths: Sequence[str],
        data_sources: Sequence[str],
        extra_infos: Sequence[Mapping[str, Any]],
    ) -> RewardResult:
        """Score B samples, given as lists or arrays. A sample whose function raises, hangs, or returns no finite score
        gets 0 and an entry in `failures`.

        Raises what `check_sources` raises.
        """
        self.check_sources(set(data_sources))
        scores = np.zeros(len(solutions), dtype=np.float32)
        failures, metrics = dict[int, str](), [dict[str, float]() for _ in solutions]
        rows = zip(solutions, ground_truths, data_sources, extra_infos, strict=True)
        for row, (solution, truth, source, extra_info) in enumerate(rows):
            report_progress()
            try:
                scores[row], metrics[row] = self._function(source)(solution, truth, dict(extra_info))
            except CallFailedError as error:
                failures[row] = str(error)
            except Exception:  # a built-in rule that fails on one sample must not end the run
                failures[row] = traceback.format_exc()
        return RewardResult(scores, failures, metrics)

    def close(self) -> None:
        """End the child processes. (They also end when this process does.)"""
        for function in self._isolated.values():
            function.close()

    def _function(self, data_source: str) -> Callable[..., Answer]:
        rule = self._own or rule_of(data_source)
        if rule.needs is not None and find_spec(rule.needs) is None:
            raise RewardError(
                f"the rule of data_source {data_source!r} needs {rule.needs}, which is not installed. "
                f"{install_command('math')}"
            )
        if rule.bounded:
            function = import_reward(rule.path)
            return lambda *arguments: (float(function(*arguments)), {})
        if rule.path not in self._isolated:
            self._isolated[rule.path] = IsolatedFunction(rule.path, self.timeout_s)
        return self._isolated[rule.path]
