"""Which curves a report shows: a table of charts, each from the metrics that the run has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_lite.report.line_chart import Chart, Point, Series
from rlinf_lite.report.run_files import RunFiles


@dataclass(frozen=True)
class _Spec:
    title: str
    metrics: Mapping[str, str]
    """Name in the legend by metric."""
    unit: str = ""
    is_percent: bool = False
    bounds: tuple[float | None, float | None] = (None, None)
    evaluated: tuple[str, str] | None = None
    """The evaluations' value and interval, drawn over the training curve."""


CHARTS = (
    _Spec(
        "Success", {"env/success_once": "training"}, "of episodes", True, (0, 1), ("success_once", "success_interval")
    ),
    _Spec("Reward", {"rollout/all_rewards": "training"}, "per response"),
    _Spec("Response length", {"rollout/response_length": "training"}, "tokens", bounds=(0, None)),
    _Spec("Distance to the reference", {"rollout/ref_kl": "KL", "train/actor/ref_kl": "KL"}, "nats per token"),
    _Spec("Return", {"env/return": "training"}, "per episode", evaluated=("return_mean", "return_interval")),
    _Spec("Imitation loss", {"train/actor/sft_loss": "imitation loss"}),
    _Spec("Policy loss", {"train/actor/policy_loss": "policy loss"}),
    _Spec("KL divergence", {"train/actor/approx_kl_k3": "KL"}, "nats, old to new policy"),
    _Spec("Clipped positions", {"train/actor/clip_fraction": "clipped"}, "of all", True, (0, 1)),
    _Spec("Entropy", {"train/actor/entropy": "entropy"}, "nats per position"),
    _Spec("Value loss", {"train/critic/value_loss": "value loss"}),
    _Spec("Explained variance", {"train/critic/explained_variance": "explained"}, "of returns", bounds=(-1, 1)),
    _Spec("Gradient norm", {"train/actor/grad_norm": "gradient norm"}, "before clipping"),
    _Spec("Learning rate", {"train/actor/lr": "learning rate"}, bounds=(0, None)),
    _Spec("Throughput", {"perf/env_steps_per_s": "throughput"}, "env steps / s", bounds=(0, None)),
    _Spec("Throughput", {"perf/samples_per_s": "throughput"}, "samples / s", bounds=(0, None)),
    _Spec("Throughput", {"perf/tokens_per_s": "throughput"}, "tokens / s", bounds=(0, None)),
    _Spec(
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


def charts(run: RunFiles) -> Iterator[Chart]:
    """The charts of those metrics that the run logged, over env steps (over steps, where training takes none)."""
    played = not run.steps or "env/num_steps" in run.steps[-1]
    x_key, x_name = ("env/num_steps", "env steps") if played else ("step", "steps")
    marks = tuple(_when(content, x_key) for content in run.evals)
    for spec in CHARTS:
        series = [
            Series(name, points, colour)
            for colour, (metric, name) in enumerate(spec.metrics.items(), start=1)
            if (points := _points(run, metric, x_key))
        ]
        series += _evaluations(run, spec, x_key)
        if series:
            yield Chart(spec.title, series, spec.unit, spec.is_percent, spec.bounds, marks, x_name)


def _points(run: RunFiles, metric: str, x_key: str) -> list[Point]:
    """Of a step logged more than once, the last."""
    found = {line[x_key]: line[metric] for line in run.lines if x_key in line and line.get(metric) is not None}
    return sorted(found.items())


def _evaluations(run: RunFiles, spec: _Spec, x_key: str) -> list[Series]:
    if spec.evaluated is None:
        return []
    value, interval = spec.evaluated
    totals = [(_when(content, x_key), content["total"]) for content in run.evals]
    totals = [(x, total) for x, total in totals if total[value] is not None]
    if not totals:
        return []
    points = [(x, float(total[value])) for x, total in totals]
    intervals = [tuple(total[interval] or (total[value], total[value])) for _, total in totals]
    return [Series(f"evaluation, {run.evals[-1]['mode']}", points, 2, intervals)]


def _when(content: dict[str, Any], x_key: str) -> float:
    return float(content["env_steps" if x_key == "env/num_steps" else "step"])
