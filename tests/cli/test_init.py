"""`rlinf-lite init`: files of one's own that train as they are."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf_lite.cli.init import content_of, train_command


def test_what_is_written_trains(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command_line: Callable[[list[str]], int],
) -> None:
    """An environment and a policy beside the command, in one run."""
    monkeypatch.chdir(tmp_path)
    assert command_line(["init", "env", "my_task"]) == 0 and command_line(["init", "policy", "squash"]) == 0
    written = capsys.readouterr().out
    assert f"  {train_command('env', 'my_task')}\n" in written and "python squash.py" in written
    small = ["env.train.num_envs=8", "rollout.num_chunks=8", "rollout.pipeline_stage_num=1", "runner.max_steps=2"]
    small += ["actor.global_batch_size=64", "runner.val_check_interval=-1", "runner.save_interval=-1"]
    small += ["cluster.component_placement={actor: 0, rollout: 0, env: 0}", "cluster.runtime=local"]
    command = [*train_command("env", "my_task").split()[1:], *train_command("policy", "squash").split()[3:], *small]
    script = tmp_path / "bin" / "rlinf-lite"  # as pip installs it: Python's own path has its directory, not ours
    script.parent.mkdir()
    script.write_text("import sys\nfrom rlinf_lite.cli import main\nsys.exit(main())\n")
    done = subprocess.run([sys.executable, script, *command], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "finished after 2 of 2 steps" in done.stdout


def test_names_are_ones_own() -> None:
    env, policy = content_of("env", "my_task"), content_of("policy", "squash")
    assert '@register_env("my_task")\nclass MyTask(EnvCard)' in env and "check_env(MyTask)" in env
    assert 'tasks = {"PuckPush"' in env and "env.id=my_task:MyTask env.task=PuckPush" in env
    assert "class Squash(GaussianPolicy)" in policy and "check_policy(Squash, spec" in policy
    assert len(policy.splitlines()) < 50 and "custom_policy.py in examples/embodiment of rlinf_lite" in policy
    for text in (env, policy.replace("custom_policy.py in examples/embodiment", "")):
        assert "custom_" not in text and "examples" not in text and "StatePolicy" not in text
        compile(text, "written", "exec")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("3d", "not a Python identifier"),
        ("my-env", "not a Python identifier"),
        ("class", "not a Python identifier"),
        ("_", "not a Python identifier"),
        ("tabletop", "name of an environment"),
        ("numpy", "name of a module"),
    ],
)
def test_names_that_cannot_be(
    name: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command_line: Callable[[list[str]], int],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line(["init", "env", name]) == 2
    assert said in capsys.readouterr().err and os.listdir(tmp_path) == []


def test_what_is_there_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command_line: Callable[[list[str]], int],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("x = 1\n")
    assert command_line(["init", "policy", "mine"]) == 2
    assert "mine.py exists already" in capsys.readouterr().err and (tmp_path / "mine.py").read_text() == "x = 1\n"
