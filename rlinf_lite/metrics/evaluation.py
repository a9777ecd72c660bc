"""Statistics of finished episodes: metrics of a training step, and the summary of an evaluation with intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any, Protocol

Interval = tuple[float, float]

Z_975 = 1.959963984540054
T_975 = {1: 12.706204736, 2: 4.302652730, 3: 3.182446305, 4: 2.776445105}  # by degrees of freedom


class EpisodeLike(Protocol):
    """The fields of an episode record that are used here; success is None if the environment does not report it."""

    @property
    def env_id(self) -> int: ...
    @property
    def task_id(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def return_(self) -> float: ...
    @property
    def success_once(self) -> bool | None: ...
    @property
    def success_at_end(self) -> bool | None: ...
    @property
    def steps_to_success(self) -> int | None: ...


@dataclass(frozen=True)
class TaskSummary:
    """Summary of one task's episodes. Success is None if the environment does not report it; intervals are 95%."""

    task_id: str
    num_episodes: int
    num_successes: int | None
    success_once: float | None
    success_interval: Interval | None
    success_at_end: float | None
    return_mean: float
    return_interval: Interval | None
    """None for a single episode."""
    episode_len: float
    steps_to_success: float | None
    """Mean env steps until the first success, of the episodes that had one."""


@dataclass(frozen=True)
class EvalSummary:
    """Summary of a fixed number of seeded episodes: all together, by task, and one by one."""

    mode: str
    """How actions were chosen: greedy or sampled."""
    total: TaskSummary
    tasks: tuple[TaskSummary, ...]
    episodes: tuple[dict[str, object], ...]
    groups: tuple[TaskSummary, ...] = ()
    """Summaries of sets of tasks, such as difficulties; every episode counts once."""
    protocol: Mapping[str, Any] = field(default_factory=dict)
    """The settings and the code of the evaluation, which another one must share to be comparable."""

    def headline(self) -> str:
        """The result in one line: `success 56.4% [50.6, 62.1] (158/280), greedy`, or the mean return if success is not
        reported."""
        return f"{_headline(self.total)}, {self.mode}"

    def metrics(self) -> dict[str, float]:
        return {f"eval/{name}": value for name, value in _metrics(self.total).items()}

    def task_lines(self, before: EvalSummary | None = None) -> list[str]:
        """One line per task and per group of tasks, in the format of the headline; if there is an earlier evaluation
        `before`, with its result and this one's."""
        earlier = () if before is None or before is self else (*before.tasks, *before.groups)
        was = {task.task_id: f"{_headline(task)} -> " for task in earlier}
        rows = (*self.tasks, *self.groups)
        width = max(len(task.task_id) for task in rows) + 1
        lines = [f"{task.task_id + ':':<{width}} {was.get(task.task_id, '')}{_headline(task)}" for task in rows]
        mean = self.mean_of_groups
        return lines if mean is None else [*lines, f"mean of the {len(self.groups)} groups: success {100 * mean:.1f}%"]

    @property
    def mean_of_groups(self) -> float | None:
        """Mean success of the groups, with equal weights whatever their numbers of episodes, as in some papers; None
        without groups or success."""
        rates = [group.success_once for group in self.groups if group.success_once is not None]
        return fmean(rates) if rates else None

    def to_json(self, **when: int) -> str:
        """The evaluation as JSON: first `when` (step=..., env_steps=...), then headline, tasks and episodes."""
        first = {"headline": self.headline(), "protocol": dict(self.protocol), "mean_of_groups": self.mean_of_groups}
        content = {**when, **first, **asdict(self)}
        return json.dumps(content, indent=1) + "\n"


def summarize_episodes(
    records: Iterable[EpisodeLike],
    mode: str,
    groups: Mapping[str, Sequence[str]] | None = None,
    protocol: Mapping[str, Any] | None = None,
    all_judged: bool = False,
) -> EvalSummary:
    """Summarise an evaluation; the order of `records` does not matter. Raises ValueError where there are none.

    `groups`: sets of tasks by name; a set is used if the evaluation has some of its episodes in it, but not all. An
    episode that does not report success counts as a failure if any episode reports it. With `all_judged`, success is
    instead reported only for a task or group whose episodes all report it.
    """
    records = sorted(records, key=lambda record: (record.task_id, record.seed, record.env_id))
    if not records:
        raise ValueError("no finished episode to summarise: the evaluation ended before any episode did.")
    task_ids = sorted({record.task_id for record in records})
    others = None if all_judged else records
    rows = [_summarize(task_id, [r for r in records if r.task_id == task_id], others) for task_id in task_ids]
    members = {name: [r for r in records if r.task_id in tasks] for name, tasks in (groups or {}).items()}
    sets = [_summarize(name, part, others) for name, part in members.items() if 0 < len(part) < len(records)]
    names = ("task_id", "seed", "length", "return_", "success_once", "success_at_end", "steps_to_success")
    episodes = tuple({name.rstrip("_"): getattr(record, name) for name in names} for record in records)
    total = _summarize("all", records, others)
    return EvalSummary(mode, total, tuple(rows), episodes, tuple(sets), dict(protocol or {}))


