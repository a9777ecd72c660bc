"""The log of each step: metrics, times, the workers' utilization, and the timeline of one step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlinf_lite.config.names import coarsest_precision
from rlinf_lite.config.schema import BaseConfig
from rlinf_lite.file_modes import write_whole
from rlinf_lite.metrics import EvalSummary, MetricLogger, Progress, Span, utilization, write_chrome_trace
from rlinf_lite.runners.full_disk import Disk

log = logging.getLogger(__name__)

DRIFT_LIMITS = {"fp32": 1e-3, "bf16": 5e-2}
"""Largest usual mean difference between the log-probabilities of acting and of training, per token or action
dimension, by precision."""


class StepLog:
    """Times the phases of a step, and logs the step when it is done."""

    began: float
    """Start of the step (`time.time()`)."""
    times: dict[str, float]
    """Seconds by phase; the entry `step` is the whole step."""
    spans: list[Span]
    """The phases as the driver's part of the timeline."""

    def __init__(self, cfg: BaseConfig, run_dir: Path, disk: Disk) -> None:
        self._cfg, self._run_dir, self._disk = cfg, run_dir, disk
        self._warned_of_drift = False
        self.begin_step()

    @contextmanager
    def open(
        self, completed_steps: int, total_steps: int, resume_step: int | None
    ) -> Iterator[tuple[MetricLogger, Progress]]:
        """Open the run's metrics and its progress on the terminal. `resume_step`: see `MetricLogger`."""
        settings = self._cfg.runner.logger
        logger = MetricLogger(
            self._run_dir,
            settings.backends,
            project_name=settings.project_name,
            config=self._cfg.model_dump(mode="json"),
            resume_step=resume_step,
            patiently=self._disk.write,
        )
        progress = Progress(total_steps, self._run_dir.name, start_step=completed_steps)
        with logger as self._logger, progress as self._progress:
            yield logger, progress

    def begin_step(self) -> None:
        """Start a step: forget the phases of the step before."""
        self.began, self.times, self.spans = time.time(), {}, []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of the block. Phases of the same name add up."""
        started = time.time()
        try:
            yield
        finally:
            ended = time.time()
            self.times[name] = self.times.get(name, 0.0) + ended - started
            self.spans.append(Span(name, started, ended, "driver"))

    def end_step(self) -> float:
        """Stop the step's clock, before anything is logged. Returns the step's time in seconds."""
        self.times["step"] = time.time() - self.began
        return self.times["step"]

    def interval(self, name: str) -> tuple[float, float]:
        """Start and end of the first phase of this name."""
        return next((span.start, span.end) for span in self.spans if span.name == name)

    def phase_metrics(self) -> dict[str, float]:
        return {f"time/{name}": seconds for name, seconds in self.times.items()}

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        spans: Sequence[Span],
        pair: tuple[str, str],
        rollouts: tuple[float, float] | None,
    ) -> None:
        """Log a step with its times and the workers' utilization; `pair`: the two groups whose work should overlap.
        `rollouts`: start and end of its rollouts; None: those of the phase `generate_rollouts`."""
        window = self.began, self.began + self.times["step"]
        busy = utilization(spans, rollouts or self.interval("generate_rollouts"), window, pair)
        metrics = {**metrics, **self.phase_metrics(), **busy}
        self._warn_of_drift(metrics.get("rollout/logprob_drift", 0.0))
        self._logger.log(step, metrics)
        self._progress.update(step, metrics)

    def film(self, step: int) -> Path:
        """The path for the film of the evaluation after `step`; its directory is created."""
        path = self._run_dir / "eval" / f"step_{step:06d}.gif"
        self._disk.write(path.parent, lambda: path.parent.mkdir(exist_ok=True))
        return path

    def write_evaluation(self, step: int, summary: EvalSummary, film: Path, experience: Mapping[str, int]) -> None:
        """Log an evaluation after `step`; `experience`: counters besides steps that it is plotted over."""
        path, text = film.with_suffix(".json"), summary.to_json(step=step, **experience)
        self._disk.write(path, lambda: write_whole(path, text), len(text))
        counts = {f"env/num_{name.removeprefix('env_')}": count for name, count in experience.items()}
        self._logger.log(step, {**summary.metrics(), **counts, "time/eval": self.times["eval"]})
        if film.exists():
            self._logger.log_film(step, film)
        when = "".join(f", {count:,} {name.replace('_', ' ')}" for name, count in experience.items())
        self._progress.message(f"eval after step {step}{when}: {summary.headline()}")

    def write_timeline(self, step: int, spans: Sequence[Span]) -> None:
        """Write these spans as the run's timeline, unless it has one already or `runner.timeline` is off."""
        path = self._run_dir / "timeline.json"
        if self._cfg.runner.timeline and not path.exists():
            self._disk.write(path, lambda: write_chrome_trace(spans, path, step=step))
            self._progress.message(f"timeline of step {step}: {path}")

    def _warn_of_drift(self, drift: float) -> None:
        """Warn once if training computes other action probabilities than acting did with the same weights."""
        precision = coarsest_precision(self._cfg)
        if drift > DRIFT_LIMITS[precision] and not self._warned_of_drift:
            self._warned_of_drift = True
            log.warning(
                "log-probabilities of training differ from those of acting by %.2g on average, with the same weights "
                "(rollout/logprob_drift; up to %g is usual in %s): ratios do not begin at 1, so unchanged actions may "
                "be clipped. Likely causes: layers that behave differently in training (dropout, batch statistics), "
                "another temperature or precision of acting, weights that did not arrive. "
                "algorithm.recompute_logprobs=true with algorithm.correction.kind=tis corrects for it",
                drift,
                DRIFT_LIMITS[precision],
                precision,
            )
