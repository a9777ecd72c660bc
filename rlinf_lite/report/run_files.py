"""What a run left in its directory, read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rlinf_lite.metrics.evaluation import wilson_interval

Line = dict[str, Any]


class ReportError(ValueError):
    """The directory does not hold a run that can be reported on."""


@dataclass(frozen=True)
class RunFiles:
    """A run directory's content. Of resumed runs, evaluations that the log does not know (any more) are left out."""

    run_dir: Path
    lines: list[Line]
    """metrics.jsonl"""
    evals: list[Line]
    """eval/*.json, by step"""
    videos: dict[int, Path]
    """eval/*.gif, by step"""
    config: Line
    config_text: str
    versions: dict[str, str]
    trace: Line | None
    """timeline.json"""
    answers: dict[int, list[Line]]
    """eval/*.answers.jsonl, by step: of language models"""
    events: list[Line]
    """events.jsonl: of supervised runs"""

    @cached_property
    def steps(self) -> list[Line]:
        """The training steps' lines of the log."""
        return [line for line in self.lines if "time/step" in line]

    @property
    def env_steps(self) -> int:
        return max((int(line["env/num_steps"]) for line in self.lines if line.get("env/num_steps")), default=0)

    @property
    def completed_steps(self) -> int:
        return max((int(line["step"]) for line in self.lines), default=0)

    @property
    def seconds(self) -> float:
        """From the start of the first logged phase to the last line; a pause before a resume counts."""
        if not self.lines:
            return 0.0
        first = self.lines[0]
        return float(self.lines[-1]["time"] - first["time"] + (first.get("time/step") or first.get("time/eval") or 0.0))

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint, where the config says they go."""
        roots = [self.run_dir / "checkpoints"]
        if save_path := self.section("actor").get("checkpoint_save_path"):
            roots.append(Path(save_path) / self.run_dir.name / "checkpoints")
        found = [sorted(root.glob("step_*[0-9]"), key=lambda path: int(path.name[5:])) for root in roots]
        return next((paths[-1] for paths in found if paths), None)

    def section(self, *names: str) -> Line:
        """A section of the config; empty where the run has none."""
        section = self.config
        for name in names:
            section = section.get(name) or {}
        return section


def read_run(run_dir: str | Path) -> RunFiles:
    """Read a run's files; of those that a run may go without, what is there.

    Raises:
        ReportError: where there is no metrics.jsonl.
    """
    run_dir = Path(run_dir)
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        raise ReportError(f"{run_dir}: no metrics.jsonl here. Name a run's directory, for example results/<run>.")
    lines = _json_lines(metrics)
    evaluated = {line["step"] for line in lines if "eval/num_episodes" in line}
    evals = [json.loads(path.read_text(encoding="utf-8")) for path in run_dir.glob("eval/step_*.json")]
    evals = sorted((content for content in evals if content["step"] in evaluated), key=lambda content: content["step"])
    evals = _with_success(evals)
    videos = {content["step"]: run_dir / "eval" / f"step_{content['step']:06d}.gif" for content in evals}
    config_text = _text(run_dir / "config.yaml") or ""
    trace = _text(run_dir / "timeline.json")
    return RunFiles(
        run_dir=run_dir,
        lines=lines,
        evals=evals,
        videos={step: path for step, path in videos.items() if path.exists()},
        config=yaml.safe_load(config_text) or {},
        config_text=config_text,
        versions=json.loads(_text(run_dir / "versions.json") or "{}"),
        trace=json.loads(trace) if trace else None,
        answers={step: _json_lines(run_dir / "eval" / f"step_{step:06d}.answers.jsonl") for step in videos},
        events=_json_lines(run_dir / "events.jsonl"),
    )


def _with_success(evals: list[Line]) -> list[Line]:
    """Where any evaluation reports success, one in which no episode said a word of it had none."""
    if any(content["total"]["success_once"] is not None for content in evals):
        for summary in (summary for content in evals for summary in (content["total"], *content["tasks"])):
            if summary["success_once"] is None:
                interval = wilson_interval(0, summary["num_episodes"])
                summary.update(num_successes=0, success_once=0.0, success_interval=interval)
    return evals


def _json_lines(path: Path) -> list[Line]:
    """The complete lines of a file; none where there is no such file."""
    return [json.loads(line) for line in (_text(path) or "").splitlines() if line.endswith("}")]


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None
