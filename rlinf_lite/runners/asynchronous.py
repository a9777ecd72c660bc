"""What all runs share whose rollouts go on while the actor trains (docs/async.md): weights that are offered, who waited
for whom, and what is given up when workers fail."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from rlinf_lite.metrics import EvalSummary, Span, utilization
from rlinf_lite.runners.base import Runner
from rlinf_lite.scheduler import Handle


class AsyncRunner(Runner):
    """Goes before the synchronous runner, whose steps it has, among the bases of a subclass, which admits steps."""

    _transfers: tuple[Handle, ...] = ()
    """Weights on their way to rollout workers: not waited for, but kept, so that any wait raises their errors."""
    _num_admitted = 0
    """Steps that were admitted since the last weights."""
    _played_until = 0.0
    """When the last step that was waited for had been played; 0: not known."""
    _last: tuple[int, float, Sequence[Span]] = (0, 0.0, ())
    """The last step, when it began, and what was done for it."""

    def _admitted(self) -> list[Handle]:
        """The calls that play ahead."""
        raise NotImplementedError

    def _give_up(self) -> None:
        """Forget what plays ahead, whose workers are already stopping. It is admitted again."""
        self._transfers, self._played_until = (), 0.0

    def _admissible(self, step: int, under_way: Container[int]) -> list[int]:
        """The steps that may begin to play now that `step` is the next to be trained on."""
        most = range(step, min(step + self.cfg.runner.max_staleness + 1, self.total_steps))
        found = [admitted for admitted in most if admitted not in under_way]
        self._num_admitted = len(found)
        return found

    def update_rollout_weights(self) -> None:
        """Offer the weights: rollout workers that generate take them in between, others at once."""
        held = 2 * (self.cfg.runner.max_staleness + 1)
        self._transfers = (*self._transfers, *self._transfer_weights())[-held:]

    def evaluate(self, videos: Path | None = None) -> EvalSummary:
        """As in any run, once everything that was admitted is played; the trainer goes on with it afterwards."""
        if admitted := self._admitted():
            with self.step_log.phase("eval"):
                self._wait(*admitted, what="rollouts to end before an evaluation")
        summary = super().evaluate(videos)  # type: ignore[safe-super]  # of the synchronous runner
        self._played_until = time.time()  # no one waited for admission
        return summary

    def _log_async(
        self,
        metrics: Mapping[str, float],
        played: Sequence[Span],
        spans: Sequence[Span],
        pair: tuple[str, str],
        in_order: bool = True,
    ) -> None:
        """Log the step, with who waited for whom: `played` is what was done to play it, `spans` all that was done for
        it. Its rollouts were made from when those before it were done, waiting for admission at first. That is not
        logged if they were not played `in_order`, so that others were made in between."""
        phase = self.step_log.interval("generate_rollouts")
        idle = utilization(spans, phase, phase).get("perf/actor_idle_frac", 1.0)
        waited_s = idle * (phase[1] - phase[0])
        metrics = {**metrics, "async/trainer_waited_s": waited_s, "async/admitted_steps": self._num_admitted}
        first, last = min(span.start for span in played), max(span.end for span in played)
        since = self._played_until or first
        self._played_until = max(last, self._played_until)
        if in_order:
            metrics["async/rollouts_waited_s"] = max(first - since, 0.0)
        _, _, before = self._last  # the actor's updates meanwhile
        self._log_step(metrics, spans, pair, (since, last) if in_order else (last, last), before)

    def _show_timeline(self, step: int, spans: Sequence[Span]) -> None:
        """Keep the timeline of the third step, once what was played meanwhile is known, or of the last but one."""
        started = self.step_log.began
        if step > self._first_step + 1 and step in (4, self.total_steps):
            shown, began, before = self._last
            within = [span for span in (*before, *spans) if began <= span.end and span.start <= started]
            self.step_log.write_timeline(shown, within)
        self._last = step, started, spans
