"""`rlinf-lite runs`: what there is, how far it is, what it reached."""

import fcntl
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_lite.cli.runs import runs


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, steps: int, evals: list[dict[str, Any]], *events: str, max_steps: int | None = 4) -> Path:
        run = tmp_path / "results" / name
        run.mkdir(parents=True)
        lines = [{"step": step, "time": 1.0, "time/step": 1.0} for step in range(1, steps + 1)] + evals
        lines.sort(key=lambda line: float(line["step"]))
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        # what a config says is not what is planned: epochs may end a run before
        (run / "config.yaml").write_text(json.dumps({"runner": {"max_steps": -1, "max_epochs": 2}}))
        if max_steps is not None:
            (run / "versions.json").write_text(json.dumps({"steps": str(max_steps)}))
        (run / "events.jsonl").write_text("".join(json.dumps({"event": event}) + "\n" for event in events))
        os.utime(run / "metrics.jsonl", (len(list(run.parent.iterdir())),) * 2)
        return run

    return make


def evaluated(step: int, **values: float | None) -> dict[str, Any]:
    return {"step": step, "time": 1.0, "eval/num_episodes": 20, **{f"eval/{name}": x for name, x in values.items()}}


def test_runs_and_what_became_of_them(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make("better", 4, [evaluated(0, success_once=0.25), evaluated(4, success_once=0.5)], "running", "finished")
    make("without_success", 2, [evaluated(2, success_once=None) | {"eval/return": -3.25}], "running", "failed")
    make("plain", 4, [])
    make("killed", 3, [], "running")
    make("resumed", 3, [], "running", "stopped", "running", max_steps=None)
    held = make("held", 1, [], "running")
    (tmp_path / "results" / "notes").mkdir()
    with (held / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}, since 2026-11-23 10:00:00\n")
        lock.flush()
        assert runs(["--json"]) == 0
    found = {Path(run["directory"]).name: run for run in json.loads(capsys.readouterr().out)}
    statuses = {name: run["status"] for name, run in found.items()}
    assert statuses == {
        "better": "finished",
        "without_success": "failed",
        "plain": "finished",
        "killed": "ended",
        "resumed": "ended",
        "held": "running",
    }
    assert runs([]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1][:8] == ["finished", "4", "of", "4", "success", "25.0%", "50.0%", "20"]
    assert rows[1][-1] == "results/better"
    assert rows[2][4:8] == ["return", "-", "-3.25", "20"]
    assert (rows[5][:3], rows[5][-1]) == (["ended", "3", "return"], "results/resumed")
    assert rows[6][0] == "ended"  # its lock is nobody's any more


def test_eighty_columns_are_enough(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's directory is a word that can be copied, and everything else one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    name = "gym_pendulum_ppo_mlp-Pendulum-v1-seed0-20261124-220000-3f2a"
    make(name, 4, [evaluated(0, success_once=0.25), evaluated(4, success_once=0.5)], "running", "finished")
    assert runs([]) == 0
    titles, row, directory = capsys.readouterr().out.splitlines()
    assert directory.split() == [f"results/{name}"] and titles.startswith("status ") and "directory" not in titles
    assert row.startswith("finished  4 of 4  success  25.0%   50.0%") and max(map(len, (titles, row, directory))) <= 80


def test_what_cannot_be_listed(
    make: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert runs(["elsewhere"]) == 2 and capsys.readouterr().err.startswith("elsewhere: no such directory")
    assert runs([]) == 0 and capsys.readouterr().out.startswith(
        "no runs in results: `rlinf-lite train tabletop_ppo_vla` makes"
    )
    assert runs(["--json"]) == 0 and capsys.readouterr().out == "[]\n"
    broken = make("broken", 1, [])
    (broken / "config.yaml").write_text("{")
    assert runs([]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("no runs in results") and "results/broken: cannot be read (while parsing" in said.err
