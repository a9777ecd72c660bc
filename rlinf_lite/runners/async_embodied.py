"""The embodied loop with rollouts and training at the same time (docs/async.md). Step n, with S = runner.max_staleness:

weights of version n to the rollout workers             # taken between two decisions of what they play
env.interact(k) || rollout.generate(k), k <= n + S      # those that do not play yet; workers queue them
wait until step n is played                             # all that the trainer waits for
actor.recv_rollout_batch(n), advantages, run_training   # meanwhile n + 1 .. n + S are played

Step n was admitted at version n - S or later, so what it is trained on is at most S versions old: admission is paced,
and nothing that was played is thrown away. With S = 0 this is the synchronous loop, bit for bit.
"""

from __future__ import annotations

from typing import Any

from rlinf_lite.metrics import Span
from rlinf_lite.runners.asynchronous import AsyncRunner
from rlinf_lite.runners.embodied import EmbodiedRunner
from rlinf_lite.scheduler import Handle


class AsyncEmbodiedRunner(AsyncRunner, EmbodiedRunner):
    """As `EmbodiedRunner`, whose steps, metrics, evaluations and checkpoints it has.

    What plays while a checkpoint is written is not in it: a run that resumes plays it again, with the weights of the
    checkpoint. So a run goes on exactly as it would have only with `max_staleness: 0`.
    """

    _playing: dict[int, tuple[Handle, Handle]]
    """The calls of env and rollout workers, by the step that they play."""

    def init_workers(self) -> None:
        self._playing = {}
        super().init_workers()

    def _play(self, step: int) -> tuple[Handle, ...]:
        """Admits every step that may be played ahead of this one's updates."""
        for admitted in self._admissible(step, self._playing):
            self._playing[admitted] = self.env.interact(admitted), self.rollout.generate(admitted)
        return self._playing.pop(step)

    def _admitted(self) -> list[Handle]:
        return [handle for pair in self._playing.values() for handle in pair]

    def _log_played(self, metrics: dict[str, float], played: list[Span], trained: list[Span]) -> None:
        self._log_async(metrics, played, played + trained, ("env", "rollout"))

    def _give_up(self) -> None:
        super()._give_up()
        self._playing = {}

    def _restore_envs(self, rows: list[dict[str, Any]]) -> None:
        self._give_up()
        super()._restore_envs(rows)
