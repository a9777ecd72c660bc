"""Fixtures for all tests, and the environment in which they run: small, deterministic, independent of each other."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from rlinf_lite.threads import THREADS

if TYPE_CHECKING:
    from rlinf_lite.scheduler import Cluster

# Set before torch or numpy are imported: too many threads cost up to a factor of 50 on two cores.
for variable, value in (THREADS | {"MKL_NUM_THREADS": "1"}).items():
    os.environ.setdefault(variable, value)
# A cluster or a token of another program must not reach the tests.
for variable in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
    os.environ.pop(variable, None)

# As in `Cluster`. Ray's default gives workers niceness 15: they would get no CPU time beside the other test process.
os.environ.setdefault("RAY_worker_niceness", "0")
# As in `Painter`, which some tests import after mujoco.
if sys.platform == "linux":
    os.environ.setdefault("MUJOCO_GL", "egl")

REPO = Path(__file__).resolve().parents[1]
LONG = ("jobs", "control", "runners", "scheduler", "cli")
"""Directories with tests that start processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests: long files first, and files with a Ray of their own before files that share one. Files are
    distributed over two test processes in this order, so that neither waits long for the other at the end, or starts
    more Rays than necessary. Within a file, tests on threads come before tests on processes."""
    first = {item.path: index for index, item in reversed(list(enumerate(items)))}

    def place(item: pytest.Item) -> tuple[bool, int, int, bool]:
        own_ray = any("own_ray" in mark.args for mark in item.iter_markers("usefixtures"))
        directory = item.path.relative_to(REPO / "tests").parts[0]
        length = LONG.index(directory) if directory in LONG else len(LONG)
        return not own_ray, length, first[item.path], item.get_closest_marker("processes") is not None

    items.sort(key=place)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the clone."""
    return REPO


@pytest.fixture(scope="session", autouse=True)
def short_ray_tmp() -> Iterator[Path]:
    """Ray's temporary directory: its path is short, since socket paths have at most 107 bytes. Deleted at the end."""
    path = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    previous = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = str(path)
    yield path
    if previous is None:
        del os.environ["RAY_TMPDIR"]
    else:
        os.environ["RAY_TMPDIR"] = previous
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Workers of a Ray that is started inside the block are forks of a process that has imported torch and transformers
    (tests/forked_workers): 4 of them start in 2 s on two cores, not in 16."""
    directory, socket = REPO / "tests" / "forked_workers", os.path.join(os.environ["RAY_TMPDIR"], "forks")
    if not _server:
        words = [sys.executable, str(directory / "server.py"), socket]
        _server.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert _server[0].stdout is not None and _server[0].stdout.readline() == b"ready\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLINF_LITE_FORK_SOCKET", socket)
        patch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
        yield


_server: list[subprocess.Popen[bytes]] = []  # ends with this process


class SharedCluster:
    """Clusters with four virtual slots, which the tests of this process use one after the other: on threads, or on a
    Ray of our own, which takes seconds to start."""

    running: Cluster | None = None
    runtime: Literal["ray", "local"]

    @classmethod
    def of(cls, runtime: Literal["ray", "local"]) -> Cluster:
        from rlinf_lite.scheduler import Cluster

        if cls.running is not None and (cls.runtime != runtime or cls.running.runtime.has_ended()):
            cls.close()
        if cls.running is None:
            with nullcontext() if runtime == "local" else forked_workers():
                cls.running = Cluster(num_gpus_per_node=4, accelerator="cpu", log_to_driver=False, runtime=runtime)
            cls.runtime = runtime
        return cls.running

    @classmethod
    def end_groups(cls) -> None:
        from rlinf_lite.scheduler import Cluster

        if cls.running is not None:
            for processes in list(cls.running.processes):
                cls.running.end(processes)
            if Cluster.current() is not cls.running:
                cls.close()

    @classmethod
    def close(cls) -> None:
        if cls.running is not None:
            cls.running.shutdown()
        cls.running = None


@pytest.fixture
def cluster(request: pytest.FixtureRequest, short_ray_tmp: Path) -> Iterator[Cluster]:
    """A cluster on threads of this process, or on processes if the test is marked so (it kills workers, or trains on
    several ranks)."""
    yield SharedCluster.of("local" if request.node.get_closest_marker("processes") is None else "ray")
    SharedCluster.end_groups()


@pytest.fixture(scope="module")
def ray_cluster(short_ray_tmp: Path) -> Iterator[Cluster]:
    """A cluster on processes, for all tests of a module."""
    yield SharedCluster.of("ray")
    SharedCluster.end_groups()


@pytest.fixture(scope="module")
def own_ray() -> None:
    """For modules that start Ray in this process themselves, or that plan without a running cluster."""
    SharedCluster.close()


@pytest.fixture(scope="module")
def forks(short_ray_tmp: Path) -> Iterator[None]:
    """For modules whose commands and programs start Ray."""
    with forked_workers():
        yield


@pytest.fixture(scope="session", autouse=True)
def no_ray_is_left(short_ray_tmp: Path) -> Iterator[None]:
    yield
    SharedCluster.close()


@pytest.fixture
def command_line(own_ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], int]]:
    """Run `rlinf-lite WORDS` in this process and return its exit code. Changes to the process are undone."""
    from rlinf_lite.cli import main

    def run(words: list[str]) -> int:
        try:
            return main(words)
        except SystemExit as ended:
            return int(str(ended.code))

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield run
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
