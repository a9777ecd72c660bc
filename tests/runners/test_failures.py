"""A failure in a worker reaches the user soon, with the worker's name and rank, and leaves no processes."""

import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from rlinf_lite.config import ConfigError
from rlinf_lite.envs import SimulatorError
from rlinf_lite.runners import stopping
from rlinf_lite.scheduler import WorkerDiedError, WorkerError
from tests.runners.conftest import SMALL_PENDULUM, read_metrics
from tests.runners.processes import processes_below, wait_until_gone

pytestmark = pytest.mark.usefixtures("forks")

BROKEN = ["env.id=tests.runners.broken_envs:make_env", "env.task=broken", "runner.max_steps=50"]


def broken(how, **more):
    settings = ", ".join(f"{name}: {value}" for name, value in {"how": how, **more}.items())
    return [*BROKEN, f"env.options={{{settings}}}"]


def test_an_environment_that_raises_is_named_with_its_traceback(start):
    runner = start(*broken("raise"), "cluster.component_placement.env=0-1")
    with pytest.raises(WorkerError) as error:
        runner.run()
    message = str(error.value)
    assert re.match(
        r"env\[(\d)\]\.interact raised SimulatorError: environment \d \(row \d\), step \d+ of the episode with seed "
        r"\d+: step raised ZeroDivisionError: the simulator fell over\n",
        message,
    )
    assert "broken_envs.py" in message and isinstance(error.value.__cause__, SimulatorError)


@pytest.mark.processes
def test_a_killed_worker_is_named(start):
    runner = start(*broken("die"), "cluster.component_placement.env=0-1")
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"env\[\d\]"):
        runner.run()
    assert time.monotonic() - started < 30  # two steps come first; detection itself is tested in tests/scheduler


def test_updates_that_are_not_finite_are_skipped_and_then_stop_the_run(start):
    runner = start(*broken("huge_reward"), "control.max_bad_updates=3")
    with pytest.raises(WorkerError, match=r"control\.max_bad_updates: 3 in a row") as error:
        runner.run()
    assert type(error.value.__cause__).__name__ == "NonFiniteUpdateError"
    assert re.search(r"step \d+, epoch 0, minibatch 2", str(error.value))
    assert all(line["train/actor/skipped_updates"] == 0 for line in read_metrics(runner.run_dir)[:2])


@pytest.mark.parametrize(
    ("how", "said"), [("shape", r"promises shape \(3,\)"), ("unseeded", "the same seeds gave other")]
)
def test_an_environment_that_breaks_the_protocol_gets_sentences_before_anything_starts(start, how, said):
    with pytest.raises(ConfigError, match=rf"env\.id: tests\.runners\.broken_envs:make_env: .*{said}"):
        start(*broken(how))


def test_what_takes_long_to_build_is_said(start, monkeypatch, caplog):
    monkeypatch.setattr(stopping, "_SAY_AFTER_S", 1.0)
    start(*broken("slow_to_build"))
    said = [message for message in caplog.messages if "so far" in message]
    assert said[0] == "environments to be built: 1 s so far, not done: env (limit: 60 s)"
    seconds = [int(re.search(r": (\d+) s", message)[1]) for message in said if message.startswith("environments")]
    assert all(later >= 2 * earlier - 1 for earlier, later in pairwise(seconds))  # both are rounded


@pytest.mark.parametrize(("num_steps", "says"), [(2, True), (3, False)])
def test_a_run_in_which_the_policy_never_trains_says_so(start, capsys, num_steps, says):
    start("algorithm.critic_warmup_steps=2", f"runner.max_steps={num_steps}").run()
    said = f"note: algorithm.critic_warmup_steps is 2, of {num_steps} steps in all; only the critic trains"
    assert (said in capsys.readouterr().out) is says


def run_example(*overrides, root):
    paths = [f"runner.logger.log_path={root}"]
    command = [sys.executable, "examples/embodiment/train_embodied_agent.py", "--config-name", "gym_pendulum_ppo_mlp"]
    return subprocess.Popen(
        [*command, *SMALL_PENDULUM, *paths, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        start_new_session=True,
    )


@pytest.mark.parametrize("how", ["Ctrl-C", pytest.param("SIGTERM to the process group", marks=pytest.mark.slow)])
def test_a_stop_leaves_a_checkpoint_and_no_process(tmp_path, how):
    process = run_example(*broken("slow", after=15), root=tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    workers = processes_below(process.pid)
    assert len(workers) > 3
    started = time.monotonic()
    process.send_signal(signal.SIGINT) if how == "Ctrl-C" else os.killpg(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - started < 30, output
    assert process.returncode == 130 and "Traceback" not in output, output
    assert wait_until_gone(workers) == []
    (last,) = tmp_path.glob("*/checkpoints/last")
    assert (last / "policy" / "model.safetensors").is_file() and last.resolve().name >= "step_000002"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stop_during_start_up_says_so_in_a_line(tmp_path, number):
    process = run_example("runner.max_steps=50", root=tmp_path)
    assert process.stdout is not None
    if number == signal.SIGINT:
        time.sleep(3)  # during the imports
    else:
        assert process.stdout.readline().startswith("slots")  # Ray is up, and has replaced our signal handler
    workers = processes_below(process.pid)
    process.send_signal(number)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 130 and "Traceback" not in output, output
    assert output.splitlines()[-1].startswith("interrupted"), output
    assert wait_until_gone(workers) == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_stop_is_not_lost_where_python_drops_what_is_raised(number):
    dropped = f"type('Dropped', (), {{'__del__': lambda self: signal.raise_signal(signal.{number})}})()"
    program = f"import signal, time; from rlinf_lite.script import run_script\ndef main():\n    {dropped}"
    program += "\n    time.sleep(20)\n    return 0\nraise SystemExit(run_script(main))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.slow
def test_a_worker_error_ends_the_program_with_its_traceback_and_no_process(tmp_path):
    process = run_example(*broken("raise"), "control.backoff_s=0.1", root=tmp_path)
    assert process.stdout is not None
    output, workers = "", []
    for line in process.stdout:
        output += line
        workers = workers or (processes_below(process.pid) if line.startswith("step 1/") else [])
    assert process.wait(timeout=60) == 1
    assert "ZeroDivisionError: the simulator fell over" in output and "broken_envs.py" in output
    assert len(workers) > 3 and wait_until_gone(workers) == []


def test_a_bad_config_ends_at_once_with_every_problem(tmp_path):
    process = run_example("algorithm.adv_type=gea", "actor.micro_batchsize=3", root=tmp_path)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 2
    assert "2 problems" in output and "Did you mean" in output and "Traceback" not in output
