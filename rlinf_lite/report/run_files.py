"""The files of a run's directory, and the failures in its events: what failed, how it was noticed, and how long the
recovery took."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rlinf_lite.config.resources import checkpoint_roots
from rlinf_lite.metrics.evaluation import wilson_interval

Line = dict[str, Any]
_FREE = ("commit", "versions", "num_episodes", "episodes_per_task", "tasks", "suite", "started_from", "notes")
"""Keys of the protocol in which comparable evaluations may differ."""


class ReportError(ValueError):
    """The directory does not hold a run that can be reported on."""


class RunFiles:
    """A run directory's content. Evaluations of steps that the log of a resumed run no longer has are left out."""

    def __init__(self, run_dir: str | Path) -> None:
        """Read the files; all but metrics.jsonl may be missing. Raises ReportError where that is missing."""
        self.run_dir = run_dir = Path(run_dir)
        if not (run_dir / "metrics.jsonl").exists():
            raise ReportError(f"{run_dir}: no metrics.jsonl here. Name a run's directory, for example results/<run>.")
        self.lines = _json_lines(run_dir / "metrics.jsonl")
        self.events = _json_lines(run_dir / "events.jsonl")  # of supervised runs
        self.config_text = _text(run_dir / "config.yaml")
        self.config: Line = yaml.safe_load(self.config_text) or {}
        self.versions: dict[str, str] = json.loads(_text(run_dir / "versions.json") or "{}")
        found = json.loads(_text(run_dir / "placement.json") or "[]")
        self.placements: list[Line] = sorted(found, key=lambda one: -(one["per_s"] or 0))  # the fastest first
        self.trace: Line | None = json.loads(_text(run_dir / "timeline.json") or "null")

        evaluated = {line["step"] for line in self.lines if "eval/num_episodes" in line}
        evals = [json.loads(path.read_text(encoding="utf-8")) for path in run_dir.glob("eval/step_*.json")]
        found = sorted((e for e in evals if e["step"] in evaluated), key=lambda e: e["step"])
        settings = [_settings(content) for content in found]
        differ = [{key for key, value in settings[-1].items() if one.get(key, value) != value} for one in settings]
        self.evals: list[Line] = [content for content, keys in zip(found, differ, strict=True) if not keys]
        self.other_evals: list[Line] = [content for content, keys in zip(found, differ, strict=True) if keys]
        """Evaluations that cannot be compared with the last one, because their settings differ."""
        self.other_settings = sorted(set().union(*differ))
        if any(content["total"]["success_once"] is not None for content in found):
            # in an evaluation where no episode reported success, none succeeded
            for content in found:
                for summary in (content["total"], *content["tasks"], *content.get("groups", [])):
                    if summary["success_once"] is None:
                        interval = wilson_interval(0, summary["num_episodes"])
                        summary.update(num_successes=0, success_once=0.0, success_interval=interval)
        files = {content["step"]: run_dir / "eval" / f"step_{content['step']:06d}.gif" for content in self.evals}
        self.videos = {step: path for step, path in files.items() if path.exists()}
        self.answers = {step: _json_lines(path.with_suffix(".answers.jsonl")) for step, path in files.items()}

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
    def total_steps(self) -> int | None:
        """Number of steps that the last command planned; None where it is not recorded."""
        return int(self.versions["steps"]) if "steps" in self.versions else None

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first logged phase to the last line, with pauses before a resume."""
        if not self.lines:
            return 0.0
        first = self.lines[0]
        return float(self.lines[-1]["time"] - first["time"] + (first.get("time/step") or first.get("time/eval") or 0.0))

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint in the directories that the config names; None if there is none."""
        roots = checkpoint_roots(self.run_dir)
        found = [sorted(root.glob("step_*[0-9]"), key=lambda path: int(path.name[5:])) for root in roots]
        return next((paths[-1] for paths in found if paths), None)

    def section(self, *names: str) -> Line:
        """A section of the config; empty where the run has none."""
        section = self.config
        for name in names:
            section = section.get(name) or {}
        return section


def _settings(evaluation: Line) -> Line:
    """The mode and protocol that another evaluation must share to be comparable: without software versions and numbers
    of episodes (`_FREE`)."""
    protocol = {"mode": evaluation.get("mode"), **evaluation.get("protocol", {})}
    return {key: value for key, value in protocol.items() if key not in _FREE}


def _json_lines(path: Path) -> list[Line]:
    """The complete lines of a file; none where there is no such file."""
    return [json.loads(line) for line in _text(path).splitlines() if line.endswith("}")]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


@dataclass
class Failure:
    """A row of the table of failures: a failover, or a problem that was only detected."""

    time: float
    who: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    again: str = "nothing"
    """What was started again, as text."""
    workers: set[str] = field(default_factory=set)
    """Workers that were started again."""
    seconds: float | None = None
    steps_lost: int | None = None

    def add(self, detected: Line) -> None:
        self.time = min(self.time, detected["time"])
        found = (_worker(detected), detected["kind"], detected["evidence"].split("\n")[0])
        for known, value in zip((self.who, self.kinds, self.evidence), found, strict=True):
            if value not in known:
                known.append(value)


def read_failures(events: list[Line]) -> list[Failure]:
    """The failures in a run's events, in the order of time."""
    rows: list[Failure] = []
    by_id: dict[str, Failure] = {}
    slow, unsettled = list[Line](), list[Line]()  # detected, and not (yet) part of a failover

    def settle(failure: Failure, workers: set[str]) -> None:
        """Add to a failure all that was detected about these workers."""
        for detected in [detected for detected in unsettled if _worker(detected) in workers]:
            failure.add(detected)
            unsettled.remove(detected)

    for event in events:
        kind, failure = event["event"], by_id.get(event.get("id", ""))
        if kind == "master_restarted":
            evidence = [event["problem"]] if event.get("problem") else []
            rows.append(Failure(event["time"], ["master"], ["crashed"], evidence, "the master"))
        elif kind == "detected":
            (slow if event["kind"] == "slow" else unsettled).append(event)
        elif kind == "failover":
            if failure is None:
                failure = by_id[event["id"]] = Failure(event["time"])
                rows.append(failure)
            failure.workers |= {f"{group}[{rank}]" for group, ranks in event["ranks"].items() for rank in ranks}
            groups = [f"{group}[{', '.join(map(str, ranks))}]" for group, ranks in event["ranks"].items()]
            failure.again = ", ".join(groups) or f"the {event['level']}"
            if event["level"] == "fail":
                failure.again = "nothing: the job ended"
            settle(failure, {_worker(detected) for detected in unsettled})
            failure.who = failure.who or ["trainer"]
            failure.evidence = failure.evidence or [event["reason"].split("\n")[0]]
        elif kind in ("recovered", "recovery_failed") and failure is not None:
            settle(failure, failure.workers)
            failure.seconds, failure.steps_lost = event["seconds"], event.get("steps_lost")
    for detected in (*slow, *unsettled):
        rows.append(Failure(detected["time"]))
        rows[-1].add(detected)
    return sorted(rows, key=lambda row: row.time)


def _worker(detected: Line) -> str:
    return f"{detected['group']}[{detected['rank']}]"
