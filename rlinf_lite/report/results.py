"""What the run reached: evaluation before and after, with 95% intervals, in all and by task."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_lite.report.axes import Scale, compact, percent
from rlinf_lite.report.run_files import Line, RunFiles


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


class TaskTable:
    """A row per task (the last evaluation's summary, measured before and after), per group of tasks, and one for all of
    them where there are more; before is None where there was one evaluation alone, or it had not this task."""

    plot_width, plot_height, plot_margin = 240, 30, 8

    def __init__(self, run: RunFiles) -> None:
        before, after = run.evals[0], run.evals[-1]
        self.is_compared = len(run.evals) > 1
        earlier = (
            {row["task_id"]: row for row in (*before["tasks"], *before.get("groups", []), before["total"])}
            if self.is_compared
            else {}
        )
        tasks = [*after["tasks"], *after.get("groups", []), *([after["total"]] if len(after["tasks"]) > 1 else [])]
        self.rows: list[tuple[Line, Measured | None, Measured]] = []
        for task in tasks:
            was = earlier.get(task["task_id"])
            self.rows.append((task, None if was is None else measured(was), measured(task)))
        shown = [m for _, *both in self.rows for m in both if m is not None]
        low, high = min(m.low for m in shown), max(m.high for m in shown)
        if all(m.is_success for m in shown):
            low, high = 0.0, 1.0
        right = self.plot_width - self.plot_margin
        self.x = Scale(low, high if high > low else low + 1.0, self.plot_margin, right)
        is_success = self.rows[0][2].is_success
        self.plot = "0 to 100%" if is_success else f"{compact(self.x.low)} to {compact(self.x.high)}"


def measured(summary: Line) -> Measured:
    """Of a `TaskSummary` read back from JSON."""
    episodes = summary["num_episodes"]
    if summary["success_once"] is not None:
        low, high = summary["success_interval"]
        return Measured(summary["success_once"], low, high, f"{summary['num_successes']}/{episodes}", True)
    mean = summary["return_mean"]
    low, high = summary["return_interval"] or (mean, mean)
    return Measured(mean, low, high, f"{episodes} episodes", False)
