import asyncio
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_lite.scheduler import (
    CallTimeoutError,
    Cluster,
    ClusterError,
    Dispatch,
    Execute,
    PlacementError,
    ResourcePool,
    Scatter,
    SchedulerError,
    Worker,
    WorkerError,
    WorkerGroup,
    register,
    register_dispatch_mode,
    wait_all,
)
from rlinf_lite.scheduler.dispatch import CallRule


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")
        self.lock = threading.Lock()


def every_other(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [((args[0][rank::world_size],), kwargs) for rank in range(world_size)]


def interleave(outputs: list[Any]) -> list[Any]:
    return [value for values in zip(*outputs, strict=True) for value in values]


register_dispatch_mode("ROUND_ROBIN", every_other, interleave)


class Echo(Worker):
    def __init__(self, scale: int = 1, fail_on: int | None = None) -> None:
        self.scale = scale
        if fail_on == self.rank:
            raise ValueError(f"no rank {self.rank}, {self.world_size} in all")

    def identity(self) -> tuple[Any, ...]:
        devices = os.environ["CUDA_VISIBLE_DEVICES"]
        return self.name, self.role, self.rank, self.world_size, self.local_rank, self.local_world_size, devices

    def threads(self) -> tuple[int, int, bool]:
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        return before, torch.get_num_threads(), threading.current_thread() is threading.main_thread()

    def echo(self, value: Any, plus: int = 0) -> Any:
        return value if not plus else value + plus

    def change(self, value: dict[str, Any]) -> int:
        value["x"] = np.array(value["x"])
        value["x"] += 1
        return int(value["x"].sum())

    def address_of(self, value: np.ndarray) -> bool:
        return bool(value.flags.owndata)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def scatter(self, value: Any, common: Any = None) -> Any:
        return self.rank, value, common

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def multiply(self, value: int, by: Any = 1) -> int:
        return value * by * self.scale

    @register(execute_mode=Execute.RANK_ZERO)
    def first(self, value: Any) -> Any:
        return self.rank, value

    @register(blocking=True)
    def now(self) -> int:
        return self.rank

    @register(dispatch_mode="ROUND_ROBIN")
    def interleaved(self, values: list[int]) -> list[int]:
        return [value * 10 for value in values]

    @register(timeout_s=0.3)
    def slow(self, seconds: float) -> None:
        time.sleep(seconds)

    def nap(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def fail(self, rank: int, kind: str = "value") -> int:
        if rank == self.rank:
            if kind == "unpicklable":
                raise UnpicklableError("a", "b")
            raise KeyError("no such key")
        return self.rank

    def unpicklable(self) -> Any:
        return threading.Lock()

    def count(self, log: list[int] = []) -> list[int]:  # noqa: B006
        log.append(len(log))
        return log

    def _private(self) -> None: ...


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> Iterator[WorkerGroup]:
    running = Echo.create_group(scale=2).launch(cluster, "0-1:0-1", name="echo")
    yield running
    running.shutdown()


def test_workers_know_who_they_are(group: WorkerGroup) -> None:
    assert group.identity().wait() == [("echo", "echo", rank, 2, rank, 2, "") for rank in range(2)]
    assert (group.name, group.world_size) == ("echo", 2)


def test_one_thread_unless_asked_and_the_main_thread(group: WorkerGroup) -> None:
    assert group.threads().wait() == [(1, 3, True)] * 2


def test_one_to_all(group: WorkerGroup) -> None:
    assert group.echo(3).wait() == [3, 3]
    assert group.echo(value=3, plus=4).wait() == [7, 7]
    assert group.execute_on(1).identity().wait()[0][2] == 1


def test_calls_run_in_order(group: WorkerGroup) -> None:
    handles = [group.count() for _ in range(20)]
    assert [len(handle.wait()[1]) for handle in handles] == list(range(1, 21))


def test_all_to_all(group: WorkerGroup) -> None:
    assert group.scatter(Scatter(["a", "b"]), common=[1, 2]).wait() == [(0, "a", [1, 2]), (1, "b", [1, 2])]
    with pytest.raises(ValueError, match="argument 0 has 3 elements for 2 ranks"):
        group.scatter(Scatter([1, 2, 3]))


def test_dp_compute(group: WorkerGroup) -> None:
    assert group.multiply([1, 2], by=[10, 100]).wait() == [20, 400]
    assert group.multiply([1, 2], by=3).wait() == [6, 12]
    with pytest.raises(ValueError, match="argument 'by' has 1 elements for 2 ranks; give one per rank"):
        group.multiply([1, 2], by=[1])


def test_rank_zero_blocking_and_registered_modes(group: WorkerGroup) -> None:
    assert group.first("x").wait() == (0, "x")
    assert group.now() == [0, 1]
    assert group.interleaved([1, 2, 3, 4]).wait() == [10, 20, 30, 40]
    with pytest.raises(ValueError, match="unknown dispatch mode 'NOPE'"):
        register(dispatch_mode="NOPE")
    with pytest.raises(ValueError, match="exists already"):
        register_dispatch_mode("ROUND_ROBIN", every_other, interleave)


def test_views_change_nothing_in_the_group(group: WorkerGroup) -> None:
    view = group.execute_on(1)
    assert view.nap(0).wait() == [1] and view.multiply([5]).wait() == [10] and view.first(0).wait() == (1, 0)
    assert group.nap(0).wait() == [0, 1]
    with pytest.raises(ValueError, match=r"echo has ranks 0\.\.1, not 2"):
        group.execute_on(2)


def test_handles(group: WorkerGroup) -> None:
    handle = group.nap(0.3)
    assert not handle.done()
    assert handle.wait() == [0, 1] and handle.wait() == [0, 1] and handle.done()
    assert all(0.3 <= seconds < 3 for seconds in handle.durations())

    async def gather() -> list[Any]:
        return list(await asyncio.gather(group.nap(0.01), group.echo(5)))

    assert asyncio.run(gather()) == [[0, 1], [5, 5]]
    assert wait_all(group.nap(0), group.echo(1), what="two calls") == [[0, 1], [1, 1]]


def test_a_handle_is_an_argument(cluster: Cluster, group: WorkerGroup) -> None:
    other = Echo.create_group().launch(cluster, "2-3", name="other")
    big = np.arange(500_000)
    assert other.echo(group.echo(1)).wait() == [[1, 1], [1, 1]]
    assert other.multiply(group.multiply([1, 2]), by=group.first(1).map(lambda output: output[1] + 1)).wait() == [4, 8]
    assert other.echo(value=group.multiply([1, 2])).wait() == [[2, 4], [2, 4]]
    assert other.multiply(group.first(3).map(lambda output: [output[1], 5])).wait() == [3, 5]
    received = other.execute_on(0).echo(group.echo(big)).wait()[0]
    np.testing.assert_array_equal(received[1], big)
    with pytest.raises(ValueError, match="2 outputs for 1 ranks"):
        other.execute_on(0).multiply(group.multiply([1, 2]))
    with pytest.raises(TypeError, match="must be an argument of a group call itself"):
        other.echo([group.echo(1)])
    with pytest.raises(WorkerError, match=r"echo\[1\]\.fail raised KeyError"):  # the cause, not who reports it
        other.echo(group.fail(1)).wait()
    other.shutdown()


@pytest.mark.parametrize("size", [3, 200_000])
def test_arguments_are_never_changed(group: WorkerGroup, size: int) -> None:
    value: dict[str, Any] = {"x": np.zeros(size), "y": [1]}
    assert group.change(value).wait() == [size, size]
    assert value["y"] == [1] and not value["x"].any()


def test_exceptions_keep_their_type_and_traceback(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError) as error:
        group.fail(1).wait()
    assert (error.value.group, error.value.rank, error.value.method) == ("echo", 1, "fail")
    assert isinstance(error.value.__cause__, KeyError)
    text = str(error.value)
    assert text.startswith("echo[1].fail raised KeyError: 'no such key'")
    assert 'raise KeyError("no such key")' in text and "test_group.py" in text and "host.py" not in text
    assert group.nap(0).wait() == [0, 1]  # the group goes on


def test_exceptions_that_cannot_be_pickled(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match="UnpicklableError: a b") as error:
        group.fail(0, kind="unpicklable").wait()
    assert "a b" in str(error.value.__cause__)


def test_results_that_cannot_be_pickled(group: WorkerGroup) -> None:
    with pytest.raises(Exception, match=r"echo\.unpicklable.*(?s:.)*pickle"):
        group.unpicklable().wait()


def test_wait_all_raises_at_the_first_failure(group: WorkerGroup) -> None:
    view = group.execute_on(0)
    start = time.monotonic()
    with pytest.raises(WorkerError, match="KeyError"):
        wait_all(view.nap(10), group.execute_on(1).fail(1))
    assert time.monotonic() - start < 8
    group.clear_abort()


def test_timeouts_say_what_is_late(group: WorkerGroup) -> None:
    with pytest.raises(CallTimeoutError, match=r"waited 0\.\d s; not done: echo\[1\]\.nap \(1 of 2 calls are done\)"):
        group.execute_on(0, 1).multiply([0, 0]).wait(5)
        wait_all(group.execute_on(0).echo(1), group.execute_on(1).nap(1), timeout_s=0.5)
    group.clear_abort()
    with pytest.raises(CallTimeoutError, match=r"echo\[0\]\.slow, echo\[1\]\.slow"):
        group.slow(1.0).wait()
    with pytest.raises(TimeoutError, match="generate: waited"):
        wait_all(group.nap(1), timeout_s=0.1, what="generate")
    group.clear_abort()


def test_missed_names(group: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match=r"no public method 'ecco'\. Did you mean echo"):
        group.ecco()
    for name in ("_private", "send", "recv"):
        with pytest.raises(AttributeError):
            getattr(group, name)

    class Clash(Worker):
        def shutdown(self) -> None: ...

    with pytest.raises(TypeError, match=r"Clash\.shutdown.*rename"):
        Clash.create_group()


def test_constructor_errors_surface_in_launch(cluster: Cluster) -> None:
    with pytest.raises(WorkerError, match=r"broken\[1\].__init__ raised ValueError: no rank 1, 2 in all") as error:
        Echo.create_group(fail_on=1).launch(cluster, "0:0-1", name="broken")
    assert isinstance(error.value.__cause__, ValueError)
    Echo.create_group().launch(cluster, "0", name="broken").shutdown()  # the name is free again


def test_more_workers_than_cores_fit_on_a_slot(cluster: Cluster) -> None:
    crowd = Echo.create_group().launch(cluster, "0:0-5", name="crowd")
    assert crowd.nap(0).wait() == list(range(6))
    crowd.shutdown()
    crowd.shutdown()


def test_a_method_is_called_by_name(group: WorkerGroup) -> None:
    assert group.call("echo", (1,), {"plus": 2}).wait() == [3, 3]
    assert group.call("echo", (1,), ranks=[1]).wait() == [1]
    assert group.call("scatter", (Scatter(["a"]),), ranks=[1]).wait() == [(1, "a", None)]
    first = CallRule(execute_mode=Execute.RANK_ZERO)  # replaces the method's own rule: nothing is scattered
    assert group.call("scatter", ([1, 2],), ranks=[1, 0], rule=first).wait() == (1, [1, 2], None)
    with pytest.raises(AttributeError, match=r"no public method 'ecko'\. Did you mean echo"):
        group.call("ecko")
    with pytest.raises(SchedulerError, match="'Echo' is not running: launch it first"):
        Echo.create_group().call("echo", (1,))


def test_names_are_unique(cluster: Cluster, group: WorkerGroup) -> None:
    with pytest.raises(ClusterError, match="a group named 'echo' is running"):
        Echo.create_group().launch(cluster, "0", name="echo")
    with pytest.raises(ClusterError, match="has a Cluster already"):
        Cluster()


def test_placement_is_checked_at_launch(cluster: Cluster) -> None:
    with pytest.raises(PlacementError, match=r"Echo: 4-5 needs slots 4\.\.5, this cluster has 0\.\.3"):
        Echo.create_group().launch(cluster, "4-5")


def test_pools_share_nothing(cluster: Cluster, group: WorkerGroup) -> None:
    with pytest.raises(PlacementError, match="echo runs on 0, 1"):
        ResourcePool(cluster, "math", "1-2")
    pool = ResourcePool(cluster, "math", "2-3")
    with pytest.raises(PlacementError, match="'math' has 2, 3"):
        ResourcePool(cluster, "vla", "3")
    with pytest.raises(PlacementError, match="belong to the resource pool 'math'"):
        Echo.create_group().launch(cluster, "1-2", name="intruder")
    with pytest.raises(PlacementError, match=r"the pool 'math' has 0\.\.1"):
        pool.get_strategy("reward", "2")
    strategy = pool.get_strategy("reward", "1:0-1")
    assert [process.slots for process in strategy.processes] == [(3,), (3,)]
    member = Echo.create_group().launch(cluster, strategy)
    assert member.name == "reward" and member.nap(0).wait() == [0, 1]
    member.shutdown()
    pool.release()
    ResourcePool(cluster, "vla", "3").release()


def test_a_worker_without_a_cluster_is_rank_0_of_1() -> None:
    worker = Echo()
    assert (worker.rank, worker.world_size, worker.device) == (0, 1, "cpu") and worker.echo(1) == 1
    with worker.timer("work"):
        time.sleep(0.01)
    (span,) = worker.pop_spans()
    assert span.name == "work" and 0.01 <= span.end - span.start < 1 and worker.pop_spans() == []
