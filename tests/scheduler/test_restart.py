"""Workers are replaced in place: `init` is repeated with its last arguments, and the other workers are not affected."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from rlinf_lite.scheduler import Cluster, SchedulerError, WorkerDiedError, WorkerGroup, fuse, wait_all
from rlinf_lite.scheduler.processes import is_ray_process
from rlinf_lite.scheduler.ray_network import _sockets
from tests.scheduler.talkers import Talker


def pids(*groups: WorkerGroup) -> list[int]:
    return [member.pid for group in groups for member in group.members]


@pytest.fixture
def pair(cluster: Cluster) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    groups = tuple(Talker.create_group().launch(cluster, "0-1", name=name) for name in ("left", "right"))
    yield groups
    for group in groups:
        group.shutdown()


def test_one_worker_is_replaced_and_the_others_are_not_touched(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    left, right = pair
    left.init("settings", 7).wait()
    before = pids(left, right)
    waiting = right.execute_on(1).hear("left", 1)
    os.kill(left.members[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"left\[1\]"):
        wait_all(left.known(), waiting)
    left.restart(1)
    for group in pair:
        group.abort("the worker was replaced")
    for group in pair:
        group.clear_abort()
    after = pids(left, right)
    assert [i for i in range(4) if before[i] != after[i]] == [1]
    assert left.known().wait() == [(0, ("settings", 7)), (1, ("settings", 7))]
    heard = right.execute_on(1).hear("left", 1)
    left.execute_on(1).greet("right", 1).wait()
    assert heard.wait(10) == ["from left[1]"]
    back = left.execute_on(1).hear("right", 0)
    right.execute_on(0).greet("left", 1).wait()
    assert back.wait(10) == ["from right[0]"]


def test_arguments_that_were_spread_over_ranks_are_given_again_by_rank(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    left, _ = pair
    for rank in range(2):
        left.execute_on(rank).init(f"for {rank}").wait()
    left.restart()
    assert left.known().wait() == [(0, ("for 0",)), (1, ("for 1",))]


def test_a_stopped_process_is_ended_and_replaced(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    left, _ = pair
    pid = left.members[0].pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    left.restart(0)
    assert time.monotonic() - started < 15
    assert not is_ray_process(pid)
    assert left.execute_on(0).known().wait(10) == [(0, ())]


def test_fused_workers_are_replaced_together(cluster: Cluster) -> None:
    groups = fuse(one=Talker.create_group(), two=Talker.create_group()).launch(cluster, "0-1")
    groups.one.init("one").wait()
    groups.two.init("two").wait()
    kept = groups.one.members[0].pid
    os.kill(groups.one.members[1].pid, signal.SIGKILL)
    groups.two.restart(1)
    assert groups.one.known().wait() == [(0, ("one",)), (1, ("one",))]
    assert groups.two.known().wait() == [(0, ("two",)), (1, ("two",))]
    assert groups.one.members[0].pid == kept and groups.one.members[1].pid == groups.two.members[1].pid
    groups.shutdown()


def test_no_socket_is_kept_to_a_worker_that_was_replaced(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    for _ in range(3):
        for group in pair:
            group.abort("a test")
        for group in pair:
            group.clear_abort()
        pair[0].restart(0)
    for group in pair:
        group.abort("a test")
    assert len(_sockets) >= 4 and all(os.path.exists(path) for path in _sockets)
    for group in pair:
        group.clear_abort()


def test_only_a_running_group_restarts() -> None:
    with pytest.raises(SchedulerError, match="not running"):
        Talker.create_group().restart()


def test_a_handle_among_the_arguments_says_who_feeds_whom(
    cluster: Cluster, pair: tuple[WorkerGroup, WorkerGroup]
) -> None:
    left, right = pair
    right.init(left.known()).wait()
    assert ("left", "right") in cluster.calls.data_flow and ("right", "left") not in cluster.calls.data_flow
