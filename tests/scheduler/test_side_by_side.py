"""Groups that are launched or restarted together do not wait for each other."""

import os
import signal
import time
from pathlib import Path

import pytest

from rlinf_lite.scheduler import Cluster, SchedulerError, Worker, WorkerError, WorkerGroup


class Friend(Worker):
    """A worker whose constructor waits until another worker starts too."""

    def __init__(self, home: Path, other: str) -> None:
        if (home / f"{self.name}.broken").exists():
            raise ValueError(f"{self.name} is broken")
        (home / self.name).touch()
        deadline = time.monotonic() + 30
        while not (home / other).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{other} does not come")
            time.sleep(0.02)

    def init(self, what: str) -> None:
        self.what = what

    def known(self) -> str:
        return self.what


def launch(cluster: Cluster, home: Path) -> tuple[WorkerGroup, WorkerGroup]:
    with cluster.launching():
        one = Friend.create_group(home, "two").launch(cluster, "0", name="one")
        two = Friend.create_group(home, "one").launch(cluster, "1", name="two")
    return one, two


def test_groups_launch_and_start_again_side_by_side(cluster: Cluster, tmp_path: Path) -> None:
    groups = launch(cluster, tmp_path)
    for group in groups:
        group.init(f"for {group.name}").wait()
        (tmp_path / group.name).unlink()
    cluster.restart({"one": [0], "two": []})
    assert [group.known().wait() for group in groups] == [["for one"], ["for two"]]
    for group in groups:
        group.shutdown()


def test_where_one_does_not_start_none_is_left(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "two.broken").touch()
    (tmp_path / "two").touch()  # so that only the constructor can fail
    with pytest.raises(WorkerError, match=r"two\[0\]\.__init__ raised ValueError: two is broken"):
        launch(cluster, tmp_path)
    assert not cluster.groups
    (tmp_path / "two.broken").unlink()
    for group in launch(cluster, tmp_path):
        group.shutdown()


def test_one_that_does_not_start_again_does_not_keep_others_from_it(cluster: Cluster, tmp_path: Path) -> None:
    groups = _, two = launch(cluster, tmp_path)
    for group in groups:
        group.init("all").wait()
    (tmp_path / "one.broken").touch()
    os.kill(two.members[0].pid, signal.SIGKILL)
    with pytest.raises(SchedulerError, match="one is broken"):
        cluster.restart({"one": [0], "two": [0]})
    assert two.known().wait() == ["all"]
    for group in groups:
        group.shutdown()
