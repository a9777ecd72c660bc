"""The Ray that a Cluster starts, tested from outside: tokens, ports, and what remains after its end."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from rlinf_lite.scheduler import Cluster, ClusterError
from rlinf_lite.scheduler.local_ray import local_ray
from rlinf_lite.scheduler.scratch import SHM_ROOT, ScratchDirs, temp_root

pytestmark = pytest.mark.usefixtures("own_ray")

PATIENCE_S = 30
"""Less than the minute that Ray waits if one of its processes is dead, and much more than a loaded machine needs."""

SCRIPT = """
import os, sys, time
from rlinf_lite.scheduler import Cluster, Worker
from rlinf_lite.scheduler.context import get_context

class Sleeper(Worker):
    def sleep(self, seconds):
        time.sleep(seconds)
        return self.rank

    def say_hello(self):
        print("hello")

with Cluster(num_gpus_per_node=2, accelerator="cpu") as cluster:
    group = Sleeper.create_group().launch(cluster, "0-1")
    print("uid", get_context().uid, flush=True)
    print("ranks", group.sleep(0).wait(), flush=True)
    {then}
"""


def start(then: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(then=then)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have set it to be ignored
    )


def directories(uid: str) -> list[str]:
    roots = {temp_root(), SHM_ROOT}
    return [name for root in roots for name in os.listdir(root) if uid in name]


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.1)


def read_until_running(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    uid = process.stdout.readline().split()[1]
    assert process.stdout.readline() == "ranks [0, 1]\n"
    return uid


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("token", ["\0 not a token\n", None], ids=["garbage", "directory"])
def test_a_foreign_token_is_never_looked_at(tmp_path: Path, token: str | None) -> None:
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    if token is None:
        path.mkdir()
    else:
        path.write_text(token)
    extra = {} if token else {"RAY_AUTH_TOKEN": "", "RAY_AUTH_TOKEN_PATH": "/nonexistent"}
    again = "cluster.shutdown(); second = Cluster(num_gpus_per_node=1, accelerator='cpu'); "
    again += "print('second', Sleeper.create_group().launch(second, '0').sleep(0).wait())"
    process = start(again if token else "pass", HOME=str(tmp_path), **extra)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0 and "ranks [0, 1]" in out, err
    assert ("second [0]" in out) == bool(token)  # one cluster after the other
    assert token is None or path.read_text() == token


def test_it_listens_on_loopback_only_and_shuts_down_cleanly() -> None:
    process = start("group.execute_on(0).say_hello().wait(); sys.stdin.readline()")
    uid = read_until_running(process)
    everyone = [psutil.Process(process.pid), *family(process)]
    assert len(everyone) >= 5
    for member in everyone:
        for connection in member.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert re.fullmatch(r"127\.0\.0\.1|::1|::ffff:127\.0\.0\.1", connection.laddr.ip), (member, connection)
    assert len(directories(uid)) == 2
    assert process.stdout is not None  # the workers' output arrives there, without colours, since it is no terminal
    assert re.fullmatch(r"\(Sleeper\[0\] pid=\d+\) hello\n", process.stdout.readline())
    process.communicate("\n", timeout=60)
    assert process.returncode == 0
    assert not psutil.wait_procs(everyone[1:], timeout=PATIENCE_S)[1]
    assert directories(uid) == []


def test_ctrl_c_leaves_nothing() -> None:
    process = start("group.sleep(600).wait()")
    uid = read_until_running(process)
    time.sleep(0.5)
    everyone = family(process)
    interrupted = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # like a terminal, which sends it to the whole foreground group
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - interrupted < PATIENCE_S
    assert process.returncode != 0 and "KeyboardInterrupt" in err
    assert not psutil.wait_procs(everyone, timeout=PATIENCE_S)[1]
    assert directories(uid) == []


STOPPABLE = """
    import signal
    def stop(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, stop)
    try:
        print("handles SIGTERM", flush=True)
        group.sleep(600).wait()
    except KeyboardInterrupt:
        print("saved by", group.sleep(0).wait(), flush=True)
"""


def test_sigterm_to_every_process_leaves_the_driver_time_to_save() -> None:
    """SLURM sends SIGTERM to all processes of a job, and `timeout` to its process group."""
    process = start(STOPPABLE.replace("group.sleep(600)", "time.sleep(600) or group.sleep(0)"))
    uid = read_until_running(process)
    assert process.stdout is not None and process.stdout.readline() == "handles SIGTERM\n"
    everyone = [psutil.Process(process.pid), *family(process)]
    groups = {os.getpgid(member.pid) for member in everyone[1:]}
    assert os.getpgid(process.pid) not in groups
    started = time.monotonic()
    for member in everyone:
        with suppress(psutil.NoSuchProcess):  # a process that got it earlier has ended this one
            member.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "saved by [0, 1]" in out, err
    assert time.monotonic() - started < PATIENCE_S
    assert not psutil.wait_procs(everyone, timeout=PATIENCE_S)[1]
    assert directories(uid) == []


def test_where_ray_is_killed_the_driver_ends_soon() -> None:
    process = start("group.sleep(600).wait()")
    uid = read_until_running(process)
    everyone = family(process)
    for member in everyone:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    started = time.monotonic()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1 and "Ray's own processes on this machine have ended" in err, err
    assert time.monotonic() - started < PATIENCE_S
    assert directories(uid) == []


@contextmanager
def listening(answer: bytes | None) -> Iterator[int]:
    """A port that accepts connections, and sends an answer or nothing."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection = listener.accept()[0]
                    kept.append(connection)
                    if answer is not None:
                        connection.sendall(answer)

        kept: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


