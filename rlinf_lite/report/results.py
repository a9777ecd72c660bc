"""What the run reached: evaluation before and after, with 95% intervals, in all and by task."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from rlinf_lite.report.axes import Scale, compact, percent
from rlinf_lite.report.run_files import RunFiles

PLOT_WIDTH, PLOT_HEIGHT, MARGIN = 240, 30, 8


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


def measured(summary: dict[str, Any]) -> Measured:
    """Of a `TaskSummary` read back from JSON."""
    episodes = summary["num_episodes"]
    if summary["success_once"] is not None:
        low, high = summary["success_interval"]
        return Measured(summary["success_once"], low, high, f"{summary['num_successes']}/{episodes}", True)
    mean = summary["return_mean"]
    low, high = summary["return_interval"] or (mean, mean)
    return Measured(mean, low, high, f"{episodes} episodes", False)


def headline(run: RunFiles) -> str:
    """The large numbers: before and after, or what there is of them."""
    if not run.evals:
        return "<p class=note>No evaluation: <code>runner.val_check_interval</code> is not set.</p>"
    shown = [("Before", run.evals[0]), ("After", run.evals[-1])] if len(run.evals) > 1 else [("Measured", run.evals[0])]
    parts = [_big(name, content) for name, content in shown]
    last = run.evals[-1]
    what = "share of episodes that succeed" if measured(last["total"]).is_success else "mean return per episode"
    about = f"{what}, {last['total']['num_episodes']} seeded episodes, {last['mode']} actions, 95% interval"
    return f"<div class=hero>{'<span class=arrow>→</span>'.join(parts)}</div><p class=note>{escape(about)}</p>"


def _big(name: str, content: dict[str, Any]) -> str:
    total = measured(content["total"])
    return (
        f"<div class='big {name.lower()}'><span class=when>{name}, step {content['step']:,}</span>"
        f"<span class=number>{total.number}</span>"
        f"<span class=interval>{total.interval} &nbsp;{total.count}</span></div>"
    )


def task_table(run: RunFiles) -> str:
    """A row per task, and one for all of them where there are more; empty without evaluations."""
    if not run.evals:
        return ""
    before, after = run.evals[0], run.evals[-1]
    rows = [*after["tasks"]] + ([after["total"]] if len(after["tasks"]) > 1 else [])
    earlier = {row["task_id"]: row for row in (*before["tasks"], before["total"])}
    pairs = [
        (row, measured(earlier[row["task_id"]]) if row["task_id"] in earlier else None, measured(row)) for row in rows
    ]
    scale = _scale([m for _, first, last in pairs for m in (first, last) if m is not None])
    body = "".join(_row(row, first if len(run.evals) > 1 else None, last, scale) for row, first, last in pairs)
    plot = "0 to 100%" if pairs[0][2].is_success else f"{compact(scale.low)} to {compact(scale.high)}"
    name = "Measured"
    if len(run.evals) > 1:
        name = "After"
        plot += " <span class='key k1'>before</span> <span class='key k2'>after</span>"
    return (
        f"<div class=scroll><table><thead><tr><th>Task<th class=num>Before<th class=num>95%<th class=num>{name}"
        f"<th class=num>95%<th class=num>Episodes<th class=num>Length<th>{plot}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(row: dict[str, Any], before: Measured | None, after: Measured, scale: Scale) -> str:
    def cells(m: Measured | None) -> str:
        return f"<td class=num>{m.number}<td class='num soft'>{m.interval}" if m else "<td class=num>–<td>"

    kind = " class=total" if row["task_id"] == "all" else ""
    task = "all tasks" if row["task_id"] == "all" else row["task_id"]
    return (
        f"<tr{kind}><th scope=row>{escape(task)}</th>{cells(before)}{cells(after)}<td class=num>{row['num_episodes']}"
        f"<td class=num>{row['episode_len']:.1f}<td>{_interval_plot(before, after, scale)}</tr>"
    )


def _scale(shown: list[Measured]) -> Scale:
    low, high = min(m.low for m in shown), max(m.high for m in shown)
    if all(m.is_success for m in shown):
        low, high = 0.0, 1.0
    return Scale(low, high if high > low else low + 1.0, MARGIN, PLOT_WIDTH - MARGIN)


def _interval_plot(before: Measured | None, after: Measured, x: Scale) -> str:
    parts = [f'<path class=rail2 d="M{MARGIN} {PLOT_HEIGHT / 2}H{PLOT_WIDTH - MARGIN}"/>']
    for m, y, look in ((before, PLOT_HEIGHT / 2 - 6, 1), (after, PLOT_HEIGHT / 2 + 6, 2)):
        if m is not None:
            parts.append(f'<path class="line s{look}" d="M{x(m.low):.1f} {y}H{x(m.high):.1f}"/>')
            parts.append(f'<circle class="f{look}" cx="{x(m.value):.1f}" cy="{y}" r="3.5"/>')
    label = f"before {before.number} {before.interval}, " if before else ""
    label += f"after {after.number} {after.interval}"
    return (
        f'<svg class=dots viewBox="0 0 {PLOT_WIDTH} {PLOT_HEIGHT}" role="img" aria-label="{label}">'
        f"<title>{label}</title>{''.join(parts)}</svg>"
    )
