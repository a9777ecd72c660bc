"""The asynchronous language loop: generation and training run at the same time (docs/async.md). Step n, with
S = runner.max_staleness:

weights of version n to the rollout workers             # which take them between two responses; with
                                                        # rollout.partial_rollouts between two tokens
rollout generates and reward scores step k, k <= n + S  # steps that are not started yet; workers queue them
wait until the responses of step n are complete         # the trainer waits for nothing else
log-probabilities, values, advantages, updates          # meanwhile steps n + 1 .. n + S are generated

Step n was admitted (its generation was started) at version n - S or later, so its data are at most S versions old, and
no response is thrown away for its age. Prompts that replace filtered groups are answered after the admitted steps, by
newer weights. With S = 0 this is the synchronous loop, bit for bit.
"""

from __future__ import annotations

from typing import Any

from rlinf_lite.data import DataProto
from rlinf_lite.metrics import Span
from rlinf_lite.runners.asynchronous import AsyncRunner
from rlinf_lite.runners.reasoning import Generating, ReasoningRunner
from rlinf_lite.scheduler import Handle


class AsyncReasoningRunner(AsyncRunner, ReasoningRunner):
    """As `ReasoningRunner`, with generation ahead of training; same steps, metrics, evaluations and checkpoints.

    A checkpoint has the prompts of steps that are under way, but not their responses: a resumed run generates these
    again, with the weights of the checkpoint. So only with `max_staleness: 0` does a resumed run give exactly the
    results of an uninterrupted one.
    """

    _generating: dict[int, Generating]
    """The steps whose responses are being generated."""
    _mixed: set[int]
    """Steps whose generation was mixed with that of other steps, because filtered groups were replaced."""

    def init_workers(self) -> None:
        self._give_up()
        super().init_workers()

    def _generate(self, step: int, refill: int = 0) -> Generating:
        """Start generation for every step that may run before this step's updates; return that of `step`."""
        if refill:
            self._mixed |= {step, *self._generating} if self._generating else set()
            return super()._generate(step, refill)
        for admitted in self._admissible(step, self._generating):
            self._generating[admitted] = super()._generate(admitted)
        return self._generating.pop(step)

    def _admitted(self) -> list[Handle]:
        return [handle for generating in self._generating.values() for handle in generating.handles]

    def _log_generated(self, batch: DataProto | None, metrics: dict[str, float], spans: list[Span]) -> None:
        step = self.completed_steps - 1
        played, in_order = [span for span in spans if span.process.startswith("rollout ")], step not in self._mixed
        if in_order:
            took = max(span.end for span in played) - min(span.start for span in played)
            metrics["perf/generated_tokens_per_s"] = metrics["rollout/generated_tokens"] / took
        if batch is not None:
            age = step - batch.batch["acted_versions"][batch.batch["response_mask"]]
            metrics |= {"async/staleness_mean": float(age.double().mean()), "async/staleness_max": float(age.max())}
        self._log_async(metrics, played, spans, ("actor", "rollout"), in_order)

    def _give_up(self) -> None:
        super()._give_up()
        self._generating, self._mixed = {}, set()

    def _go_back_to(self, position: dict[str, Any]) -> None:
        self._give_up()
        super()._go_back_to(position)
