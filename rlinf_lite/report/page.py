"""The report's page: the numbers and texts that `templates/page.html` lays out.

Scales, ticks and lines are computed here; `templates/drawings.html` draws them. Templates escape all that they get.
"""

from __future__ import annotations

import base64
import io
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from PIL import Image

from rlinf_lite.report.axes import Scale, compact, duration, percent
from rlinf_lite.report.charts import Axis, charts
from rlinf_lite.report.lanes import Timeline, read_tasks, zoomed_in
from rlinf_lite.report.run_files import Line, RunFiles, read_failures

T = TypeVar("T")

PHASES = {
    "generate_rollouts": "rollouts",
    "sync_weights": "weight sync",
    "training": "training",
    "eval": "evaluation",
    "advantages": "advantages",
    "store_transitions": "storing",
}
"""Names of the phases on the page. Each has the colour of the series with its number: rollouts that of env, training
that of actor."""
UTILIZATION = {
    "perf/overlap_frac": "overlap",
    "perf/env_idle_frac": "env idle",
    "perf/rollout_idle_frac": "rollout idle",
    "perf/actor_idle_frac": "actor idle",
}
FACTS = (
    ("Env steps / s", "perf/env_steps_per_s", compact),
    ("Samples / s", "perf/samples_per_s", compact),
    ("Tokens / s", "perf/tokens_per_s", compact),
    ("Overlap", "perf/overlap_frac", percent),
    ("Env idle", "perf/env_idle_frac", percent),
    ("Rollout idle", "perf/rollout_idle_frac", percent),
)
"""Facts that are medians over the steps: name, metric, format."""
LANES = {
    "env": "env steps (shades: stages)",
    "rollout": "policy acts",
    "reward": "reward",
    "reference": "reference",
    "critic": "critic",
    "actor": "actor",
    "driver": "phases of the driver",
}
NUM_ANSWERS = 8


def render_page(run: RunFiles) -> str:
    """The page as HTML. It loads nothing and runs no script."""
    failures = read_failures(run.events)
    return template("page.html").render(
        run=run,
        about=_about(run),
        evals=_first_and_last(run.evals),
        facts=_facts(run),
        table=TaskTable(run) if run.evals else None,
        protocol=_protocol(run.evals[-1].get("protocol", {})) if run.evals else [],
        charts={axis.name: list(charts(run, axis)) for axis in Axis.all(run)},
        pipeline=_pipeline(run),
        phases=list(_phases(run)),
        failures=failures,
        started=min((event["time"] for event in run.events), default=0.0),
        lost_s=sum(failure.seconds or 0.0 for failure in failures),
        lost_steps=sum(failure.steps_lost or 0 for failure in failures),
        answers=_answers(run) if any(run.answers.values()) else None,
        videos=_first_and_last([_Video(run, step) for step in sorted(run.videos)]),
        videos_off=run.section("env", "eval").get("num_videos") == 0,
        commands=_commands(run),
    )


def template(name: str) -> Template:
    """The template of a name, from `templates/`."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates"), encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"duration": duration, "percent": percent, "measured": measured, "px": "{:.1f}".format}
    return templates.get_template(name)


def _first_and_last(items: Sequence[T]) -> list[tuple[str, T]]:
    """The first item as `Before` and the last as `After`; a single one as `Measured`."""
    if len(items) > 1:
        return [("Before", items[0]), ("After", items[-1])]
    return [("Measured", item) for item in items]


def _about(run: RunFiles) -> list[str]:
    env, model, algorithm = run.section("env"), run.section("model"), run.section("algorithm")
    learns = f"{algorithm.get('adv_type')} + {algorithm.get('loss_type')}" if algorithm else ""
    kind = run.section("runner").get("task_type")
    learns = {"sft": "imitation", "off_policy": f"{run.section('off_policy').get('algorithm')}"}.get(str(kind), learns)
    parts = [
        f"{env.get('task', '')} ({env.get('id', '')})" if env else "",
        str(model.get("id") or run.section("rollout").get("model_dir") or f"{model.get('size', '')} language model"),
        learns,
        time.strftime("%-d %B %Y, %H:%M", time.localtime(run.lines[-1]["time"])) if run.lines else "",
    ]
    return [part for part in parts if part]


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    planned = run.total_steps
    facts = [("Steps", f"{run.completed_steps:,}" + (f" of {planned:,}" if planned else ""))]
    if run.env_steps:
        facts.append(("Env steps", f"{run.env_steps:,}"))
    facts.append(("Time", duration(run.seconds)))
    for name, metric, shown in FACTS:
        values = [line[metric] for line in run.steps if line.get(metric) is not None]
        if values:
            facts.append((name, shown(median(values))))
    memory = [line["perf/peak_memory_bytes"] for line in run.steps if line.get("perf/peak_memory_bytes")]
    if memory:
        facts.append(("Actor memory", f"{max(memory) / 2**20:,.0f} MiB"))
    return facts


def _protocol(protocol: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines of an evaluation's protocol, as name and value. Settings of environment and policy have a line each; null
    and empty values are left out."""
    flat: list[tuple[str, Any]] = []
    for name, value in protocol.items():
        inner = value.items() if isinstance(value, dict) and name != "versions" else [("", value)]
        flat += [(f"{name} {key}".strip().replace("_", " "), found) for key, found in inner]
    shown = [(name, value) for name, value in flat if value not in (None, {}, [])]
    return [
        (name, ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value))
        for name, value in shown
    ]


def _phases(run: RunFiles) -> Iterator[tuple[int, str, float, float]]:
    """Colour, name, seconds and share of each phase that took time."""
    totals = [sum(line.get(f"time/{name}") or 0.0 for line in run.lines) for name in PHASES]
    for colour, (name, seconds) in enumerate(zip(PHASES.values(), totals, strict=True), start=1):
        if seconds:
            yield colour, name, seconds, seconds / sum(totals)


