"""Progress: plain lines off a terminal, a table that fits on one."""

import io

import pytest
from rich.console import Console

from rlinf_lite.metrics import Progress
from rlinf_lite.metrics.live import clock_time, number, sparkline

METRICS = {
    "env/success_once": 0.312,
    "env/return": 14.2,
    "perf/env_steps_per_s": 984.3,
    "train/actor/policy_loss": 0.012,
    "train/actor/approx_kl": 0.008,
    "time/step": 3.1,
    "time/unknown": 1.0,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_plain_line_per_step_off_a_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(244, "run", stream=stream, clock=clock) as progress:
        clock.now = 3.0
        progress.update(1, METRICS)
        progress.message("saved [step] 1")
        clock.now = 8.0
        progress.update(2, {"env/return": float("nan")})
    assert stream.getvalue().splitlines() == [
        "step 1/244  success_once 31.2%  return 14.2  984 env steps/s  loss 0.012  kl 0.008  3.1 s  left 12:09",
        "saved [step] 1",
        "step 2/244  return nan  left 16:08",
    ]


def test_a_resumed_run_counts_only_its_own_steps() -> None:
    clock = Clock()
    progress = Progress(100, "run", start_step=90, stream=io.StringIO(), clock=clock)
    assert progress.time_left_s() is None
    clock.now = 2.0
    progress.update(91, {})
    assert progress.time_left_s() == pytest.approx(18)


@pytest.mark.parametrize("columns", [12, 40, 80, 200])
def test_the_table_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "30")
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    with Progress(10, "a_run", stream=stream, live=True) as progress:
        progress.update(1, METRICS | {"train/actor/grad_norm": float("nan")})
        progress.message("x [y] z")
        table = io.StringIO()
        Console(file=table, width=columns).print(progress._table())
    lines = table.getvalue().splitlines()
    assert max(len(line) for line in lines) <= columns
    assert "x [y] z" in stream.getvalue()
    if columns >= 80:
        assert any("success_once" in line and "31.2%" in line for line in lines)
        assert any("step 1/10" in line for line in lines)


def test_formats() -> None:
    assert [clock_time(t) for t in (0, 751, 3723)] == ["00:00", "12:31", "1:02:03"]
    assert [number(x) for x in (0, 1234.6, 14.2, -0.0123, 1e-6)] == ["0", "1,235", "14.2", "-0.0123", "1.0e-06"]
    assert sparkline([0, 2, float("nan"), 7]) == "▁▃ █"
    assert sparkline([5, 5]) == "▁▁"
