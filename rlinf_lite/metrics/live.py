"""Progress of a run: a live table on a terminal, otherwise one plain line per step."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TextIO

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

HISTORY = 16
"""Number of values in a sparkline, and of steps from which the time left is estimated."""

SPARKS = "▁▂▃▄▅▆▇█"


def percent(value: float) -> str:
    return f"{100 * value:.1f}%" if math.isfinite(value) else str(value)


def number(value: float) -> str:
    """A number with about three digits, without an exponent where possible."""
    size = abs(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-4 else f"{value:.1e}"


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 600 else clock_time(value)


def clock_time(value: float) -> str:
    """Seconds as a clock shows them: `12:31`, `1:02:03`."""
    minutes, secs = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes:02}:{secs:02}"


@dataclass(frozen=True)
class Headline:
    """A metric that progress shows."""

    key: str
    label: str
    show: Callable[[float], str] = number
    line: str | None = None
    """Its template in a plain line, for example `kl {}`; None: only in the table."""


HEADLINES = (
    Headline("env/success_once", "success_once", percent, "success_once {}"),
    Headline("env/return", "return", number, "return {}"),
    Headline("env/episode_len", "episode_len"),
    Headline("eval/success_once", "eval success_once", percent, "eval success_once {}"),
    Headline("eval/return", "eval return", number, "eval return {}"),
    Headline("rollout/rewards", "reward", number, "reward {}"),
    Headline("rollout/response_length", "response length"),
    Headline("perf/tokens_per_s", "tokens/s", number, "{} tokens/s"),
    Headline("perf/env_steps_per_s", "env steps/s", number, "{} env steps/s"),
    Headline("perf/overlap_frac", "overlap", percent),
    Headline("perf/rollout_idle_frac", "rollout idle", percent),
    Headline("perf/env_idle_frac", "env idle", percent),
    Headline("train/actor/sft_loss", "sft loss", number, "loss {}"),
    Headline("perf/samples_per_s", "samples/s", number, "{} samples/s"),
    Headline("train/actor/policy_loss", "policy loss", number, "loss {}"),
    Headline("train/critic/critic_loss", "critic loss", number, "critic loss {}"),
    Headline("train/actor/teacher_kl", "KL to the teacher", number, "teacher_kl {}"),
    Headline("train/actor/approx_kl", "kl", number, "kl {}"),
    Headline("train/actor/clip_fraction", "clipped", percent),
    Headline("train/actor/entropy", "entropy"),
    Headline("train/actor/grad_norm", "grad norm"),
    Headline("train/critic/value_loss", "value loss"),
    Headline("train/critic/explained_variance", "explained variance"),
    Headline("time/generate_rollouts", "rollout time", seconds),
    Headline("time/training", "training time", seconds),
    Headline("time/step", "step time", seconds, "{}"),
)


class Progress:
    """Progress display of a run of `total_steps` steps, of which `start_step` were done before (a resumed run).

    A context manager. `live=None` shows the table if `stream` is a terminal.
    """

    def __init__(
        self,
        total_steps: int,
        run_name: str,
        *,
        start_step: int = 0,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.run_name = run_name
        self.step = start_step

        self._stream = stream
        self._clock = clock
        self._started = self._updated = clock()
        self._durations: deque[float] = deque(maxlen=HISTORY)
        self._values: dict[str, deque[float]] = {headline.key: deque(maxlen=HISTORY) for headline in HEADLINES}
        self._lock = Lock()  # the table is drawn by a thread of its own

        console = Console(file=stream)
        show_live = console.is_terminal and not console.is_dumb_terminal if live is None else live
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=1) if show_live else None

    def __enter__(self) -> Progress:
        self._started = self._updated = self._clock()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` steps are done, with the flat `metrics` of the last; unknown and missing ones are
        ignored."""
        with self._lock:
            now = self._clock()
            if step > self.step:
                self._durations.append((now - self._updated) / (step - self.step))
            self.step, self._updated = step, now
            for key, history in self._values.items():
                if key in metrics:
                    history.append(float(metrics[key]))
        if self._live is not None:
            self._live.refresh()
        else:
            parts = [f"step {self.step}/{self.total_steps}"]
            for headline in HEADLINES:
                if headline.line is not None and headline.key in metrics:
                    parts.append(headline.line.format(headline.show(float(metrics[headline.key]))))
            left = self.time_left_s()
            self.message("  ".join([*parts, *([] if left is None else [f"left {clock_time(left)}"])]))

    def start_clock(self) -> None:
        """Start timing the next step now; work before this call counts for no step."""
        with self._lock:
            self._updated = self._clock()

    def message(self, text: str) -> None:
        """Print a line: above the table, or between the plain lines."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream or sys.stdout, flush=True)

    def time_left_s(self) -> float | None:
        """Seconds for the remaining steps at the pace of the last ones; None before the first step."""
        if not self._durations:
            return None
        return (self.total_steps - self.step) * sum(self._durations) / len(self._durations)

    def _table(self) -> RenderableType:
        """The panel: steps and times, then the headlines that have values, in two columns."""
        with self._lock:
            left, now = self.time_left_s(), self._clock()
            times = f"{clock_time(now - self._started)} elapsed"
            if left is not None:
                times += f", {clock_time(max(0.0, left - (now - self._updated)))} left"
            head = Table.grid(padding=(0, 2), expand=True)
            head.add_column(no_wrap=True)
            head.add_column(ratio=1)
            head.add_column(no_wrap=True)
            bar = ProgressBar(total=max(1, self.total_steps), completed=self.step)
            head.add_row(Text(f"step {self.step}/{self.total_steps}", style="bold"), bar, Text(times))

            shown = [headline for headline in HEADLINES if self._values[headline.key]]
            half = (len(shown) + 1) // 2
            blocks = []
            for block in (shown[:half], shown[half:]):
                grid = Table.grid(padding=(0, 1))
                grid.add_column(no_wrap=True, min_width=18)
                grid.add_column(no_wrap=True, justify="right", min_width=9)
                grid.add_column(no_wrap=True, width=HISTORY)
                for headline in block:
                    values = self._values[headline.key]
                    last = Text(headline.show(values[-1]), style="bold" if math.isfinite(values[-1]) else "bold red")
                    grid.add_row(Text(headline.label), last, Text(sparkline(values), style="cyan"))
                blocks += [grid] if block else []
        parts: list[RenderableType] = [head]
        if blocks:
            parts += [Text(""), Columns(blocks, padding=(0, 4))]
        return Panel(Group(*parts), title=Text(self.run_name), title_align="left", box=box.ROUNDED, padding=(0, 1))


def sparkline(values: Iterable[float]) -> str:
    """A bar of one character per value, scaled between the smallest and the largest; a space for nan and inf."""
    values = list(values)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)