def _pipeline(run: RunFiles) -> dict[str, Any] | None:
    """The step with a timeline, its utilization and drawings; None if no step has one."""
    tasks = read_tasks(run.trace) if run.trace else []
    if not tasks:
        return None
    step = (run.trace or {}).get("otherData", {}).get("step")
    line = next((line for line in run.steps if line["step"] == step), {})
    present = {task.component for task in tasks}
    start, end = min(task.start for task in tasks), max(task.end for task in tasks)
    return {
        "step": step,
        "utilization": [(name, line[key]) for key, name in UTILIZATION.items() if line.get(key) is not None],
        "keys": [(component, name) for component, name in LANES.items() if component in present],
        "drawings": [Timeline(tasks, start, end, "One step, lane by lane"), zoomed_in(tasks)],
    }


def _answers(run: RunFiles) -> dict[str, Any]:
    """The first problems of the evaluation, with the first and the last answers."""
    steps = _first_and_last(sorted(run.answers))
    by_step = [run.answers[step][:NUM_ANSWERS] for _, step in steps]
    return {"steps": steps, "rows": list(zip(*by_step, strict=True))}


@dataclass(frozen=True)
class Measured:
    """One task in one evaluation: a success rate, or a mean return where the task has no success."""

    value: float
    low: float
    high: float
    count: str
    is_success: bool

    @property
    def number(self) -> str:
        return percent(self.value) if self.is_success else compact(self.value)

    @property
    def interval(self) -> str:
        if self.is_success:
            return f"[{100 * self.low:.1f}, {100 * self.high:.1f}]"
        return f"[{compact(self.low)}, {compact(self.high)}]"


class IntervalPlot:
    """Scale of the drawings in a table's rows, which show their intervals."""

    plot_width, plot_height, plot_margin = 240, 30, 8

    def __init__(self, shown: Sequence[Measured]) -> None:
        low, high = min(m.low for m in shown), max(m.high for m in shown)
        are_rates = all(m.is_success for m in shown)
        if are_rates:
            low, high = 0.0, 1.0
        right = self.plot_width - self.plot_margin
        self.x = Scale(low, high if high > low else low + 1.0, self.plot_margin, right)
        self.plot = "0 to 100%" if are_rates else f"{compact(self.x.low)} to {compact(self.x.high)}"


class TaskTable(IntervalPlot):
    """A row per task, per group of tasks, and one for all tasks if there are several. A row holds the last evaluation's
    summary, and its results before and after; before is None if there was one evaluation, or it lacked the task."""

    def __init__(self, run: RunFiles) -> None:
        before, after = run.evals[0], run.evals[-1]
        self.is_compared = len(run.evals) > 1
        rows_before = (*before["tasks"], *before.get("groups", []), before["total"])
        earlier = {row["task_id"]: row for row in rows_before} if self.is_compared else {}
        tasks = [*after["tasks"], *after.get("groups", []), *([after["total"]] if len(after["tasks"]) > 1 else [])]
        self.rows: list[tuple[Line, Measured | None, Measured]] = []
        for task in tasks:
            was = earlier.get(task["task_id"])
            self.rows.append((task, None if was is None else measured(was), measured(task)))
        self.says_when = all("steps_to_success" in task for task in tasks) and any(
            task["steps_to_success"] is not None for task in tasks
        )
        super().__init__([m for _, *both in self.rows for m in both if m is not None])


def measured(summary: Line) -> Measured:
    """The result in a `TaskSummary` that was read from JSON."""
    episodes = summary["num_episodes"]
    if summary["success_once"] is not None:
        low, high = summary["success_interval"]
        return Measured(summary["success_once"], low, high, f"{summary['num_successes']}/{episodes}", True)
    mean = summary["return_mean"]
    low, high = summary["return_interval"] or (mean, mean)
    return Measured(mean, low, high, f"{episodes} episodes", False)


class _Video:
    """An evaluation's GIF, and its last frame for paper and for readers who have switched off motion."""

    def __init__(self, run: RunFiles, step: int) -> None:
        self.step, self._path = step, run.videos[step]
        self.number = next(measured(content["total"]).number for content in run.evals if content["step"] == step)
        with Image.open(self._path) as gif:
            self.width, self.height = gif.size
            self.alt = bytes(gif.info.get("comment", b"")).decode()

    def moving(self) -> str:
        return _data_uri("gif", self._path.read_bytes())

    def standing(self) -> str:
        with Image.open(self._path) as gif:
            gif.seek(getattr(gif, "n_frames", 1) - 1)
            still = io.BytesIO()
            gif.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(still, "PNG", optimize=True)
        return _data_uri("png", still.getvalue())


def _commands(run: RunFiles) -> dict[str, str]:
    checkpoint, commands, directory = run.checkpoint, dict[str, str](), shlex.quote(str(run.run_dir))
    if checkpoint is not None and "__main__:" in run.config_text:  # a part that other programs cannot import
        commands["Measure the policy"] = "rlinf_lite.evaluate, in the program or notebook that trained it"
    elif checkpoint is not None:
        planned = run.total_steps or 0
        more = f" runner.max_steps={2 * planned}" if 0 < planned <= run.completed_steps else ""
        commands["Measure the policy"] = f"rlinf-lite eval {directory}"
        commands["Go on"] = f"rlinf-lite train {directory}{more}"
    commands["Curves"] = f"tensorboard --logdir {directory}"
    commands["Make this page again"] = f"rlinf-lite report {directory}"
    return commands


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
