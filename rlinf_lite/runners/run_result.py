"""How a run ended, in words."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from rlinf_lite.metrics import EvalSummary


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    completed_steps: int
    interrupted: bool
    run_dir: Path
    checkpoint: Path | None
    total_steps: int
    evals: list[EvalSummary]
    report: Path | None
    measure: str
    """How to evaluate the checkpoint."""

    @property
    def first_eval(self) -> EvalSummary | None:
        return self.evals[0] if self.evals else None

    @property
    def last_eval(self) -> EvalSummary | None:
        return self.evals[-1] if self.evals else None

    def describe(self) -> str:
        """What was reached, and how to go on."""
        verb = "stopped" if self.interrupted else "finished"
        lines = [f"{verb} after {self.completed_steps} of {self.total_steps} steps"]
        first, last = self.first_eval, self.last_eval
        if first is not None and last is not None:
            lines += [f"  before: {first.headline()}"] if first is not last else []
            lines.append(f"  reached: {last.headline()}")
            lines += [f"    {row}" for row in last.task_lines(first)] if len(last.tasks) > 1 else []
        lines += [f"  report: {self.report}"] if self.report is not None else []
        lines.append(f"  metrics: {self.run_dir}/metrics.jsonl")
        lines.append(f"  curves: {sys.executable} -m tensorboard.main --logdir {self.run_dir}")
        if self.checkpoint is not None:
            more = "" if self.completed_steps < self.total_steps else " runner.max_steps=<more>"
            lines.append(f"  checkpoint: {self.checkpoint}")
            lines.append(f"  go on: the same command with runner.resume={self.checkpoint}{more}")
            lines.append(f"  measure: {self.measure}")
        return "\n".join(lines)
