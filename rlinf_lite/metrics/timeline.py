"""Timeline of one step: the spans of its workers as a Chrome trace, and as idle and overlap fractions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from rlinf_lite.file_modes import write_whole
from rlinf_lite.scheduler import Span

Interval = tuple[float, float]

WAITING = ("wait", "recv")
"""Beginnings of the names of spans in which a worker waits, and is not busy."""


def write_chrome_trace(spans: Iterable[Span], path: str | Path, **about: int) -> None:
    """Write a trace that chrome://tracing and https://ui.perfetto.dev open: components as groups, workers as rows.

    Times are in microseconds from the first span's start. `about` (step=...) is added to the trace's metadata.
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
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}))


def utilization(
    spans: Sequence[Span], phase: Interval, step: Interval, pair: tuple[str, str] = ("env", "rollout")
) -> dict[str, float]:
    """`perf/{rollout,env,actor}_idle_frac` and `perf/overlap_frac` of one step.

    A worker is busy while one of its spans runs and none of its waiting spans (named wait..., recv...) does. So a span
    may enclose a whole method if the waits in it have spans too. `phase` is the time of the rollout phase
    (generate_rollouts), `step` that of the whole step.

    * idle: 1 - busy time / window, averaged over a component's workers. The window is `phase` for env and rollout
      and `step` for the actor.
    * overlap: the time of the rollout phase in which at least one worker of each component of `pair` is busy, divided
      by the smaller of the two components' busy times (any worker busy). It is 1 if the quicker component works only
      while the slower one does (ideal pipelining), and 0 if they strictly alternate.

    A component without spans has no entry; overlap needs spans of both; an empty window gives no entries.
    """
    times = np.array([*phase, *step, *(time for span in spans for time in (span.start, span.end))])
    edges, index = np.unique(times, return_inverse=True)  # nothing changes between one edge and the next
    lengths, workers = np.diff(edges), dict.fromkeys(span.process for span in spans)
    counts = {(worker, waits): np.zeros(len(edges), np.int32) for worker in workers for waits in (False, True)}
    for span, start, end in zip(spans, index[4::2], index[5::2], strict=True):
        counts[span.process, _is_waiting(span)][start:end] += 1
    in_phase, in_step = ((edges[:-1] >= start) & (edges[:-1] < end) for start, end in (phase, step))

    metrics: dict[str, float] = {}
    anyone: dict[str, np.ndarray] = {}
    for component, window in (("rollout", in_phase), ("env", in_phase), ("actor", in_step)):
        names = [worker for worker in workers if worker.split(" ")[0] == component]
        if names and window.any():
            busy = np.array([(counts[name, False] > 0) & (counts[name, True] == 0) for name in names])[:, :-1]
            share = (busy @ (lengths * window)).mean() / lengths[window].sum()
            metrics[f"perf/{component}_idle_frac"] = float(1 - share)
            anyone[component] = busy.any(0) & in_phase
    if in_phase.any() and all(component in anyone for component in pair):
        one, other = (anyone[component] for component in pair)
        smaller = min(lengths[one].sum(), lengths[other].sum())
        metrics["perf/overlap_frac"] = float(lengths[one & other].sum() / smaller) if smaller > 0 else 0.0
    return metrics


def _component(span: Span) -> str:
    return span.process.split(" ")[0]


def _is_waiting(span: Span) -> bool:
    return span.name.startswith(WAITING)
