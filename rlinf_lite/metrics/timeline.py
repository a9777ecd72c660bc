"""Who was busy when: spans of one step, as a Chrome trace and as idle and overlap fractions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlinf_lite.scheduler import Span

Interval = tuple[float, float]

WAITING = ("wait", "recv")
"""A worker is not busy in spans whose names start like this."""


def write_chrome_trace(spans: Iterable[Span], path: str | Path, **about: int) -> None:
    """Write a trace that chrome://tracing and https://ui.perfetto.dev open: components as groups, workers as rows.

    Times are in microseconds from the first span's start. `about` (step=...) goes into the trace's metadata.
    """
    path, spans = Path(path), sorted(spans, key=lambda span: (span.start, -span.end))
    origin = spans[0].start if spans else 0.0
    components = {name: pid for pid, name in enumerate(dict.fromkeys(map(_component, spans)), start=1)}

    def by_rank(process: str) -> tuple[int, str]:
        last = process.split(" ")[-1]
        return int(last) if last.isdigit() else 0, process

    rows = sorted({span.process for span in spans}, key=by_rank)
    tids = {row: tid for tid, row in enumerate(rows, start=1)}
    events: list[dict[str, object]] = []
    for component, pid in components.items():
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": component}})
    for process in rows:
        row = {"ph": "M", "pid": components[process.split(" ")[0]], "tid": tids[process]}
        events.append({**row, "name": "thread_name", "args": {"name": process}})
        events.append({**row, "name": "thread_sort_index", "args": {"sort_index": tids[process]}})
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": "waiting" if _is_waiting(span) else "busy",
                "pid": components[_component(span)],
                "tid": tids[span.process],
                "ts": round((span.start - origin) * 1e6, 1),
                "dur": round((span.end - span.start) * 1e6, 1),
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}))
    os.replace(unfinished, path)


def utilization(
    spans: Sequence[Span], phase: Interval, step: Interval, pair: tuple[str, str] = ("env", "rollout")
) -> dict[str, float]:
    """`perf/{rollout,env,actor}_idle_frac` and `perf/overlap_frac` of one step.

    A worker is busy wherever one of its spans runs and none of its waiting ones (named wait..., recv...) does; so a
    span around a whole method is fine as long as the waits in it are timed. `phase` is the rollout phase
    (generate_rollouts), `step` the whole step.

    * idle: 1 - busy time / window, averaged over a component's workers. The window is `phase` for env and rollout
      and `step` for the actor.
    * overlap: of the rollout phase, the time in which at least one worker of each component of `pair` is busy, as a
      share of the smaller of the two components' busy times (any worker busy). 1 where the quicker component only ever
      works while the slower one does (ideal pipelining), 0 where they strictly alternate.

    A component without spans has no entry, and overlap needs both.
    """
    busy = busy_intervals(spans)
    metrics: dict[str, float] = {}
    together: dict[str, list[Interval]] = {}
    for component, window in (("rollout", phase), ("env", phase), ("actor", step)):
        workers = [clip(intervals, window) for process, intervals in busy.items() if process.split(" ")[0] == component]
        if workers and window[1] > window[0]:
            shares = [total_time(intervals) / (window[1] - window[0]) for intervals in workers]
            metrics[f"perf/{component}_idle_frac"] = 1 - sum(shares) / len(shares)
            together[component] = clip(union(interval for intervals in workers for interval in intervals), phase)
    if all(component in together for component in pair):
        one, other = (together[component] for component in pair)
        smaller = min(total_time(one), total_time(other))
        both = total_time(intersection(one, other))
        metrics["perf/overlap_frac"] = both / smaller if smaller > 0 else 0.0
    return metrics


def busy_intervals(spans: Iterable[Span]) -> dict[str, list[Interval]]:
    """Disjoint, sorted intervals in which each worker (`process`) is busy."""
    working: dict[str, list[Interval]] = {}
    waiting: dict[str, list[Interval]] = {}
    for span in spans:
        kind = waiting if _is_waiting(span) else working
        kind.setdefault(span.process, []).append((span.start, span.end))
    return {
        process: difference(union(working.get(process, [])), union(waiting.get(process, [])))
        for process in dict.fromkeys((*working, *waiting))
    }


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as disjoint, sorted intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Times in both; arguments and result are disjoint and sorted."""
    common: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if end > start:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Times in `a` and not in `b`; arguments and result are disjoint and sorted."""
    edges = [float("-inf"), *(edge for interval in b for edge in interval), float("inf")]
    return intersection(a, list(zip(edges[::2], edges[1::2], strict=True)))


def clip(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    return intersection(intervals, [window])


def total_time(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _component(span: Span) -> str:
    return span.process.split(" ")[0]


def _is_waiting(span: Span) -> bool:
    return span.name.startswith(WAITING)
