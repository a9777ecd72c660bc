"""examples/control/ppo_job.py: the run of train_math.py as a job, with the same numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runners.test_train_math import TINY_PROBLEMS

pytestmark = pytest.mark.usefixtures("own_ray", "forks")

SMALL = [
    *TINY_PROBLEMS,
    "runner.max_steps=2",
    "runner.val_check_interval=-1",
    "runner.report=false",
    "cluster.fuse=null",
]


def run(home: Path, repo: Path, script: str, *options: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, str(repo / "examples" / script), *options, *SMALL]
    paths = os.pathsep.join([str(repo), os.environ["PYTHONPATH"]])
    ended = subprocess.run(
        command, cwd=home, env=environment | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def numbers(root: Path) -> list[dict[str, float]]:
    """What each step has learned from, and by: not how long it took."""
    (file,) = root.glob("**/metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    found = [
        {name: x for name, x in line.items() if name.startswith(("train/", "rollout/", "reward/"))} for line in lines
    ]
    return [line for line in found if line]


@pytest.mark.slow
def test_it_trains_as_the_run_that_is_no_job_does(tmp_path, repo):
    said = run(tmp_path, repo, "control/ppo_job.py")
    (job,) = (tmp_path / "results" / "jobs").iterdir()
    assert f"finished after step 2 of 2: {job}" in said
    events = [json.loads(line)["event"] for line in (job / "events.jsonl").read_text().splitlines()]
    assert events == ["running", "finished"]
    plain = tmp_path / "plain"
    paths = [f"runner.logger.log_path={plain}"]
    run(tmp_path, repo, "math/train_math.py", "--config-name", "math_arithmetic_ppo", *paths)
    assert len(numbers(job)) >= 2 and numbers(job) == numbers(plain)
