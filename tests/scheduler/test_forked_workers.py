"""Forked workers: as good as plain ones, gone with their node, replaced by plain ones where there is an obstacle."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._private.worker import print_worker_logs

from rlinf_lite.scheduler import Cluster, Worker, WorkerDiedError, setup_worker, warm
from rlinf_lite.scheduler.forked import SETUP_SCRIPT, WarmProcess

WAIT_S = 30.0
BY_IMPORTS = {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"}
"""Variables that torch and what it imports set."""

pytestmark = pytest.mark.usefixtures("own_ray")

SELF_PORTRAIT = """
import json, os, resource, signal, sys
names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
known = ("numpy", "torch", "rlinf_lite.workers.actor", "transformers")
variables = {k: v for k, v in os.environ.items() if k not in ("_", "SHLVL")}
print(json.dumps({
    "variables": variables, "path": sys.path, "arguments": sys.argv, "directory": os.getcwd(), "name": __name__,
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names}, "umask": os.umask(0),
    "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals() if signal.getsignal(n) is not None},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "leads_its_group": os.getpgrp() == os.getpid(), "session": os.getsid(0), "gc": __import__("gc").isenabled(),
    "oom_score_adj": open("/proc/self/oom_score_adj").read(), "flags": str(sys.flags), "input": sys.stdin.read(),
    "threads": len(os.listdir("/proc/self/task")), "files": sorted(os.listdir("/proc/self/fd"))[:3],
    "had": sorted(set(known) & set(sys.modules)), "parent": os.getppid(),
}), flush=True)
"""


@pytest.fixture(scope="module")
def warm_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    """One without Ray; this process is the node that it watches."""
    process = WarmProcess(str(tmp_path_factory.mktemp("warm")), environment(), {"OF_THE_WORKERS": "1"}, [])
    yield process
    process.end()


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return own | {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": str(os.getpid())}


def start(
    process: WarmProcess, script: Path, *arguments: str, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a script as Ray runs its own, and wait until whoever runs it has closed its output."""
    command = [sys.executable, "-IS", SETUP_SCRIPT, process.socket, str(script), *arguments]
    return subprocess.run(
        command, env=environment() | (env or {}), capture_output=True, text=True, timeout=4 * WAIT_S, **options
    )


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s in vain: {what}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def warm_pids(below: str) -> list[int]:
    """Warm processes that say in their arguments or files that they belong to this."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            is_warm = entry.name.isdecimal() and b"warm.py" in (entry / "cmdline").read_bytes()
            if is_warm and os.readlink(entry / "fd" / "1").startswith(below):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_fork_is_as_python_would_have_started_it(warm_process: WarmProcess, tmp_path: Path) -> None:
    script = tmp_path / "portrait.py"
    script.write_text(SELF_PORTRAIT)

    def prepare() -> None:
        os.setpgid(0, 0)
        os.umask(0o027)
        os.nice(3)
        Path("/proc/self/oom_score_adj").write_text("700")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    options: dict[str, Any] = {"cwd": tmp_path, "preexec_fn": prepare, "input": "said"}
    forked = start(warm_process, script, "--one", "two words", env={"CUDA_VISIBLE_DEVICES": "3"}, **options)
    portrait = json.loads(forked.stdout)
    assert {"numpy", "rlinf_lite.workers.actor", "torch"} <= set(portrait.pop("had"))
    refused = start(
        warm_process, script, "--one", "two words", env={"CUDA_VISIBLE_DEVICES": "3", "NEW": "1"}, **options
    )
    plain = json.loads(refused.stdout)
    assert plain.pop("had") == [] and plain["variables"].pop("NEW") == "1"
    assert plain["variables"].pop(setup_worker.PLAIN) == "its environment differs in NEW"
    by_imports = portrait["variables"].items() ^ plain["variables"].items()
    assert {name for name, _ in by_imports} <= {"RAY_CLIENT_MODE", *BY_IMPORTS}
    portrait["variables"] = plain["variables"]
    portrait["path"] = [path for path in portrait["path"] if not path.endswith("ray/thirdparty_files")]
    assert portrait.pop("parent") != plain.pop("parent")
    assert portrait == plain


def test_unseeded_numbers_differ_and_seeded_are_those_of_plain_python(
    warm_process: WarmProcess, tmp_path: Path
) -> None:
    script = tmp_path / "draw.py"
    script.write_text(
        textwrap.dedent("""
        import json, random, numpy, torch
        unseeded = [random.random(), numpy.random.rand(), torch.rand(1).item()]
        random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Tanh(), torch.nn.Linear(300, 300))
        net(torch.randn(64, 300)).square().mean().backward()
        found = [random.random(), numpy.random.rand(), net[0].weight.grad.double().sum().item().hex()]
        print(json.dumps([unseeded, found, torch.get_num_threads(), torch.cuda.is_initialized()]))
        """)
    )
    first, second = (json.loads(start(warm_process, script).stdout) for _ in range(2))
    plain = json.loads(start(warm_process, script, env={"OMP_NUM_THREADS": "1", "X": "1"}).stdout)
    assert all(a != b for a, b in zip(first[0], second[0], strict=True))
    assert first[1:] == second[1:] == plain[1:]


def test_who_has_given_up_waiting_is_not_forked_later(warm_process: WarmProcess, tmp_path: Path) -> None:
    """Else Ray gets two workers where it has started one, and both end."""
    script, ran = tmp_path / "run.py", tmp_path / "ran"
    script.write_text(f"open({str(ran)!r}, 'a').write('x'); print('done')")
    assert start(warm_process, script).stdout == "done\n"
    impatient = "import sys; sys.path.insert(0, sys.argv[1]); import setup_worker; setup_worker.ANSWER_S = 0.3; "
    impatient += "print(setup_worker.ask_for_fork(sys.argv[2], sys.argv[3:]))"
    command = [sys.executable, "-c", impatient, str(Path(SETUP_SCRIPT).parent), warm_process.socket, str(script)]
    pid = warm_process._process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with open(tmp_path / "said", "w") as said:  # not a pipe, which the request would hold open
            subprocess.run(command, env=environment(), stdout=said, timeout=WAIT_S, check=True)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "did not answer within 0.3 s" in (tmp_path / "said").read_text()
    assert start(warm_process, script).stdout == "done\n"
    time.sleep(1.0)  # requests are answered one after the other: the one before would be running
    assert ran.read_text() == "xx"


def test_no_plain_worker_is_started_for_a_node_that_has_ended(tmp_path: Path) -> None:
    """It would look for its node for half a minute, and outlive the program by that."""
    script, ran = tmp_path / "run.py", tmp_path / "ran"
    script.write_text(f"open({str(ran)!r}, 'a').write('x')")
    path, pid_file = str(tmp_path / "warm.sock"), tmp_path / "pid"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        node = "import subprocess, sys; started = subprocess.Popen(sys.argv[2:]); "
        node += "open(sys.argv[1], 'w').write(str(started.pid)); started.wait()"
        arguments = [sys.executable, "-IS", SETUP_SCRIPT, path, str(script)]
        for node_ends in (False, True):
            command = [sys.executable, "-c", node, str(pid_file), *arguments]
            with subprocess.Popen(command) as process:
                connection, _ = listener.accept()  # what is asked for is not answered
                wait_until(lambda: pid_file.exists() and pid_file.read_text() != "", "the start of a worker")
                pid = int(pid_file.read_text())
                if node_ends:
                    process.kill()
                    process.wait()
                connection.close()  # and so does the warm process
                wait_until(lambda pid=pid: not is_alive(pid), "the end of what was started")
            pid_file.unlink()
            assert ran.read_text() == "x"  # a node that lives gets a plain worker


def test_arguments_that_are_not_understood_are_left_to_plain_python(warm_process: WarmProcess, tmp_path: Path) -> None:
    script = tmp_path / "where.py"
    script.write_text("import os, sys; print(os.environ['RLINF_LITE_PLAIN_WORKER'], sys.flags.no_site)")
    command = [sys.executable, "-IS", SETUP_SCRIPT, warm_process.socket, "-S", str(script)]
    assert "-S" in subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S).stdout


def test_thread_is_an_obstacle() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert "threads run once torch is imported" in warm._obstacle("once torch is imported")
    finally:
        done.set()
        thread.join()


class Body(Worker):
    """Says what it is, and dies on demand."""

    def about(self) -> dict[str, Any]:
        status = Path("/proc/self/status").read_text()
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "title": Path("/proc/self/cmdline").read_text().strip("\0"),
            "had_torch": "torch" in sys.modules,
            "path": sys.path,
            "variables": dict(os.environ),
            "oom_score_adj": Path("/proc/self/oom_score_adj").read_text(),
            "signals": [line for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
            "group_and_session": (os.getpgrp() == os.getpid(), os.getsid(0)),
            "arguments": [argument for argument in sys.argv if not argument.startswith(("--worker-", "--runtime-env"))],
        }

    def die(self, how: int) -> None:
        if how:
            os.kill(os.getpid(), how)
            time.sleep(WAIT_S)
        os._exit(3)


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    with Cluster(num_gpus_per_node=2, accelerator="cpu", log_to_driver=False) as cluster:
        yield cluster


def how_it_died(group: Any, how: int) -> str:
    with pytest.raises(WorkerDiedError) as error:
        group.execute_on(0).die(how).wait()
    return error.value.reason


def test_life_and_death_on_own_ray(own: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Workers of the warm process, then, when that is killed, of plain Python: Ray says the same of both."""
    from rlinf_lite.scheduler.context import get_context

    [warm_pid] = warm_pids(get_context().temp_dir)
    group = Body.create_group().launch(own, "0-1", name="body")
    try:
        forked = group.about().wait()
        assert {about["parent"] for about in forked} == {warm_pid} and all(about["had_torch"] for about in forked)
        assert [member.pid for member in group.members] == [about["pid"] for about in forked]
        assert forked[0]["title"].startswith("ray::Body.about")
        assert not caplog.records
        deaths = []
        for how in (0, signal.SIGKILL, signal.SIGSEGV):
            deaths.append(how_it_died(group, how))
            group.restart(0)
        assert group.about().wait()[0]["parent"] == warm_pid

        os.kill(warm_pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(warm_pid), "the warm process to be gone")
        assert group.about().wait()[1]["pid"] == forked[1]["pid"]  # the living live on
        group.restart(0)
        plain = group.about().wait()[0]
        assert plain["parent"] != warm_pid and not plain["had_torch"]
        assert len(caplog.records) == 1 and "the warm process has ended" in caplog.text
        for name in ("path", "oom_score_adj", "signals", "group_and_session", "arguments"):
            assert plain[name] == forked[0][name], name
        assert {k for k, _ in plain["variables"].items() ^ forked[0]["variables"].items()} <= BY_IMPORTS
        for how, death in zip((0, signal.SIGKILL, signal.SIGSEGV), deaths, strict=True):
            assert how_it_died(group, how) == death
            group.restart(0)
        assert len(caplog.records) == 1
    finally:
        group.shutdown()


