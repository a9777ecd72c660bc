"""Scripts whose last line submits a job, on a Ray of their own: they wait for it, and say so with their exit code."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlinf_lite.scheduler.processes import is_ray_process
from tests.control.conftest import events, wait_for

pytestmark = pytest.mark.usefixtures("own_ray", "forks")

SCRIPT = """
import atexit, json, sys
atexit.register(print, "registered before")
from rlinf_lite.jobs import RLJobBuilder
atexit.register(print, "registered after")
for name, config in json.loads(sys.argv[1]).items():
    builder = RLJobBuilder().device_per_node(2).device_type("CPU").config(config)
    builder.trainer("tests.jobs.jobs", "StepByStep").actor("tests.jobs.jobs", "Held").total(2).per_node(2)
    builder.build().submit(name, directory=config["log"] + ".of")
"""
RUNS = "runs on the Ray of this script, which stays until it has ended. Ctrl-C stops it."


@contextmanager
def script(home: Path, more: str = "", **jobs: dict) -> Iterator[subprocess.Popen]:
    """Jobs by name, with what their configs have besides files."""
    files = {name: {"state": str(home / f"{name}.state"), "log": str(home / name), "step_s": 0.01} for name in jobs}
    configs = {name: files[name] | config for name, config in jobs.items()}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", SCRIPT + more, json.dumps(configs)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, cwd=os.getcwd()) as process:
        try:
            yield process
        finally:
            process.kill()


def test_it_waits_for_its_jobs_and_fails_where_one_has(tmp_path):
    fails = {"steps": 9, "raise": [4, 0]}
    with script(tmp_path, fails=fails, ends={"steps": 30}) as process:
        out, err = process.communicate(timeout=180)
    assert process.returncode == 1, err
    assert [int(line) for line in (tmp_path / "ends").read_text().split()] == list(range(30))
    assert f"the job 'fails' {RUNS} What it prints: rlinf-lite job logs fails\n" in err
    assert "JobFailedError: the job 'fails' failed after step 4: RuntimeError: the trainer stumbled (at " in err
    assert "tests/jobs/jobs.py:" in err and ", in fit)" in err
    assert "the job 'ends' is finished after step 30" in err
    assert out == "registered after\n"  # what was registered before is what such an exit code costs


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "raise ValueError('of the script')"], ids=["Ctrl-C", "its error"])
def test_a_script_that_is_stopped_or_fails_stops_its_job(tmp_path, more):
    home = tmp_path / "goes_on.of"
    with script(tmp_path, more, goes_on={"steps": 100_000}) as process:
        if not more:
            assert process.stderr is not None and RUNS in process.stderr.readline()
            wait_for(lambda: (tmp_path / "goes_on").exists(), 60)
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == (1 if more else 130), err
    assert "stopping the job 'goes_on', whose Ray ends with this script" in err and "did not stop" not in err
    assert [event["event"] for event in events(home, "stopping", "stopped")] == ["stopping", "stopped"]
    pids = [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and is_ray_process(int(pid))]
    ours = [pid for pid in pids if str(tmp_path) in Path(f"/proc/{pid}/environ").read_text(errors="replace")]
    assert ours == []
