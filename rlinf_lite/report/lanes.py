"""The timeline of one step, from the run's Chrome trace: one lane per worker. `templates/drawings.html` draws it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlinf_lite.report.axes import Scale, Tick, inner_ticks, text_width, ticks
from rlinf_lite.report.run_files import Line

ORDER = ("driver", "env", "rollout", "reward", "reference", "critic", "actor")
MIN_WIDTH = 0.8
"""Pixels; a shorter task is merged with its neighbours."""
ZOOM_DECISIONS = 12
NAME_SIZE = 12.5
"""Font size of the lanes' names, in pixels."""


@dataclass(frozen=True)
class Task:
    """One span of a worker's work or waiting, in seconds of the trace."""

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
        """CSS classes: the component's colour, a lighter shade for odd stages, and faint for waiting."""
        _, is_stage, stage = self.name.rpartition("stage ")
        odd = " odd" if is_stage and stage.isdigit() and int(stage) % 2 else ""
        return f"t-{self.component}{odd}{' waiting' if self.waiting else ''}"


@dataclass(frozen=True)
class Bar:
    """A task as a rectangle; `left` and `width` are in pixels."""

    look: str
    left: float
    width: float
    title: str
    label: str = ""


class Timeline:
    """Places of all tasks from `start` to `end` in a drawing that is `width` pixels wide."""

    width, right, label_gap = 1120, 1112, 10
    lane_height, lane_pitch, axis_height = 22, 30, 24

    def __init__(self, tasks: list[Task], start: float, end: float, label: str) -> None:
        self.label = label
        self.left = 1.5 * self.label_gap + max(text_width(task.lane, NAME_SIZE) for task in tasks)
        self._x = Scale(start, end, self.left, self.right)
        lanes: dict[str, list[Task]] = {task.lane: [] for task in tasks}
        for task in tasks:
            if task.end > start and task.start < end:
                lanes[task.lane].append(task)
        shortest = MIN_WIDTH * (end - start) / self.width
        self.lanes = {lane: [self._bar(task) for task in _merged(found, shortest)] for lane, found in lanes.items()}
        unit, factor = ("s", 1.0) if end - start >= 2 else ("ms", 1000.0)
        span = Scale(0.0, (end - start) * factor, self.left, self.right)
        self.ticks: list[Tick] = ticks(inner_ticks(span.low, span.high, 8), span, unit=f" {unit}")

    def _bar(self, task: Task) -> Bar:
        left, right = self._x(max(task.start, self._x.low)), self._x(min(task.end, self._x.high))
        width = max(right - left, 0.4)
        times = f"{task.count} times, " if task.count > 1 else ""
        title = f"{task.lane}: {task.name}\n{times}{1000 * (task.end - task.start):,.1f} ms"
        labelled = task.component == "driver" and width > text_width(f" {task.name} ")
        return Bar(task.look, left, width, title, task.name if labelled else "")


def read_tasks(trace: Line) -> list[Task]:
    """The tasks of a trace, ordered by lane and start. Lanes are ordered by component (see ORDER), then by rank."""
    events = trace["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tasks = [
        Task(lanes[e["tid"]], e["name"], e["cat"] == "waiting", e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X"
    ]

    def place(task: Task) -> tuple[int, int, str, float, float]:
        component, _, rank = task.lane.partition(" ")
        order = ORDER.index(component) if component in ORDER else len(ORDER)
        return order, int(rank) if rank.isdigit() else 0, task.lane, task.start, -task.end

    return sorted(tasks, key=place)


def zoomed_in(tasks: list[Task]) -> Timeline | None:
    """Timeline of a dozen decisions from the middle of the rollout phase; None where it has fewer."""
    acts = sorted((task for task in tasks if task.component == "env" and not task.waiting), key=lambda task: task.start)
    num_shown = ZOOM_DECISIONS * len({task.lane for task in acts})
    window = acts[len(acts) // 2 :][:num_shown]
    if not window or len(window) < num_shown:
        return None
    label = f"{ZOOM_DECISIONS} decisions per env worker, lane by lane"
    return Timeline(tasks, window[0].start, window[-1].end, label)


def _merged(tasks: Iterable[Task], shortest: float) -> list[Task]:
    """The tasks of a lane. Short ones are joined to the one before if both look alike and no visible gap is between."""
    merged: list[Task] = []
    for task in tasks:
        last = merged[-1] if merged else None
        alike = last is not None and last.look == task.look
        if last and alike and task.start - last.end < shortest and task.end - task.start < shortest:
            name = last.name if last.name == task.name else f"{last.name.split(' stage ')[0]}, ..."
            merged[-1] = Task(last.lane, name, last.waiting, last.start, max(last.end, task.end), last.count + 1)
        else:
            merged.append(task)
    return merged
