"""`rlinf-lite job` finds the jobs of this user's Rays and of directories, says what they are doing, and stops them."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rlinf_lite.cli import main
from rlinf_lite.config.schema import ControlConfig
from rlinf_lite.control.context import Attachment, DirectoryBackend, Failover, JobContext, Stage, WorkerRecord
from rlinf_lite.control.diagnosis import Finding
from rlinf_lite.control.master import create_master
from rlinf_lite.scheduler import Cluster, Worker
from rlinf_lite.scheduler.context import get_context
from rlinf_lite.scheduler.local_ray import find_local_rays
from rlinf_lite.scheduler.scratch import ScratchDirs, living_temp_dirs

pytestmark = pytest.mark.usefixtures("own_ray", "forks")

START = time.time() - 90
RUN = "import json, sys; from rlinf_lite.cli import main\n"
RUN += "for words in json.loads(sys.argv[1]): print('exit code', main(['job', *words]), flush=True)"


def start(*commands: str, temp: Path) -> subprocess.Popen[str]:
    """Some commands, one after another, in another process."""
    environment = {**os.environ, "TMPDIR": str(temp)}
    words = json.dumps([command.split() for command in commands])
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", RUN, words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def outputs(process: subprocess.Popen[str]) -> list[tuple[str, str]]:
    """What each command printed, and its exit code."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in err, err
    return re.findall(r"(.*?)exit code (\d)\n", out, re.DOTALL)


@pytest.fixture(scope="module")
def temp(short_ray_tmp: Path) -> Iterator[Path]:
    """A temp dir that no other test's Ray is in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(short_ray_tmp))
        yield short_ray_tmp


@pytest.fixture(scope="module")
def master(temp: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of a job of two workers, whose trainer this process plays."""

    class Env(Worker):
        def say(self, what: str) -> None:
            print(what, flush=True)

    with Cluster(num_gpus_per_node=2, accelerator="cpu", log_to_driver=False) as cluster:
        master = create_master("pick-1", ControlConfig())
        group = Env.create_group().launch(cluster, "0-1", name="env")
        group.say("hello").wait()
        directory = str(tmp_path_factory.mktemp("run"))
        job = JobContext("pick-1", directory, step=3, total_steps=50, trainer_pid=os.getpid(), trainer_node="node 0")
        job.workers = {
            str(m): WorkerRecord("env", m.rank, m.pid, "node 0", m.node.node_id, "worker", m.log_paths)
            for m in group.members
        }
        handles = {str(m): m.remote.actor for m in group.members}
        ray.get(master.attach.remote(Attachment(job, get_context(), handles)))
        ray.get(master.trainer_beat.remote(4, [("env", "rollout")]))
        ray.get(master.failed.remote("f1", [], [Finding("raised", "env", 1, "ValueError: no grip")], None))
        ray.get(master.recovered.remote("f1", True, 0))
        yield master


def test_another_process_finds_the_jobs_of_a_private_ray(master: Any, temp: Path) -> None:
    [known] = find_local_rays()
    [path] = temp.glob("*/ray.json")
    assert json.loads(path.read_text()) == {"address": known.address, "token": known.token}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    commands = ["list", f"list --address {known.address}", "status pi", "status pick-1 --json"]
    commands += ["logs pick-1 --role env --rank 1", "logs pick-1 --role no"]
    printed, codes = zip(*outputs(start(*commands, temp=temp)), strict=True)
    assert codes == ("0", "0", "0", "0", "0", "1")
    listed, named, status, as_json, logs, _ = printed
    for rows in (listed, named):
        row = rows.split("\n")[1].split()
        assert row[:6] == ["running", "4", "of", "50", "2", "0"] and "pick-1" in row
    assert "env[1]" in status and f"pid {os.getpid()}" in status and "env feeds rollout" in status
    assert "env[1]  raised  worker" in status and "ValueError: no grip" in status
    found = json.loads(as_json)
    assert found["stage"] == "running" and found["step"] == 4 and len(found["workers"]) == 2
    assert set(found["doing"]) <= {"env[0]", "env[1]"} and found["failovers"][0]["level"] == "worker"
    assert logs == "env[1]:\nhello\n"


