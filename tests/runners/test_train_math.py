"""examples/math/train_math.py as a program: it ends well, also by Ctrl-C, and says what is wrong."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.runners.processes import processes_below, wait_until_gone

TINY_PROBLEMS = [
    "data.num_prompts=4",
    "data.max_prompt_length=12",
    "data.arithmetic={num_train: 400, num_val: 6, num_terms: 2, max_number: 20}",
    "rollout.max_response_length=24",
    "actor.global_batch_size=16",
    "sft.num_steps=2",
    "sft.batch_size=4",
]
SMALL = [
    *TINY_PROBLEMS,
    "algorithm={group_size: 4, filter_groups: false}",
]


def train_math(*overrides, root, **options):
    paths = [f"runner.logger.log_path={root}"]
    return subprocess.Popen(
        [sys.executable, "examples/math/train_math.py", *SMALL, *paths, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        **options,
    )


def test_ctrl_c_leaves_a_checkpoint_that_the_run_goes_on_from(tmp_path):
    process = train_math("runner.max_steps=80", "runner.val_check_interval=-1", root=tmp_path)
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    workers = processes_below(process.pid)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - started < 30, output
    assert process.returncode == 130, output
    assert wait_until_gone(workers) == []
    (last,) = tmp_path.glob("*/checkpoints/last")
    steps = json.loads((last / "training_state" / "runner.json").read_text())["completed_steps"]
    assert steps >= 3
    resumed = train_math(f"runner.max_steps={steps + 1}", "runner.resume=auto", root=tmp_path)
    output = resumed.communicate(timeout=120)[0]
    assert resumed.returncode == 0, output
    assert f"step {steps + 1}/{steps + 1}" in output and f"step {steps}/" not in output


@pytest.mark.parametrize(
    ("override", "said", "code"),
    [
        ("reward.fn=tests.no_such_module:length", "No module named 'tests.no_such_module'", 2),
        ("data.max_prompt_length=2", "all 400 prompts have more than 2 tokens", 1),
        ("data.arithmetic.max_number=1", "400 train rows were asked for", 1),
    ],
)
def test_what_cannot_work_is_said_before_ray_starts(tmp_path, monkeypatch, capsys, command_line, override, said, code):
    def start_ray(*_, **__):
        raise AssertionError("Ray starts")

    monkeypatch.setattr("rlinf_lite.scheduler.Cluster.from_config", start_ray)
    paths = [f"runner.logger.log_path={tmp_path}"]
    assert command_line(["train", "math_arithmetic_grpo", *SMALL, *paths, override]) == code
    output = capsys.readouterr().err
    assert said in output
