"""The loop over language models with generation and training at the same time (docs/async.md). Step n, with
S = runner.max_staleness:

weights of version n to the rollout workers             # taken between two responses; with rollout.partial_rollouts,
                                                        # between two tokens
rollout generates and reward scores step k, k <= n + S  # those that are not under way yet; workers queue them
wait until step n is generated                          # all that the trainer waits for
log-probabilities, values, advantages, updates          # meanwhile n + 1 .. n + S are generated

Step n was admitted at version n - S or later, so what it is trained on is at most S versions old, and no response is
thrown away for its age. Prompts that take the place of filtered groups are answered after what is admitted, by newer
weights. With S = 0 this is the synchronous loop, bit for bit.
"""

from __future__ import annotations

from typing import Any

from rlinf_lite.data import DataProto
from rlinf_lite.metrics import Span
from rlinf_lite.runners.asynchronous import AsyncRunner
from rlinf_lite.runners.reasoning import Generating, ReasoningRunner
from rlinf_lite.scheduler import Handle


class AsyncReasoningRunner(AsyncRunner, ReasoningRunner):
    """As `ReasoningRunner`, whose steps, metrics, evaluations and checkpoints it has.

    A checkpoint has the prompts of what is generated meanwhile, not the responses: a run that resumes has them answered
    again, with the weights of the checkpoint. So it goes on exactly as it would have only with `max_staleness: 0`.
    """

    _generating: dict[int, Generating]
    """What is under way, by step."""
    _mixed: set[int]
    """Steps whose responses were not generated one step after the other: prompts in place of others came between."""

    def init_workers(self) -> None:
        self._give_up()
        super().init_workers()

    def _generate(self, step: int, refill: int = 0) -> Generating:
        """Has every step answered that may be ahead of this one's updates."""
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