def test_an_address_where_no_ray_is_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(address: str) -> str:
        monkeypatch.setenv("RAY_ADDRESS", address)
        started = time.monotonic()
        with pytest.raises(ClusterError) as error:
            Cluster(num_gpus_per_node=1, accelerator="cpu")
        assert time.monotonic() - started < PATIENCE_S
        assert f"RAY_ADDRESS={address}" in str(error.value)
        return str(error.value)

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        refused = problem(f"127.0.0.1:{port}")
        # and the address file of a killed Ray, while no other Ray runs on this machine
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{port}")
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.setattr(psutil, "process_iter", lambda *_: [])
        left = problem("auto")
    assert "refused" in refused and "Unset RAY_ADDRESS" in refused
    assert "refused" in left and f":{port}" in left
    with listening(None) as port:
        assert "sent nothing for 3 s" in problem(f"127.0.0.1:{port}")
    with listening(b"HTTP/1.1 400 Bad Request") as port:
        assert "is not Ray" in problem(f"127.0.0.1:{port}")
    assert "on a node of that Ray" in problem("ray://127.0.0.1:10001")
    assert "no Ray answers" in problem("nonsense")


def test_a_killed_driver_takes_its_processes_along_and_the_next_start_tidies_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tempfile.mkdtemp(prefix="r", dir="/tmp")  # a short path that no other test cleans up
    monkeypatch.setattr(tempfile, "tempdir", root)
    process = start("group.sleep(600).wait()", TMPDIR=root)
    uid = read_until_running(process)
    everyone = family(process)
    # these two try for a minute to report the raylet's end to the dead GCS, and then end too
    agents = [member for member in everyone if member.name().startswith(("ray::Dashboa", "ray::Runtime"))]
    process.kill()
    process.communicate()
    assert not psutil.wait_procs([member for member in everyone if member not in agents], timeout=PATIENCE_S)[1]
    for member in agents:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    assert [name for name in os.listdir(root) if uid in name]
    living = ScratchDirs()
    assert directories(uid) == []
    ScratchDirs().remove()
    assert os.path.isdir(living.temp) and os.path.isdir(living.shm)  # the directories of a living owner stay
    living.remove()
    assert not os.path.exists(living.temp) and not os.path.exists(living.shm)
    shutil.rmtree(root)


def test_an_exception_in_a_worker_makes_the_exit_code_true() -> None:
    process = start("group.sleep('long').wait()")
    uid = read_until_running(process)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(r"Sleeper\[[01]\]\.sleep raised TypeError", err)
    assert directories(uid) == []


@pytest.fixture
def head_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """`head_program(code)` replaces the program that starts Ray; returns the file with its process ids."""

    def write(code: str) -> Path:
        started = tmp_path / "started"
        program = tmp_path / "program.py"
        program.write_text(f"import os, sys, time\nprint(os.getpid(), file=open({str(started)!r}, 'a'))\n{code}\n")
        monkeypatch.setattr("rlinf_lite.scheduler.local_ray._PROGRAM", str(program))
        return started

    return write


def test_a_machine_too_busy_for_ray_to_start_is_said_so(tmp_path, head_program):
    """The processes of each try are ended before the next one."""
    started = head_program("os.fork() or time.sleep(60)\nsys.exit('The current node timed out.')")
    too_late = r"did not start on this machine \(The current node timed out.\), tried 5 times.*less busy"
    with pytest.raises(ClusterError, match=too_late), local_ray(str(tmp_path), 1, None, False):
        pass
    pids = [int(line) for line in started.read_text().split()]
    assert len(pids) == 5
    wait_until(lambda: not any(process_group_lives(pid) for pid in pids), 10)


def process_group_lives(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.killpg(pid, 0)
        return True
    return False


def test_ray_is_waited_for_up_to_a_limit_with_a_line(tmp_path, head_program, monkeypatch, caplog):
    started = head_program("time.sleep(60)")
    monkeypatch.setattr("rlinf_lite.scheduler.local_ray._START_S", 2.0)
    monkeypatch.setattr("rlinf_lite.scheduler.local_ray._SAY_AFTER_S", 0.5)
    with pytest.raises(ClusterError, match="it is not up after 2 s"), local_ray(str(tmp_path), 1, None, False):
        pass
    assert "starting on this machine" in caplog.text and "limit: 2 s" in caplog.text
    assert not process_group_lives(int(started.read_text()))


def test_whatever_ends_a_start_ends_its_processes(tmp_path, head_program, monkeypatch):
    started = head_program("time.sleep(60)")
    sleep = time.sleep

    def interrupted(seconds):
        if started.exists() and started.read_text().endswith("\n"):
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt), local_ray(str(tmp_path), 1, None, False):
        pass
    assert not process_group_lives(int(started.read_text()))
