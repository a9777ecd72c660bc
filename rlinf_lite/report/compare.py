"""One page about several runs: their curves in common charts, their results, and where their configs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlinf_lite.config.explain import yaml_text
from rlinf_lite.report.charts import CHARTS, Axis, Chart, Series
from rlinf_lite.report.page import IntervalPlot, Measured, measured, template
from rlinf_lite.report.run_files import ReportError, RunFiles

NUM_COLOURS = 8
LOOKS = ("", "dashed", "dotted")
"""Styles of lines: of the first `NUM_COLOURS` runs, of as many next ones, and of the rest."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWX"
KINDS = {
    "embodied": "reinforcement learning in simulators",
    "off_policy": "off-policy learning in simulators",
    "sft": "imitation",
    "reasoning": "a language model's run",
}


@dataclass(frozen=True)
class Compared:
    """A run, with its letter, colour and line style on the page."""

    letter: str
    colour: int
    look: str
    files: RunFiles

    @property
    def before(self) -> Measured | None:
        """Result of the evaluation before the first step; None where there was none."""
        evals = self.files.evals
        return measured(evals[0]["total"]) if evals and evals[0]["step"] == 0 else None

    @property
    def last(self) -> Measured | None:
        """Result of the last evaluation; None where there was none after the first step."""
        evals = self.files.evals
        return measured(evals[-1]["total"]) if evals and evals[-1]["step"] > 0 else None

    def of_task(self, task_id: str) -> Measured | None:
        rows = self.files.evals[-1]["tasks"] if self.last else []
        return next((measured(row) for row in rows if row["task_id"] == task_id), None)


def render_comparison(runs: Sequence[RunFiles]) -> str:
    """The page as HTML, with the runs in the given order. It loads nothing and runs no script. Raises ReportError where
    the runs cannot be compared."""
    _check(runs)
    compared = [
        Compared(LETTERS[i], i % NUM_COLOURS + 1, LOOKS[i // NUM_COLOURS], files) for i, files in enumerate(runs)
    ]
    shown = [m for run in compared for m in (run.before, run.last) if m is not None]
    tasks = {row["task_id"]: None for run in compared if run.last for row in run.files.evals[-1]["tasks"]}
    return template("compare.html").render(
        runs=compared,
        kind=KINDS.get(_kind(runs[0]), ""),
        plot=IntervalPlot(shown) if shown else None,
        tasks=list(tasks) if len(tasks) > 1 else [],
        charts=list(_charts(compared)),
        configs=differences([files.config for files in runs]),
        versions=differences([files.versions for files in runs]),
    )


def differences(contents: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Values that differ between the contents, by dotted key: one line of YAML for each content, a dash where it lacks
    the key."""
    flat = [dict(_flat(content)) for content in contents]
    keys = {key: None for one in flat for key in one}  # in the order of the files
    texts = {key: [yaml_text(one[key]) if key in one else "–" for one in flat] for key in keys}
    return {key: values for key, values in texts.items() if len(set(values)) > 1}


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _check(runs: Sequence[RunFiles]) -> None:
    if not 2 <= len(runs) <= len(LETTERS):
        raise ReportError(f"a page compares 2 to {len(LETTERS)} runs; {len(runs)} were named.")
    paths = [files.run_dir.resolve() for files in runs]
    twice = next((files.run_dir for i, files in enumerate(runs) if paths[i] in paths[:i]), None)
    if twice is not None:
        raise ReportError(f"{twice} is named twice. Name each run once.")
    kinds = {_kind(files): files.run_dir for files in reversed(runs)}
    if len(kinds) > 1:
        listed = "; ".join(f"{path} is {KINDS.get(kind, kind)}" for kind, path in reversed(kinds.items()))
        raise ReportError(f"runs of different kinds: {listed}. Name runs of one runner.task_type.")


def _kind(files: RunFiles) -> str:
    return str(files.section("runner").get("task_type", "embodied"))


def _charts(runs: Sequence[Compared]) -> Iterator[Chart]:
    """A chart per metric, with a line per run that logged it. Evaluations have charts of their own."""
    axis = Axis.all(next((run.files for run in runs if run.files.steps), runs[0].files))[0]
    for spec in CHARTS:
        evaluated = []
        for run in runs:
            points, intervals = axis.evaluated(run.files.evals, spec)
            if points:
                evaluated.append(Series(run.letter, points, run.colour, intervals, run.look))
        if evaluated:
            yield Chart(replace(spec, title=f"{spec.title}, evaluated"), evaluated, [], axis.name)
        for name in dict.fromkeys(spec.metrics.values()):
            metrics = [metric for metric, called in spec.metrics.items() if called == name]
            trained = []
            for run in runs:
                points = next(filter(None, (axis.points(run.files, metric) for metric in metrics)), [])
                if points:
                    trained.append(Series(run.letter, points, run.colour, look=run.look, is_noisy=spec.is_noisy))
            if trained:
                is_one_of_many = spec.evaluated is not None or len(set(spec.metrics.values())) > 1
                title = f"{spec.title}, {name}" if is_one_of_many else spec.title
                yield Chart(replace(spec, title=title), trained, [], axis.name)
