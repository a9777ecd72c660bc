"""The shared part of asynchronous runs, whose rollouts go on while the actor trains (docs/async.md): admission of
steps, weight transfers, logs of waiting times, and recovery after failures."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from rlinf_lite.metrics import EvalSummary, Span, utilization
from rlinf_lite.runners.base import Runner
from rlinf_lite.scheduler import Handle


class AsyncRunner(Runner):
    """A mixin for asynchronous runners. In a subclass it comes before the synchronous runner, whose steps it
    extends."""

    _transfers: tuple[Handle, ...] = ()
    """Weight transfers to rollout workers. They are not waited for, but kept, so that any wait raises their errors."""
    _num_admitted = 0
    """Number of steps that the last admission started."""
    _played_until = 0.0
    """The time at which the rollouts of the last step were complete; 0: not known."""
    _last: tuple[int, float, Sequence[Span]] = (0, 0.0, ())
    """The last step: its number, its start time, and its spans."""

    def _admitted(self) -> list[Handle]:
        """The calls of all admitted steps."""
        raise NotImplementedError

    def _give_up(self) -> None:
        """Forget the admitted steps, whose workers are already stopping. They are admitted again later."""
        self._transfers, self._played_until = (), 0.0

    def _admissible(self, step: int, under_way: Container[int]) -> list[int]:
        """The steps whose rollouts may start now, where `step` is the next to train on; without those `under_way`."""
        most = range(step, min(step + self.cfg.runner.max_staleness + 1, self.total_steps))
        found = [admitted for admitted in most if admitted not in under_way]
        self._num_admitted = len(found)
        return found

    def update_rollout_weights(self) -> None:
        """Send the weights without waiting: generating rollout workers take them between two decisions, others at
        once."""
        held = 2 * (self.cfg.runner.max_staleness + 1)
        self._transfers = (*self._transfers, *self._transfer_weights())[-held:]

    def evaluate(self, videos: Path | None = None) -> EvalSummary:
        """As in `Runner`, after the rollouts of all admitted steps are complete; training uses these afterwards."""
        if admitted := self._admitted():
            with self.step_log.phase("eval"):
                self._wait(*admitted, what="rollouts to end before an evaluation")
        summary = super().evaluate(videos)  # type: ignore[safe-super]  # of the synchronous runner
        self._played_until = time.time()  # rollout workers did not wait for admission meanwhile
        return summary

    def _log_async(
        self,
        metrics: Mapping[str, float],
        played: Sequence[Span],
        spans: Sequence[Span],
        pair: tuple[str, str],
        in_order: bool = True,
    ) -> None:
        """Log the step, with the seconds that the trainer and the rollouts waited for each other.

        `played`: the spans of its rollouts; `spans`: all its spans. The time of its rollouts counts from the end of the
        rollouts before it, so it begins with the wait for admission. That wait is not logged if the rollouts were not
        played `in_order`, since other rollouts ran in between.
        """
        phase = self.step_log.interval("generate_rollouts")
        idle = utilization(spans, phase, phase).get("perf/actor_idle_frac", 1.0)
        waited_s = idle * (phase[1] - phase[0])
        metrics = {**metrics, "async/trainer_waited_s": waited_s, "async/admitted_steps": self._num_admitted}
        first, last = min(span.start for span in played), max(span.end for span in played)
        since = self._played_until or first
        self._played_until = max(last, self._played_until)
        if in_order:
            metrics["async/rollouts_waited_s"] = max(first - since, 0.0)
        _, _, before = self._last  # includes the actor's updates during these rollouts
        self._log_step(metrics, spans, pair, (since, last) if in_order else (last, last), before)

    def _show_timeline(self, step: int, spans: Sequence[Span]) -> None:
        """Write the timeline of the third step, or of the last but one, one step later, when the rollouts that ran
        during it are known."""
        started = self.step_log.began
        if step > self._first_step + 1 and step in (4, self.total_steps):
            shown, began, before = self._last
            within = [span for span in (*before, *spans) if began <= span.end and span.start <= started]
            self.step_log.write_timeline(shown, within)
        self._last = step, started, spans