def test_stop_waits_until_the_job_has_ended(master: Any, temp: Path) -> None:
    process = start("stop pick", temp=temp)
    deadline = time.monotonic() + 30
    while not ray.get(master.trainer_beat.remote(5, []))["stop"]:
        assert time.monotonic() < deadline, "nobody asked it to stop"
        time.sleep(0.1)
    ray.get(master.finish.remote(Stage.STOPPED))
    assert outputs(process) == [("pick-1 was running and is now stopped, after 5 of 50 steps\n", "0")]


def test_a_dead_owners_ray_is_not_looked_at(temp: Path) -> None:
    dirs = ScratchDirs()
    assert dirs.temp in living_temp_dirs()
    for lock in dirs._locks:
        os.close(lock)
    dirs._locks = []
    assert dirs.temp not in living_temp_dirs()
    dirs.remove()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory of contexts, on a machine without any Ray."""
    monkeypatch.setattr("rlinf_lite.cli.job.find_local_rays", list)
    backend = DirectoryBackend(tmp_path)
    record = WorkerRecord("env", 0, 4711, "node 0", "n", "worker", restarts=2)
    failure = Failover("f", "crashed", ["env[0]"], "killed [by] SIGKILL\nmore", START, "worker", 1, "done", 1.5, 0)
    context = JobContext("pick-1", "runs/pick", Stage.FAILED, "env[0] failed [3] times\n\nmore", START, START + 60)
    context.step, context.total_steps, context.workers, context.failovers = 7, 9, {record.name: record}, [failure]
    context.edges = [("env", "rollout")]
    for found in (context, JobContext("pick-2", stage=Stage.FINISHED, ended=START), JobContext("lift", started=START)):
        backend.save(found.name, found.to_json())
    return str(tmp_path)


def test_ended_jobs_are_read_without_ray(kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "list", "--backend", kept]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[1:]] == ["lost", "failed", "finished"]
    assert rows[1][-1] == "lift" and rows[3][-1] == "pick-2"
    assert rows[2][1:7] == ["7", "of", "9", "1", "2", "ended"] and rows[2][-2:] == ["pick-1", "runs/pick"]

    assert main(["job", "status", "--backend", kept, "pick-1"]) == 0
    text = capsys.readouterr().out
    assert "failed: env[0] failed [3] times\n" in text and "after 1 min 00 s" in text and "4711" in text
    assert "crashed  worker  1.5 s  0           killed [by] SIGKILL" in text and "more" not in text
    assert "env feeds rollout" in text

    assert main(["job", "list", "--backend", kept, "--json"]) == 0
    assert [found["stage"] for found in json.loads(capsys.readouterr().out)] == ["lost", "failed", "finished"]
    assert main(["job", "stop", "--backend", kept, "pick-1"]) == 0
    assert capsys.readouterr().out == "pick-1 had already ended: failed after 7 of 9 steps\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["status", "pick"], "the names of several jobs begin with 'pick': pick-1 (ended), pick-2 (ended)"),
        (["status", "pik-1"], "there is no job named 'pik-1'. The nearest: pick-1"),
        (["logs", "pick-1"], "the job 'pick-1' is failed: logs can be read only while a job runs"),
        (["stop", "lift"], "the job 'lift' is lost: it was starting, but its master is gone"),
    ],
)
def test_what_cannot_work_is_one_line(
    kept: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["job", *words, "--backend", kept]) == 1
    written = capsys.readouterr()
    assert says in written.err and written.err.count("\n") == 1 and not written.out


def test_a_damaged_context_hides_no_other(kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(kept, "lift.json").write_text("{")
    assert main(["job", "list", "--backend", kept]) == 0
    written = capsys.readouterr()
    assert "'lift' is damaged" in written.err and "pick-2" in written.out


def test_without_any_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rlinf_lite.cli.job.find_local_rays", list)
    assert main(["job", "list"]) == 0 and capsys.readouterr().out == "no jobs\n"
    assert main(["job", "status", "pick"]) == 1
    assert "no Ray of yours was found" in capsys.readouterr().err
    assert main(["job", "list", "--backend", "no/such"]) == 1
    assert main(["job", "list", "--address", "127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.endswith(
        "no Ray answers at 127.0.0.1:9, or it has another token (Connection refused)\n"
    )
