"""The timeline of one step as inline SVG: one lane per worker, from the run's Chrome trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from rlinf_lite.report.axes import Scale, inner_ticks, tick_labels
from rlinf_lite.report.run_files import Line

WIDTH, LEFT, RIGHT = 1120, 84, 8
LANE, LANE_GAP, AXIS = 22, 8, 24
ORDER = ("driver", "env", "rollout", "reward", "reference", "critic", "actor")
MIN_WIDTH = 0.8
"""Pixels: what is shorter is merged with its neighbours."""
ZOOM_DECISIONS = 12
CHARACTER = 6.5
"""Pixels, about: driver phases that are wide enough are labelled."""


@dataclass(frozen=True)
class Task:
    """What a worker did, in seconds of the trace."""

    lane: str
    name: str
    waiting: bool
    start: float
    end: float
    count: int = 1

    @property
    def component(self) -> str:
        return self.lane.split(" ")[0]

    @property
    def look(self) -> str:
        """CSS classes: the component's colour, with a lighter shade for odd stages."""
        _, is_stage, stage = self.name.rpartition("stage ")
        return f"t-{self.component}" + (" odd" if is_stage and stage.isdigit() and int(stage) % 2 else "")


def read_tasks(trace: Line) -> list[Task]:
    """The trace's events by lane and start, env first and in the order of ranks."""
    events = trace["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tasks = [
        Task(lanes[e["tid"]], e["name"], e["cat"] == "waiting", e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X"
    ]
    return sorted(tasks, key=lambda task: (_lane_key(task.lane), task.start, -task.end))


def draw_step(tasks: list[Task]) -> str:
    """All of the step."""
    return _draw(tasks, min(task.start for task in tasks), max(task.end for task in tasks), "One step, lane by lane")


def draw_zoom(tasks: list[Task]) -> str:
    """A dozen decisions from the middle of the rollout phase; nothing where it has fewer than that."""
    acts = sorted((task for task in tasks if task.component == "env" and not task.waiting), key=lambda task: task.start)
    lanes = len({task.lane for task in acts})
    first = len(acts) // 2
    window = acts[first : first + ZOOM_DECISIONS * lanes]
    if not lanes or len(window) < ZOOM_DECISIONS * lanes:
        return ""
    return _draw(tasks, window[0].start, window[-1].end, f"{ZOOM_DECISIONS} decisions per env worker, lane by lane")


def _draw(tasks: list[Task], start: float, end: float, label: str) -> str:
    lanes = list(dict.fromkeys(task.lane for task in tasks))
    x = Scale(start, end, LEFT, WIDTH - RIGHT)
    bottom = len(lanes) * (LANE + LANE_GAP)
    parts = [_axis(x, bottom)]
    for i, lane in enumerate(lanes):
        top = i * (LANE + LANE_GAP)
        parts.append(f'<text x="{LEFT - 10}" y="{top + LANE - 7}" class="end lane">{escape(lane)}</text>')
        parts.append(f'<path class=rail d="M{LEFT} {top}h{WIDTH - LEFT - RIGHT}v{LANE}h{-(WIDTH - LEFT - RIGHT)}z"/>')
        inside = [task for task in tasks if task.lane == lane and task.end > start and task.start < end]
        parts += [_bar(task, x, top) for task in _merged(inside, MIN_WIDTH * (end - start) / WIDTH)]
    return (
        f'<div class=scroll><svg class=lanes viewBox="0 0 {WIDTH} {bottom + AXIS}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg></div>'
    )


def _merged(tasks: Iterable[Task], shortest: float) -> list[Task]:
    """Joins a short task with the one before where they look alike and nothing visible lies between."""
    merged: list[Task] = []
    for task in tasks:
        last = merged[-1] if merged else None
        alike = last is not None and (last.look, last.waiting) == (task.look, task.waiting)
        if last and alike and task.start - last.end < shortest and task.end - task.start < shortest:
            name = last.name if last.name == task.name else f"{last.name.split(' stage ')[0]}, ..."
            merged[-1] = Task(last.lane, name, last.waiting, last.start, max(last.end, task.end), last.count + 1)
        else:
            merged.append(task)
    return merged


def _bar(task: Task, x: Scale, top: float) -> str:
    left, right = x(max(task.start, x.low)), x(min(task.end, x.high))
    width = max(right - left, 0.4)
    times = f"{task.count} times, " if task.count > 1 else ""
    title = f"{task.lane}: {task.name}\n{times}{1000 * (task.end - task.start):,.1f} ms"
    look = f"{task.look} waiting" if task.waiting else task.look
    bar = (
        f'<rect class="{look}" x="{left:.2f}" y="{top}" width="{width:.2f}" height="{LANE}">'
        f"<title>{escape(title)}</title></rect>"
    )
    if task.component == "driver" and width > CHARACTER * (len(task.name) + 2):
        bar += f'<text x="{left + CHARACTER:.1f}" y="{top + LANE - 7}" class="inbar">{escape(task.name)}</text>'
    return bar


def _axis(x: Scale, bottom: float) -> str:
    span = x.high - x.low
    unit, factor = ("s", 1.0) if span >= 2 else ("ms", 1000.0)
    ticks = inner_ticks(0.0, span * factor, 8)
    parts = []
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        at = x(x.low + tick / factor)
        anchor = "end" if at > WIDTH - RIGHT - 20 else "mid"
        parts.append(f'<path class=grid d="M{at:.1f} 0V{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 14}" class="{anchor}">{label} {unit}</text>')
    return "".join(parts)


def _lane_key(lane: str) -> tuple[int, int, str]:
    component, _, rank = lane.partition(" ")
    order = ORDER.index(component) if component in ORDER else len(ORDER)
    return order, int(rank) if rank.isdigit() else 0, lane
