"""MetaWorld in a run: training on ten tasks, and an evaluation that names its suite."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("metaworld")

SMALL = [
    "cluster.runtime=local",
    "env.task=MT10",
    "env.train.num_envs=4",
    "env.train.max_episode_steps=10",
    "env.eval.num_envs=4",
    "env.eval.num_episodes=10",
    "env.eval.max_episode_steps=10",
    "rollout.num_chunks=8",
    "actor.global_batch_size=32",
    "actor.micro_batch_size=32",
    "runner.max_steps=1",
    "runner.val_check_interval=1",
    "runner.save_interval=1",
]


def test_ten_tasks_are_trained_on_and_evaluated_as_a_suite(
    tmp_path: Path, command_line: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    where = [f"runner.logger.log_path={tmp_path}"]
    assert command_line(["train", "--config-name", "metaworld_ppo_mlp", *SMALL, *where]) == 0
    (run,) = tmp_path.iterdir()
    content = json.loads((run / "eval" / "step_000001.json").read_text())
    assert content["protocol"]["episodes_per_task"] == 1 and len(content["protocol"]["tasks"]) == 10
    assert content["protocol"]["env_options"]["render"] == "fast" and "commit" in content["protocol"]
    assert [row["task_id"] for row in content["groups"]] == ["easy", "medium", "hard"]
    assert "Protocol of the last evaluation" in (run / "report.html").read_text()

    assert command_line(["eval", "--checkpoint", str(run), "--suite", "metaworld-mt1"]) == 2
    assert "there is no suite 'metaworld-mt1'. Did you mean metaworld-mt10" in capsys.readouterr().err
    smaller = ["env.eval.num_episodes=20", "env.eval.max_episode_steps=10"]
    assert command_line(["eval", "--checkpoint", str(run), "--suite", "metaworld-mt10", *smaller]) == 0
    written = json.loads((run / "eval_step_000001_changed.json").read_text())
    said = written["protocol"]
    assert said["suite"] is None and said["ignore_terminations"] is False and said["episodes_per_task"] == 2
    assert "mean of the 3 groups" in capsys.readouterr().out
