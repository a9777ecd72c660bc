"""The contract of both runtimes: start, call, send, receive, end. Every test runs on processes and on threads."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_lite.scheduler import (
    AbortedError,
    CallTimeoutError,
    Channel,
    ChannelTimeoutError,
    Cluster,
    ClusterError,
    Dispatch,
    PeerError,
    RecvTimeoutError,
    SchedulerError,
    Worker,
    WorkerError,
    WorkerGroup,
    fuse,
    register,
    wait_all,
)
from tests.conftest import SharedCluster


class Player(Worker):
    def __init__(self, start: dict[str, int] | None = None) -> None:
        self.start = start
        if start is not None and "fail" in start:
            raise ValueError("no such start")

    def identity(self) -> tuple[Any, ...]:
        return self.name, self.role, self.rank, self.world_size, self.local_rank, self.device

    def begun_with(self) -> Any:
        assert self.start is not None
        self.start["n"] += 1
        return self.start

    def add(self, value: Any, plus: Any = 1) -> Any:
        return value + plus

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def own(self, value: int) -> int:
        return value * 10 + self.rank

    def write_to(self, value: np.ndarray) -> bool:
        try:
            value[0] = 1
        except ValueError:
            return False
        return True

    def give(self, group: str, rank: int, numbers: list[int], tag: object = None) -> None:
        row = np.zeros(3)
        for number in numbers:
            row[:] = number
            self.send({"row": row, "half": torch.full((2,), float(number)).bfloat16()}, group, rank, tag)

    def take(self, group: str, count: int, tag: object = None, timeout_s: float | None = 20.0) -> list[float]:
        taken = []
        for _ in range(count):
            got = self.recv(group, 0, timeout_s, tag)
            assert got["half"].dtype == torch.bfloat16
            got["row"] += 0  # writable, and the receiver's alone
            taken.append(float(got["row"][0]))
        return taken

    def fail(self) -> None:
        raise KeyError("no such key")

    def lock(self) -> Any:
        return threading.Lock()

    def draw(self, seed: int | None = None) -> tuple[float, float, float]:
        if seed is not None:
            random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def threads(self, number: int) -> int:
        before = torch.get_num_threads()
        torch.set_num_threads(number)
        return before

    def partner(self, role: str) -> Any:
        other: Any = self.fused[role]
        return other.add(1)

    def through(self, name: str) -> Any:
        return Channel.connect(name).get(timeout_s=20)


@pytest.fixture(scope="module", params=["local", "ray"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    yield SharedCluster.of(request.param)
    SharedCluster.end_groups()


@pytest.fixture(scope="module")
def pair(cluster: Cluster) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """Group a with two ranks, and group b with one."""
    with cluster.launching():
        a = Player.create_group({"n": 1}).launch(cluster, "0-1", name="a")
        b = Player.create_group().launch(cluster, "2", name="b")
    yield a, b
    a.shutdown()
    b.shutdown()


def test_workers_know_who_they_are(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    a, b = pair
    assert a.identity().wait() == [("a", "a", rank, 2, rank, "cpu") for rank in range(2)]
    assert b.identity().wait() == [("b", "b", 0, 1, 0, "cpu")]


def test_every_worker_has_its_own_arguments(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    assert pair[0].begun_with().wait() == [{"n": 2}, {"n": 2}]


def test_calls_carry_copies_of_this_moment(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    value = np.arange(4)
    handle = pair[0].add(value, plus=2)
    value[:] = 0
    first, second = handle.wait()
    assert first.tolist() == second.tolist() == [2, 3, 4, 5]
    assert pair[0].own([1, 2]).wait() == [10, 21]
    assert pair[0].write_to(np.zeros(10)).wait() == [False, False]  # arrays arrive read-only


def test_handles_are_arguments(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    a, b = pair
    assert b.add(a.execute_on(1).add(3).map(lambda outputs: outputs[0])).wait() == [5]
    large = np.ones(200_000)
    assert [float(out.sum()) for out in a.add(large).wait()] == [400_000.0] * 2


def test_calls_run_in_order_and_say_how_long_they_took(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    handles = [pair[1].add(i) for i in range(20)]
    assert [handle.wait() for handle in handles] == [[i + 1] for i in range(20)]
    assert all(0 <= seconds < 20 for seconds in handles[-1].durations()) and handles[-1].done()


def test_messages_keep_their_order_and_their_moment(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    a, b = pair
    given = a.execute_on(0).give("b", 0, [1, 2, 3], tag="x"), a.execute_on(0).give("b", 0, [7], tag="y")
    late = b.take("a", 1, tag="y"), b.take("a", 3, tag="x")
    assert [found[0] for found in wait_all(*late, *given)[:2]] == [[7.0], [1.0, 2.0, 3.0]]


def test_what_a_worker_raises(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    with pytest.raises(WorkerError, match=r"b\[0\]\.fail raised KeyError: 'no such key'") as caught:
        pair[1].fail().wait()
    assert isinstance(caught.value.__cause__, KeyError) and "in fail" in caught.value.worker_traceback
    with pytest.raises(SchedulerError, match=r"(?s)b\.lock: .*cannot pickle"):
        pair[1].lock().wait()
    assert pair[1].add(1).wait() == [2]


def test_a_failure_ends_waits_for_others(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    a, b = pair
    with pytest.raises(WorkerError, match="no such key"):
        wait_all(b.take("a", 1, timeout_s=None), a.fail())
    with pytest.raises(WorkerError) as caught:
        b.take("a", 1).wait()
    assert isinstance(caught.value.__cause__, AbortedError)
    a.clear_abort(20), b.clear_abort(20)
    wait_all(a.execute_on(0).give("b", 0, [4]), b.take("a", 1))


def test_waits_have_limits(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    a, b = pair
    with pytest.raises(WorkerError) as caught:
        b.take("a", 1, timeout_s=0.2).wait()
    assert isinstance(caught.value.__cause__, RecvTimeoutError)
    with pytest.raises(CallTimeoutError, match=r"not done: b\[0\]\.take \(0 of 1 calls are done\)"):
        b.take("a", 1, timeout_s=None).wait(0.3)
    b.abort("no more")
    b.clear_abort(20)
    assert a.add(0).wait() == [1, 1]


def test_nobody_of_that_name(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    with pytest.raises(WorkerError) as caught:
        pair[1].give("nobody", 0, [1]).wait()
    assert isinstance(caught.value.__cause__, PeerError) and "running: a, b" in str(caught.value)


def test_every_worker_draws_from_its_own_generators(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    a, b = pair
    a.draw(seed=3).wait()
    once = a.draw().wait()
    a.draw(seed=3).wait()
    b.draw(seed=8).wait()
    driver = np.random.RandomState(1)
    np.random.seed(1)
    assert a.draw().wait() == once and once[0] == once[1]
    assert np.random.rand() == driver.rand()


def test_every_worker_has_its_own_number_of_threads(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    assert pair[0].execute_on(0).threads(2).wait() == [1]
    assert pair[1].threads(1).wait() == [1]
    assert pair[0].execute_on(0).threads(1).wait() == [2]


def test_fused_roles_find_each_other(cluster: Cluster) -> None:
    groups = fuse(left=Player.create_group(), right=Player.create_group()).launch(cluster, "3")
    assert groups.left.partner("right").wait() == [2]
    groups.shutdown()
    assert not {"left", "right"} & set(cluster.groups)


def test_a_channel(pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    channel = Channel.create("line", maxsize=2)
    waiting = pair[1].through("line")
    item = {"x": np.arange(3)}
    channel.put(item)
    item["x"][:] = 0
    assert waiting.wait()[0]["x"].tolist() == [0, 1, 2]
    channel.put("a", weight=2)
    channel.put("b", weight=2)
    with pytest.raises(ChannelTimeoutError, match=r"full for 0\.1 s"):
        channel.put("c", timeout_s=0.1)
    assert channel.get_batch(4) == ["a", "b"] and channel.empty()
    with pytest.raises(SchedulerError, match="exists already"):
        Channel.create("line")
    channel.close()
    with pytest.raises(SchedulerError, match="the channel 'line' is gone"):
        channel.get()


def test_a_group_ends_while_it_waits_for_a_channel(cluster: Cluster) -> None:
    channel = Channel.create("empty")
    group = Player.create_group().launch(cluster, "3", name="waiter")
    waiting, started = group.through("empty"), time.monotonic()
    time.sleep(0.3)
    group.shutdown()
    assert time.monotonic() - started < 8
    with pytest.raises(SchedulerError):
        waiting.wait(20)
    channel.put("first")  # the wait of a killed process may take this item
    channel.put("second")
    assert channel.get(timeout_s=20) in ("first", "second")
    channel.close()


def test_a_constructor_that_raises_leaves_nothing(cluster: Cluster) -> None:
    with pytest.raises(WorkerError, match=r"bad\[0\]\.__init__ raised ValueError: no such start"):
        Player.create_group({"fail": 1}).launch(cluster, "3", name="bad")
    assert "bad" not in cluster.groups


def test_a_group_that_has_ended_can_start_again(cluster: Cluster, pair: tuple[WorkerGroup, WorkerGroup]) -> None:
    for _ in range(2):
        group = Player.create_group().launch(cluster, "3", name="again")
        hanging = group.take("a", 1, timeout_s=None)
        with pytest.raises(ClusterError, match="a group named 'again' is running"):
            Player.create_group().launch(cluster, "3", name="again")
        group.shutdown()
        with pytest.raises(SchedulerError):
            hanging.wait(20)
        with pytest.raises(SchedulerError, match="is not running"):
            group.add(1)
    with pytest.raises(WorkerError) as caught:
        pair[0].give("again", 0, [1]).wait()
    assert isinstance(caught.value.__cause__, PeerError)


def test_local_needs_no_ray_and_brings_the_users_own_exception() -> None:
    code = """
import sys, traceback
from rlinf_lite.scheduler import Cluster, Worker
class Own(Worker):
    def fail(self):
        found = 1
        raise LookupError("mine")
try:
    with Cluster(runtime="local") as cluster:
        Own.create_group().launch(cluster).fail().wait()
except LookupError as error:
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    print(frame.f_code.co_name, frame.f_locals["found"], "ray" in sys.modules, "torch" in sys.modules)
"""
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["fail", "1", "False", "False"], done.stderr


def test_limits_wait_while_a_worker_computes() -> None:
    """A breakpoint in one worker does not let the others reach their time limits."""

    class Slow(Worker):
        def think(self) -> None:
            time.sleep(0.6)
            self.send("done", "other", 0)

        def wait_for_it(self) -> Any:
            return self.recv("slow", 0, timeout_s=0.3)

    cluster = SharedCluster.of("local")
    slow = Slow.create_group().launch(cluster, "0", name="slow")
    other = Slow.create_group().launch(cluster, "1", name="other")
    waiting, thinking = other.wait_for_it(), slow.think()
    assert wait_all(waiting, thinking, timeout_s=0.3)[0] == ["done"]
    SharedCluster.end_groups()