def env_metrics(records: Iterable[EpisodeLike]) -> dict[str, float]:
    """Metrics of the episodes that ended: `env/{success_once,success_at_end,return,episode_len,reward,num_episodes}`.

    Only `num_episodes` if none ended; no success if the environment does not report it. `reward` is per env step.
    """
    records = list(records)
    values = _metrics(_summarize("all", records, records)) if records else {"num_episodes": 0.0}
    return {f"env/{name}": value for name, value in values.items()}


def wilson_interval(num_successes: int, num_trials: int) -> Interval:
    """95% interval of a success rate (Wilson 1927). It lies inside [0, 1], and holds near its ends and for few
    trials."""
    rate, z2 = num_successes / num_trials, Z_975**2
    centre = (rate + z2 / (2 * num_trials)) / (1 + z2 / num_trials)
    spread = Z_975 * math.sqrt(rate * (1 - rate) / num_trials + z2 / (4 * num_trials**2)) / (1 + z2 / num_trials)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def mean_interval(values: Sequence[float]) -> Interval:
    """95% interval of a mean, by Student's t; needs at least two values."""
    half = student_t_975(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def student_t_975(dof: int) -> float:
    """0.975 quantile of Student's t, to 1e-3 (Abramowitz & Stegun 26.7.5; a table below five degrees of freedom)."""
    if dof in T_975:
        return T_975[dof]
    z = Z_975
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / dof**power for power, term in enumerate(terms, start=1))


def _summarize(task_id: str, records: Sequence[EpisodeLike], others: Sequence[EpisodeLike] | None) -> TaskSummary:
    """Summary of the episodes of a task or group. An episode that does not report success counts as a failure if any of
    the `others` reports it; if `others` is None, success is reported only if all `records` report it."""
    returns = [float(record.return_) for record in records]
    read, found = (all, records) if others is None else (any, others)
    has_success = read(record.success_once is not None for record in found)
    has_success_at_end = read(record.success_at_end is not None for record in found)
    once = [bool(record.success_once) for record in records] if has_success else []
    steps = [record.steps_to_success for record in records if record.steps_to_success is not None]
    at_end = [bool(record.success_at_end) for record in records] if has_success_at_end else []
    return TaskSummary(
        task_id=task_id,
        num_episodes=len(records),
        num_successes=sum(once) if once else None,
        success_once=fmean(once) if once else None,
        success_interval=wilson_interval(sum(once), len(once)) if once else None,
        success_at_end=fmean(at_end) if at_end else None,
        return_mean=fmean(returns),
        return_interval=mean_interval(returns) if len(returns) > 1 else None,
        episode_len=fmean(record.length for record in records),
        steps_to_success=fmean(steps) if steps else None,
    )


def _metrics(summary: TaskSummary) -> dict[str, float]:
    values = {
        "success_once": summary.success_once,
        "success_at_end": summary.success_at_end,
        "return": summary.return_mean,
        "episode_len": summary.episode_len,
        "reward": summary.return_mean / summary.episode_len if summary.episode_len else 0.0,
        "num_episodes": float(summary.num_episodes),
    }
    return {name: value for name, value in values.items() if value is not None}


def _headline(summary: TaskSummary) -> str:
    if summary.success_once is not None and summary.success_interval is not None:
        low, high = (100 * end for end in summary.success_interval)
        counts = f"({summary.num_successes}/{summary.num_episodes})"
        return f"success {100 * summary.success_once:.1f}% [{low:.1f}, {high:.1f}] {counts}"
    interval = ""
    if summary.return_interval is not None:
        low, high = summary.return_interval
        interval = f" [{_number(low)}, {_number(high)}]"
    episodes = "1 episode" if summary.num_episodes == 1 else f"{summary.num_episodes} episodes"
    return f"return {_number(summary.return_mean)}{interval} ({episodes})"


def _number(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
