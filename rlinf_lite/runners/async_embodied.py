"""The embodied loop with rollouts and training at the same time (docs/async.md). Step n, with S = runner.max_staleness:

weights of version n to the rollout workers             # taken between two decisions of whatever they play
env.interact(k) || rollout.generate(k), k <= n + S      # those that do not play yet; workers queue them
wait until step n is played                             # all that the trainer waits for
actor.recv_rollout_batch(n), advantages, run_training   # meanwhile n + 1 .. n + S are played

Step n was admitted at version n - S or later, so what it is trained on is at most S versions old: admission is paced,
and nothing that was played is thrown away. With S = 0 this is the synchronous loop, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_lite.metrics import EvalSummary, Span, write_chrome_trace
from rlinf_lite.runners.embodied import EmbodiedRunner
from rlinf_lite.scheduler import Handle


class AsyncEmbodiedRunner(EmbodiedRunner):
    """As `EmbodiedRunner`, whose steps, metrics, evaluations and checkpoints it has.

    What plays while a checkpoint is written is not in it: a run that resumes plays it again, with the weights of the
    checkpoint. So a run goes on exactly as it would have only with `max_staleness: 0`.
    """

    _playing: dict[int, tuple[Handle, Handle]]
    """By step: the calls of env and rollout workers."""
    _sending: list[Handle]
    """Of the actors, of weights."""
    _taking: list[Handle]
    """Of rollout workers, of weights; not waited for, but held, so that any wait hears of their errors."""
    _played_until: float
    """When the last step that was waited for had been played."""
    _last: tuple[int, float, Sequence[Span]]
    """The last step, when it began, and what was done for it."""

    def init_workers(self) -> None:
        self._playing, self._sending, self._taking, self._played_until = {}, [], [], 0.0
        super().init_workers()

    def update_rollout_weights(self) -> None:
        """Offer them. Who plays takes them between two decisions, who does not takes them at once."""
        taking, sending = self._transfer_weights()
        self._sending.append(sending)
        self._taking = [*self._taking[-self.cfg.runner.max_staleness - 1 :], taking]

    def _play(self, step: int) -> tuple[Handle, ...]:
        """Admits every step that may be played ahead of this one's updates."""
        for admitted in range(step, min(step + self.cfg.runner.max_staleness + 1, self.total_steps)):
            if admitted not in self._playing:
                self._playing[admitted] = self.env.interact(admitted), self.rollout.generate(admitted)
        sending, self._sending = self._sending, []
        return *self._playing.pop(step), *sending

    def evaluate(self, videos: Path | None = None) -> EvalSummary:
        """As in any run, once everything that was admitted is played; the trainer goes on with it afterwards."""
        admitted = [handle for pair in self._playing.values() for handle in pair]
        if admitted:
            with self._phase("eval"):
                self._wait(*admitted, what="rollouts to end before an evaluation")
        summary = super().evaluate(videos)
        self._played_until = time.time()  # nobody waited for admission
        return summary

    def _log_played(self, started: float, metrics: dict[str, float], played: list[Span], trained: list[Span]) -> None:
        """Env and rollout workers were busy, or not, from the end of the step that they played before this one."""
        first, last = min(span.start for span in played), max(span.end for span in played)
        since = self._played_until or first
        metrics["async/trainer_waited_s"] = self._times["generate_rollouts"]
        metrics["async/rollouts_waited_s"] = max(first - since, 0.0)
        self._played_until = max(last, self._played_until)
        self._log_step(started, metrics, played + trained, rollouts=(since, last))

    def _write_timeline(self, step: int, started: float, spans: Sequence[Span]) -> None:
        """Keep the timeline of the third step, once what was played meanwhile is known, or of the last but one."""
        path = self.run_dir / "timeline.json"
        if step > self._first_step + 1 and step in (4, self.total_steps) and not path.exists():
            shown, began, before = self._last
            write_chrome_trace(
                (s for s in (*before, *spans) if began <= s.end and s.start <= started), path, step=shown
            )
            self.progress.message(f"timeline of step {shown}: {path}")
        self._last = step, started, spans

    def _restore_envs(self, rows: list[dict[str, Any]]) -> None:
        self._playing, self._sending, self._taking = {}, [], []  # given up: they are admitted again
        super()._restore_envs(rows)
        self._played_until = time.time()
