"""The asynchronous embodied loop: rollouts and training run at the same time (docs/async.md). Step n, with
S = runner.max_staleness:

weights of version n to the rollout workers             # which take them between two decisions
env.interact(k) || rollout.generate(k), k <= n + S      # steps that are not started yet; workers queue them
wait until the rollouts of step n are complete          # the trainer waits for nothing else
actor.recv_rollout_batch(n), advantages, run_training   # meanwhile steps n + 1 .. n + S are played

Step n was admitted (its rollouts were started) at version n - S or later, so its data are at most S versions old.
Since admission is limited, no rollout is thrown away. With S = 0 this is the synchronous loop, bit for bit.
"""

from __future__ import annotations

from typing import Any

from rlinf_lite.metrics import Span
from rlinf_lite.runners.asynchronous import AsyncRunner
from rlinf_lite.runners.embodied import EmbodiedRunner
from rlinf_lite.scheduler import Handle


class AsyncEmbodiedRunner(AsyncRunner, EmbodiedRunner):
    """As `EmbodiedRunner`, with rollouts ahead of training; same steps, metrics, evaluations and checkpoints.

    A checkpoint does not contain rollouts that are under way: a resumed run plays them again, with the weights of the
    checkpoint. So only with `max_staleness: 0` does a resumed run give exactly the results of an uninterrupted one.
    """

    _playing: dict[int, tuple[Handle, Handle]]
    """The running calls of env and rollout workers, by step."""

    def init_workers(self) -> None:
        self._playing = {}
        super().init_workers()

    def _play(self, step: int) -> tuple[Handle, ...]:
        """Start the rollouts of every step that may be played before this step's updates; return the calls of
        `step`."""
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
