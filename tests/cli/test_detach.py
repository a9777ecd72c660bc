"""Runs that go on without their terminal, and stopping them."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlinf_lite.cli.runs import read_run, writer_of

CommandLine = Callable[[list[str]], int]
SMALL = ["gym_pendulum_ppo_mlp", "cluster.runtime=local", "env.train.num_envs=4", "rollout.num_chunks=8"]
SMALL += ["env.train.max_episode_steps=8", "runner.val_check_interval=-1", "runner.save_interval=1"]
SMALL += ["actor.global_batch_size=16", "actor.micro_batch_size=16"]


def steps_of(directory: Path) -> int:
    run = read_run(directory)
    assert run is not None
    return run.step


def until(condition: Callable[[], object], limit_s: float = 90.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)


@pytest.fixture
def detached(tmp_path: Path, command_line: CommandLine, capfd: pytest.CaptureFixture[str]) -> Iterator[Path]:
    """The directory of a run of 100,000 steps that was detached."""
    settings = ["runner.max_steps=100000", f"runner.logger.log_path={tmp_path}"]
    assert command_line(["train", *SMALL, *settings, "--detach"]) == 0
    (run,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert "stop: " in (said := capfd.readouterr().out) and str(run) in said
    yield run
    writer = writer_of(run / ".lock")
    if writer is not None and writer.is_alive:
        os.kill(writer.process, signal.SIGKILL)


def test_a_detached_run_is_seen_stopped_and_goes_on(
    detached: Path, command_line: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (found := read_run(detached)) is not None and found.status == "running"
    writer = writer_of(detached / ".lock")
    assert writer is not None and os.getsid(writer.process) == writer.process, "of no terminal"
    until(lambda: steps_of(detached) >= 2)
    assert command_line(["stop", str(detached)]) == 0
    said = capfd.readouterr().out
    assert not writer.is_alive and said.startswith("stopped after ") and f"train {detached}" in said
    assert f"stopped after {steps_of(detached)} of" in (detached / "console.log").read_text()
    assert command_line(["stop", str(detached)]) == 1
    assert "does not run: ended after" in capfd.readouterr().err
    steps = steps_of(detached)
    assert command_line(["train", str(detached), f"runner.max_steps={steps + 1}", "--detach"]) == 0
    until(lambda: "finished after" in (detached / "console_2.log").read_text())


def test_a_run_can_be_ended_at_once(detached: Path, command_line: CommandLine) -> None:
    writer = writer_of(detached / ".lock")
    assert writer is not None and command_line(["stop", "--now", str(detached)]) == 0
    assert not writer.is_alive


def test_what_is_wrong_is_said_before_anything_is_detached(
    tmp_path: Path, command_line: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command_line(["train", *SMALL, "actor.optim.lr=fast", "--detach"]) == 2
    assert "actor.optim.lr" in capfd.readouterr().err
    assert command_line(["stop", str(tmp_path / "nope")]) == 1
    assert "no run." in capfd.readouterr().err


def test_a_run_of_another_machine_is_left_alone(
    tmp_path: Path, command_line: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".lock").write_text(f"process {os.getpid()} on elsewhere, since 2026-11-29 10:00:00\n")
    assert command_line(["stop", str(tmp_path)]) == 1
    assert "is written by process" in (said := capfd.readouterr().err) and "of elsewhere. Stop it there" in said
