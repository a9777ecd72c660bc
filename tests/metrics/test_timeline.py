"""Idle and overlap fractions on schedules whose answers are known, and the trace file."""

import json
import random
from pathlib import Path

import pytest

from rlinf_lite.metrics import Span, utilization, write_chrome_trace


def alternating(stages: int, rounds: int) -> list[Span]:
    """Env and rollout each work 1 s per stage and round; with two stages one works while the other does."""
    spans = []
    for i in range(rounds * stages):
        start = 2.0 * (i // stages) + i % stages if stages == 2 else 2.0 * i
        spans.append(Span("chunk_step", start, start + 1, "env 0"))
        spans.append(Span("predict", start + 1, start + 2, "rollout 0"))
    return spans


def test_strict_alternation_has_no_overlap() -> None:
    metrics = utilization(alternating(stages=1, rounds=4), phase=(0, 8), step=(0, 10))
    assert metrics == {
        "perf/rollout_idle_frac": pytest.approx(0.5),
        "perf/env_idle_frac": pytest.approx(0.5),
        "perf/overlap_frac": 0.0,
    }


def test_two_stages_overlap_but_for_the_ends() -> None:
    metrics = utilization(alternating(stages=2, rounds=4), phase=(0, 9), step=(0, 9))
    assert metrics["perf/overlap_frac"] == pytest.approx(7 / 8)
    assert metrics["perf/env_idle_frac"] == pytest.approx(1 / 9)


def test_overlap_is_one_where_the_quicker_one_works_only_while_the_slower_does() -> None:
    spans = [Span("chunk_step", 0, 10, "env 0"), Span("predict", 2, 3, "rollout 0"), Span("predict", 5, 6, "rollout 1")]
    metrics = utilization(spans, phase=(0, 10), step=(0, 10))
    assert metrics["perf/overlap_frac"] == pytest.approx(1)
    assert metrics["perf/rollout_idle_frac"] == pytest.approx(0.9)  # two workers, each busy a tenth of the phase


def test_waiting_is_not_busy_even_inside_another_span() -> None:
    spans = [
        Span("generate", 0, 10, "rollout 0"),
        Span("recv_obs", 1, 4, "rollout 0"),
        Span("wait_actions", 5, 6, "rollout 0"),
        Span("run_training", 10, 15, "actor 0"),
    ]
    metrics = utilization(spans, phase=(0, 10), step=(0, 20))
    assert metrics["perf/rollout_idle_frac"] == pytest.approx(0.4)
    assert metrics["perf/actor_idle_frac"] == pytest.approx(0.75)
    assert "perf/env_idle_frac" not in metrics and "perf/overlap_frac" not in metrics


def test_work_outside_the_phase_does_not_count() -> None:
    spans = [Span("render", 8, 20, "env 0"), Span("predict", -5, 2, "rollout 0")]
    metrics = utilization(spans, phase=(0, 10), step=(-5, 20))
    assert metrics["perf/env_idle_frac"] == pytest.approx(0.8)
    assert metrics["perf/rollout_idle_frac"] == pytest.approx(0.8)


def test_fractions_equal_those_of_a_grid() -> None:
    """Second by second, for schedules in which spans lie over each other and outside of the phase."""
    rng = random.Random(0)
    names = [("act", "env 0"), ("wait", "env 0"), ("act", "env 1"), ("act", "rollout 0"), ("recv", "rollout 0")]
    for _ in range(50):
        spans = [
            Span(name, start, start + rng.randint(0, 6), worker)
            for name, worker in names
            for start in rng.choices(range(30), k=4)
        ]
        cells: dict[tuple[str, str], set[int]] = {pair: set() for pair in names}
        for span in spans:
            cells[span.name, span.process] |= set(range(int(span.start), int(span.end)))
        phase = set(range(3, 28))
        env = [(cells["act", "env 0"] - cells["wait", "env 0"]) & phase, cells["act", "env 1"] & phase]
        rollout = (cells["act", "rollout 0"] - cells["recv", "rollout 0"]) & phase
        metrics = utilization(spans, phase=(3, 28), step=(0, 40))
        assert metrics["perf/env_idle_frac"] == pytest.approx(1 - sum(map(len, env)) / 50)
        assert metrics["perf/rollout_idle_frac"] == pytest.approx(1 - len(rollout) / 25)
        smaller = min(len(env[0] | env[1]), len(rollout))
        overlap = len((env[0] | env[1]) & rollout) / smaller if smaller else 0.0
        assert metrics["perf/overlap_frac"] == pytest.approx(overlap)


def test_the_trace_has_a_named_row_per_worker(tmp_path: Path) -> None:
    spans = [
        Span("predict", 101.0, 101.5, "rollout 0"),
        Span("chunk_step", 100.0, 101.0, "env 10"),
        Span("recv_actions", 100.5, 101.25, "env 2"),
    ]
    write_chrome_trace(spans, tmp_path / "timeline" / "step_3.json")
    events = json.loads((tmp_path / "timeline" / "step_3.json").read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(rows.values()) == ["rollout 0", "env 2", "env 10"]
    drawn = {e["name"]: e for e in events if e["ph"] == "X"}
    step = drawn["recv_actions"]
    assert (step["ts"], step["dur"], step["cat"]) == (500_000, 750_000, "waiting")
    assert rows[step["pid"], step["tid"]] == "env 2" and groups[step["pid"]] == "env"
    assert drawn["chunk_step"]["ts"] == 0
    write_chrome_trace([], tmp_path / "empty.json")
