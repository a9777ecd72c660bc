"""The learning curves: the metrics of each chart, its scales, ticks and lines. `templates/drawings.html` draws them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from rlinf_lite.report.axes import Scale, Tick, compact, counted, inner_ticks, nice_ticks, percent, text_width, ticks
from rlinf_lite.report.run_files import Line, RunFiles

Point = tuple[float, float]

MAX_POINTS, MAX_HOVERS = 400, 120
SMOOTH_FROM = 40
"""A line of this many points or more is drawn as its moving average, with the points themselves as a faint line."""


@dataclass(frozen=True)
class Spec:
    """A chart; it is shown if the run logged one of its metrics."""

    title: str
    metrics: Mapping[str, str]
    """Names in the legend, by metric."""
    unit: str = ""
    is_percent: bool = False
    bounds: tuple[float | None, float | None] = (None, None)
    """Limits of the y axis; None: no limit."""
    evaluated: tuple[str, str] | None = None
    """Keys of the value and its interval in an evaluation, which are drawn over the training curve."""
    is_noisy: bool = True
    """Whether a long curve gets a moving average."""


CHARTS = (
    Spec(
        "Success", {"env/success_once": "training"}, "of episodes", True, (0, 1), ("success_once", "success_interval")
    ),
    Spec("Reward", {"rollout/all_rewards": "training"}, "per response"),
    Spec("Response length", {"rollout/response_length": "training"}, "tokens", bounds=(0, None)),
    Spec("Distance to the reference", {"rollout/ref_kl": "KL", "train/actor/ref_kl": "KL"}, "nats per token"),
    Spec("Return", {"env/return": "training"}, "per episode", evaluated=("return_mean", "return_interval")),
    Spec("Imitation loss", {"train/actor/sft_loss": "imitation loss"}),
    Spec("Policy loss", {"train/actor/policy_loss": "policy loss"}),
    Spec("KL divergence", {"train/actor/approx_kl_k3": "KL"}, "nats, old to new policy"),
    Spec("Clipped positions", {"train/actor/clip_fraction": "clipped"}, "of all", True, (0, 1)),
    Spec("Entropy", {"train/actor/entropy": "entropy"}, "nats per position"),
    Spec("Value loss", {"train/critic/value_loss": "value loss", "train/critic/critic_loss": "critics' loss"}),
    Spec("Values", {"train/critic/q_mean": "of played actions", "train/critic/target_mean": "targets"}),
    Spec("Temperature", {"train/actor/temperature": "weight of the entropy"}, bounds=(0, None)),
    Spec(
        "Replay buffer",
        {
            "replay/online": "played",
            "replay/successes": "of successes",
            "replay/failures": "of failures",
            "replay/demonstrations": "demonstrated",
        },
        "transitions",
        bounds=(0, None),
        is_noisy=False,
    ),
    Spec("Explained variance", {"train/critic/explained_variance": "explained"}, "of returns", bounds=(-1, 1)),
    Spec("Gradient norm", {"train/actor/grad_norm": "gradient norm"}, "before clipping"),
    Spec("Learning rate", {"train/actor/lr": "learning rate"}, bounds=(0, None), is_noisy=False),
    Spec("Throughput", {"perf/env_steps_per_s": "throughput"}, "env steps / s", bounds=(0, None)),
    Spec("Throughput", {"perf/samples_per_s": "throughput"}, "samples / s", bounds=(0, None)),
    Spec("Throughput", {"perf/tokens_per_s": "throughput"}, "tokens / s", bounds=(0, None)),
    Spec("Staleness", {"async/staleness_mean": "mean", "async/staleness_max": "largest"}, "versions", bounds=(0, None)),
    Spec(
        "Waiting",
        {"async/trainer_waited_s": "trainer for rollouts", "async/rollouts_waited_s": "rollouts for admission"},
        "s per step",
        bounds=(0, None),
    ),
    Spec(
        "Weights of stale decisions",
        {
            "train/actor/importance_weight_mean": "mean",
            "train/actor/effective_sample_size": "effective sample size",
            "train/actor/rejected_fraction": "rejected",
        },
        bounds=(0, None),
    ),
    Spec(
        "Pipeline",
        {
            "perf/env_idle_frac": "env idle",
            "perf/rollout_idle_frac": "rollout idle",
            "perf/actor_idle_frac": "actor idle",
            "perf/overlap_frac": "overlap",
        },
        is_percent=True,
        bounds=(0, 1),
    ),
)


@dataclass(frozen=True)
class Series:
    """One curve of a chart."""

    name: str
    points: Sequence[Point]
    colour: int
    """Number of its colour on the page, from 1."""
    intervals: Sequence[tuple[float, float]] = ()
    """95% interval of each point; a series that has them is drawn as points with whiskers."""
    look: str = ""
    """Further CSS classes of its lines."""
    is_noisy: bool = True

    def lines(self) -> list[tuple[str, Sequence[Point]]]:
        """Lines to draw, each with its CSS class: the points; for a long series, faint points and a moving average."""
        if self.intervals:
            return [("", self.points)]
        size = math.ceil(len(self.points) / MAX_POINTS)  # more points are shown as means of equally many
        runs = [self.points[i : i + size] for i in range(0, len(self.points), size)]
        points = [(fmean(x for x, _ in run), fmean(y for _, y in run)) for run in runs]
        if len(points) < SMOOTH_FROM or not self.is_noisy:
            return [("", points)]
        # a centred window of a tenth of the points; at the ends it is cut, to half of that at least
        half = max(1, len(points) // 20)
        windows = [points[max(i - half, 0) : i + half + 1] for i in range(len(points))]
        smooth = [(x, fmean(y for _, y in window)) for (x, _), window in zip(points, windows, strict=True)]
        return [("faint", points), ("", smooth)]


class Chart:
    """Places of scales, ticks and lines in a drawing of `width` x `height` pixels."""

    width, height = 380, 206
    right, top, bottom, label_gap = 366, 10, 178, 6
    """The edges of the plot, inside the labels; `left` follows from the longest label."""

    def __init__(self, spec: Spec, series: Sequence[Series], marks: Sequence[float], x_name: str) -> None:
        """`marks`: places of evaluations on the x axis, whose unit is `x_name`."""
        self.title, self.unit, self.series, self.marks, self.x_name = spec.title, spec.unit, series, marks, x_name
        self.format: Callable[[float], str] = percent if spec.is_percent else compact
        xs = [x for one in series for x, _ in one.points]
        ys = [y for one in series for _, y in one.points]
        ys += [end for one in series for interval in one.intervals for end in interval]
        lowest, highest = spec.bounds
        low = min(ys) if lowest is None else max(min(ys), lowest)
        high = max(ys) if highest is None else min(max(ys), highest)
        if low > 0 and low < 0.5 * high:
            low = 0.0  # a scale that nearly reaches zero includes it
        y_ticks = nice_ticks(low, max(high, low))
        self.y = Scale(y_ticks[0], y_ticks[-1], self.bottom, self.top)
        self.y_ticks: list[Tick] = ticks(y_ticks, self.y, spec.is_percent)
        self.left = 2 * self.label_gap + max(text_width(tick.label) for tick in self.y_ticks)
        self.x = Scale(min(0.0, *xs), max(xs) or 1.0, self.left, self.right)
        self.x_ticks: list[Tick] = ticks(inner_ticks(self.x.low, self.x.high), self.x)

    def path(self, points: Sequence[Point]) -> str:
        """SVG path through the points; values outside the bounds are moved to the edge of the chart."""
        inside = ((x, min(max(y, self.y.low), self.y.high)) for x, y in points)
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in inside)

    def hovers(self) -> Iterator[tuple[float, float, str]]:
        """Columns (start, end, text), one per x, that show its values when pointed at."""
        values: dict[float, list[str]] = {}
        for series in self.series:
            for i, (at, value) in enumerate(series.points):
                text = f"{series.name} {self.format(value)}"
                if series.intervals:
                    low, high = series.intervals[i]
                    text += f" [{self.format(low)}, {self.format(high)}]"
                values.setdefault(at, []).append(text)
        every = -(-len(values) // MAX_HOVERS)
        kept = [at for i, at in enumerate(sorted(values)) if i % every == 0 or at in self.marks]
        edges = [self.x.low, *((a + b) / 2 for a, b in itertools.pairwise(kept)), self.x.high]
        for at, (start, end) in zip(kept, itertools.pairwise(edges), strict=True):
            yield self.x(start), self.x(end), "\n".join([counted(at, self.x_name), *values[at]])

    def describe(self) -> str:
        """First and last value of each series, for readers who cannot see the chart."""
        parts = []
        for series in self.series:
            (first_x, first), (last_x, last) = series.points[0], series.points[-1]
            first_text, last_text = self.format(first), self.format(last)
            at = counted(first_x, self.x_name)
            parts.append(f"{series.name}: {first_text} at {at}, {last_text} at {last_x:,.0f}")
        return f"{self.title}. {'; '.join(parts)}"


@dataclass(frozen=True)
class Axis:
    """The x axis of learning curves: the first of `Axis.all`, unless the reader of a page chooses another."""

    key: str
    """Its key in a line of the log."""
    eval_key: str
    """Its key in an evaluation's file."""
    name: str

    @classmethod
    def all(cls, run: RunFiles) -> list[Self]:
        """The axes of a run: env steps and steps, or only steps if training takes no env steps."""
        played = "env/num_steps" in run.steps[-1] if run.steps else all("env_steps" in e for e in run.evals)
        steps = cls("step", "step", "steps")
        return [cls("env/num_steps", "env_steps", "env steps"), steps] if played else [steps]

    def points(self, run: RunFiles, metric: str) -> list[Point]:
        """The logged values of a metric; the last one of a step that was logged more than once."""
        found = {
            line[self.key]: line[metric] for line in run.lines if self.key in line and line.get(metric) is not None
        }
        return sorted(found.items())

    def evaluated(self, evals: Sequence[Line], spec: Spec) -> tuple[list[Point], list[tuple[float, float]]]:
        """The points that evaluations add to a chart, and the 95% interval of each."""
        points, intervals = list[Point](), list[tuple[float, float]]()
        value, interval = spec.evaluated or ("", "")
        for content in evals if spec.evaluated else ():
            total = content["total"]
            if total[value] is not None:
                points.append((self.at_eval(content), float(total[value])))
                low, high = total[interval] or (total[value], total[value])
                intervals.append((float(low), float(high)))
        return points, intervals

    def at_eval(self, content: Line) -> float:
        return float(content[self.eval_key])


def charts(run: RunFiles, axis: Axis) -> Iterator[Chart]:
    """The charts whose metrics the run logged."""
    marks = [axis.at_eval(content) for content in (*run.evals, *run.other_evals)]
    for spec in CHARTS:
        series = []
        for colour, (metric, name) in enumerate(spec.metrics.items(), start=1):
            if points := axis.points(run, metric):
                series.append(Series(name, points, colour, is_noisy=spec.is_noisy))
        for colour, (evals, name) in enumerate(((run.evals, ""), (run.other_evals, "with other settings")), start=2):
            points, intervals = axis.evaluated(evals, spec)
            if points:
                series.append(Series(f"evaluation, {name or evals[-1]['mode']}", points, colour, intervals))
        if series:
            yield Chart(spec, series, marks, axis.name)
