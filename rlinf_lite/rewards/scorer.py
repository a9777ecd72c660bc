"""Scores a batch of answers. A sample that goes wrong does not stop a run: it loses its reward, and is counted."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from rlinf_lite.registry import install_command
from rlinf_lite.rewards.isolated import CallFailedError, IsolatedFunction
from rlinf_lite.rewards.registry import RewardError, Rule, import_reward, rule_of
from rlinf_lite.scheduler.heartbeat import report_progress


@dataclass(frozen=True)
class RewardResult:
    """Scores float32 [B], 0 for samples that failed; how many did; and the traceback of the first of them."""

    scores: np.ndarray
    num_failed: int
    first_traceback: str | None
    num_cut: int = 0
    """Of a reward model: samples whose beginning it did not read, as they were too long."""


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
        """B of each, lists or arrays. A sample that raises, hangs, or gives no finite number scores 0 and is counted.

        Raises what `check_sources` does.
        """
        self.check_sources(set(data_sources))
        scores = np.zeros(len(solutions), dtype=np.float32)
        tracebacks = []
        rows = zip(solutions, ground_truths, data_sources, extra_infos, strict=True)
        for row, (solution, truth, source, extra_info) in enumerate(rows):
            report_progress()
            try:
                scores[row] = self._function(source)(solution, truth, dict(extra_info))
            except CallFailedError as error:
                tracebacks.append(str(error))
            except Exception:  # a rule of ours that fails on one sample must not end the run either
                tracebacks.append(traceback.format_exc())
        return RewardResult(scores, len(tracebacks), tracebacks[0] if tracebacks else None)

    def close(self) -> None:
        """End the processes; they end with this one too."""
        for function in self._isolated.values():
            function.close()

    def _function(self, data_source: str) -> Any:
        rule = self._own or rule_of(data_source)
        if rule.needs is not None and find_spec(rule.needs) is None:
            raise RewardError(
                f"the rule of data_source {data_source!r} needs {rule.needs}, which is not installed. "
                f"{install_command('math')}"
            )
        if rule.bounded:
            return import_reward(rule.path)
        if rule.path not in self._isolated:
            self._isolated[rule.path] = IsolatedFunction(rule.path, self.timeout_s)
        return self._isolated[rule.path]
