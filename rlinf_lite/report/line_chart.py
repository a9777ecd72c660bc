"""A line chart as inline SVG: colours come from the page's style, values show on hovering."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from rlinf_lite.report.axes import Scale, compact, inner_ticks, nice_ticks, percent, tick_labels

Point = tuple[float, float]

WIDTH, HEIGHT = 380, 206
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 10, 28
MAX_POINTS, MAX_HOVERS = 400, 120
SMOOTH_FROM = 40
"""From this many points on a line is drawn as its moving average, over the points themselves in a faint line."""


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: int
    """Of the page's series colours, from 1."""
    intervals: Sequence[tuple[float, float]] = ()
    """95% interval of each point; a series that has them is drawn as points with whiskers."""


@dataclass(frozen=True)
class Chart:
    """What one chart shows. x is env steps."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    is_percent: bool = False
    bounds: tuple[float | None, float | None] = (None, None)
    """y never reaches beyond these."""
    marks: Sequence[float] = field(default_factory=tuple)
    """Where evaluations took place."""
    x_name: str = "env steps"

    @property
    def format(self) -> Callable[[float], str]:
        return percent if self.is_percent else compact


def draw_chart(chart: Chart) -> str:
    """The chart as a figure element with title and legend."""
    xs = [x for series in chart.series for x, _ in series.points]
    x = Scale(min(0.0, *xs), max(xs) or 1.0, LEFT, WIDTH - RIGHT)
    y_ticks = nice_ticks(*_range(chart))
    y = Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_grid(chart, x, y, y_ticks), *(_line(series, x, y) for series in chart.series), _hovers(chart, x)]
    unit = f' <span class="unit">{escape(chart.unit)}</span>' if chart.unit else ""
    return (
        f"<figure class=chart><figcaption><b>{escape(chart.title)}</b>{unit}{_legend(chart)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_describe(chart))}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _range(chart: Chart) -> tuple[float, float]:
    values = [y for series in chart.series for _, y in series.points]
    values += [end for series in chart.series for interval in series.intervals for end in interval]
    low, high = min(values), max(values)
    lowest, highest = chart.bounds
    low = low if lowest is None else max(low, lowest)
    high = high if highest is None else min(high, highest)
    if low > 0 and low < 0.5 * high:
        low = 0.0  # a scale that nearly reaches zero had better show it
    return low, max(high, low)


def _grid(chart: Chart, x: Scale, y: Scale, y_ticks: list[float]) -> str:
    parts = []
    for tick, label in zip(y_ticks, tick_labels(y_ticks, chart.is_percent), strict=True):
        at = round(y(tick), 1)
        parts.append(f'<path class=grid d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 3.5:.1f}" class="end">{label}</text>')
    x_ticks = inner_ticks(x.low, x.high)
    for tick, label in zip(x_ticks, tick_labels(x_ticks), strict=True):
        at, anchor, unit = x(tick), "mid", ""
        if at > WIDTH - RIGHT - 14:
            at, anchor = min(at, WIDTH - RIGHT + 8), "end"
        elif tick == 0:
            at, anchor, unit = LEFT - 3, "start", f" {chart.x_name}"
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - 8}" class="{anchor}">{label}{unit}</text>')
    base = HEIGHT - BOTTOM
    for mark in chart.marks:
        parts.append(f'<path class=mark d="M{x(mark):.1f} {base}l-3 5h6z"/>')
    return "".join(parts)


def _line(series: Series, x: Scale, y: Scale) -> str:
    if series.intervals:
        return _whiskers(series, x, y)
    points = _thinned(series.points, MAX_POINTS)
    if len(points) < SMOOTH_FROM:
        return f'<path class="line s{series.colour}" d="{_path(points, x, y)}"/>'
    faint = f'<path class="line faint s{series.colour}" d="{_path(points, x, y)}"/>'
    return faint + f'<path class="line s{series.colour}" d="{_path(_smoothed(points), x, y)}"/>'


def _whiskers(series: Series, x: Scale, y: Scale) -> str:
    parts = [f'<path class="line s{series.colour}" d="{_path(series.points, x, y)}"/>']
    for (at, value), (low, high) in zip(series.points, series.intervals, strict=True):
        px = f"{x(at):.1f}"
        parts.append(f'<path class="line thin s{series.colour}" d="M{px} {y(low):.1f}V{y(high):.1f}"/>')
        parts.append(f'<circle class="f{series.colour}" cx="{px}" cy="{y(value):.1f}" r="3"/>')
    return "".join(parts)


def _path(points: Sequence[Point], x: Scale, y: Scale) -> str:
    """A polyline, kept inside the chart where a value lies outside the bounds."""
    low, high = min(y.low, y.high), max(y.low, y.high)
    return "M" + "L".join(f"{x(px):.1f} {y(min(max(py, low), high)):.1f}" for px, py in points)


def _hovers(chart: Chart, x: Scale) -> str:
    """Invisible columns, one per x, that show its values when pointed at."""
    values: dict[float, list[str]] = {}
    for series in chart.series:
        for i, (at, value) in enumerate(series.points):
            text = f"{series.name} {chart.format(value)}"
            if series.intervals:
                low, high = series.intervals[i]
                text += f" [{chart.format(low)}, {chart.format(high)}]"
            values.setdefault(at, []).append(text)
    every = -(-len(values) // MAX_HOVERS)
    kept = [at for i, at in enumerate(sorted(values)) if i % every == 0 or at in chart.marks]
    edges = [(a + b) / 2 for a, b in itertools.pairwise(kept)]
    parts = []
    for at, start, end in zip(kept, [x.low, *edges], [*edges, x.high], strict=True):
        text = f"{at:,.0f} {chart.x_name}\n" + "\n".join(values[at])
        shape = f"M{x(start):.1f} {TOP}H{x(end):.1f}V{HEIGHT - BOTTOM}H{x(start):.1f}z"
        parts.append(f'<path class=hover d="{shape}"><title>{escape(text)}</title></path>')
    return "".join(parts)


def _legend(chart: Chart) -> str:
    if len(chart.series) < 2:
        return ""
    keys = (f'<span class="key k{series.colour}">{escape(series.name)}</span>' for series in chart.series)
    return f"<span class=legend>{''.join(keys)}</span>"


def _describe(chart: Chart) -> str:
    parts = []
    for series in chart.series:
        (first_x, first), (last_x, last) = series.points[0], series.points[-1]
        parts.append(
            f"{series.name}: {chart.format(first)} at {first_x:,.0f} {chart.x_name}, "
            f"{chart.format(last)} at {last_x:,.0f}"
        )
    return f"{chart.title}. {'; '.join(parts)}"


def _thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """Means of equal runs of points where there are more than `limit`."""
    size = math.ceil(len(points) / limit)
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Centred moving average over a tenth of the points; the window shrinks at the ends."""
    half = max(1, len(points) // 20)
    smooth = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        window = [y for _, y in points[i - reach : i + reach + 1]]
        smooth.append((x, sum(window) / len(window)))
    return smooth