def test_what_workers_print_has_no_colours_in_a_file(own: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    printed: Any = {"pid": 7, "ip": "x", "localhost": "x", "lines": ["hello"], "actor_name": "env[0]"}
    print_worker_logs(printed, sys.stdout)
    assert capsys.readouterr().out == "(env[0] pid=7) hello\n"


DRIVER = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from rlinf_lite.scheduler import Cluster, Worker
from rlinf_lite.scheduler.context import get_context
from rlinf_lite.scheduler.forked import _of_our_ray
class Sleeper(Worker):
    def pid(self): return os.getpid()
    def sleep(self):
        for _ in range(100): self.send(np.ones(100_000), "sleeper", 1 - self.rank)
        time.sleep(1000)
cluster = Cluster(num_gpus_per_node=2, accelerator="cpu", log_to_driver=False)
group = Sleeper.create_group().launch(cluster, "0-1", name="sleeper")
pids = group.pid().wait()
handle = group.sleep()
while len(os.listdir(get_context().shm_dir)) < 200: time.sleep(0.1)
print(get_context().temp_dir, get_context().shm_dir, _of_our_ray()["RAY_RAYLET_PID"], *pids, flush=True)
handle.wait()
"""


@pytest.mark.parametrize("victim", ["driver", "node"])
def test_nothing_is_left_of_a_killed_driver_or_node(victim: str, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        directory, shm_dir, raylet, *workers = driver.stdout.readline().split()
        [warm_pid] = warm_pids(directory)
        assert len(workers) == 2
        os.kill(driver.pid if victim == "driver" else int(raylet), signal.SIGKILL)
        wait_until(lambda: not is_alive(warm_pid), f"the warm process to be gone with the {victim}")
        wait_until(lambda: not any(is_alive(int(pid)) for pid in workers), f"the workers to be gone with the {victim}")
        wait_until(lambda: not os.path.exists(shm_dir), f"unread messages to be gone with the {victim}")
    finally:
        driver.kill()
        driver.communicate()
