"""Scores a batch of answers. A sample that fails loses its reward, and is counted; its batch goes on."""

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
    """How many samples were scored, how many of them failed, and of the first that did its row of the data, and why."""

    num_scored: int
    num_failed: int
    row: int
    why: str


@dataclass(frozen=True)
class RewardResult:
    """Scores float32 [B], 0 for samples that failed."""

    scores: np.ndarray
    failures: dict[int, str]
    """By sample, in order: why it has no score, for functions a traceback."""
    metrics: Sequence[dict[str, float]] = ()
    """By sample: other numbers that a function gave."""
    num_cut: int = 0
    """Of a reward model: samples whose beginning it did not read, as they were too long."""

    @property
    def num_failed(self) -> int:
        return len(self.failures)

    @property
    def first_traceback(self) -> str | None:
        return next(iter(self.failures.values()), None)

    def scoring(self, rows: Sequence[int] | np.ndarray) -> Scoring:
        """`rows`: of the data, by sample."""
        first, why = next(iter(self.failures.items()), (0, ""))
        return Scoring(len(self.scores), self.num_failed, int(rows[first]) if self.failures else -1, why)


class RewardScorer:
    """Scores by the rule of each row's `data_source`, or where `fn` is given, `pkg.module:function`, by that.

    A function other than the bounded built-in rules runs in a process of its own and is stopped after `timeout_s`
    seconds per sample, whatever it hangs in. Raises RewardError where `fn` cannot be imported.
    """

    def __init__(self, fn: str | None = None, timeout_s: float = 5.0) -> None:
        self.timeout_s = timeout_s
        self._own = None if fn is None else Rule(fn)
        self._isolated: dict[str, IsolatedFunction] = {}
        if fn is not None:
            self._function("")

    def check_sources(self, sources: Iterable[str]) -> None:
        """Get ready to score these. Raises UnknownSourceError for one without a rule; RewardError where the package of
        a rule is not installed, or a function cannot be imported."""
        for source in sources:
            self._function(source)

    def score_batch(
        self,
        solutions: Sequence[str],
        ground_truths: Sequence[str],
        data_sources: Sequence[str],
        extra_infos: Sequence[Mapping[str, Any]],
    ) -> RewardResult:
        """B of each, lists or arrays. What raises, hangs, or gives no finite score gets 0, and is among `failures`.

        Raises what `check_sources` does.
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
        """End the processes; they end with this one too."""
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
