import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_lite.scheduler import (
    Channel,
    ChannelTimeoutError,
    Cluster,
    SchedulerError,
    Worker,
    WorkerError,
    WorkerGroup,
    wait_all,
)
from rlinf_lite.scheduler.heartbeat import Activity
from rlinf_lite.scheduler.queues import Queues


class Endpoint(Worker):
    def open(self, name: str) -> None:
        self.channel = Channel.connect(name)

    def put_all(self, items: list[Any], key: Any = None) -> float:
        start = time.monotonic()
        for item in items:
            self.channel.put(item, key=key)
        return time.monotonic() - start

    def put_ranked(self, count: int) -> None:
        self.put_all([(self.rank, i) for i in range(count)])

    def get_all(self, count: int, key: Any = None) -> list[Any]:
        return [self.channel.get(key=key, timeout_s=20) for _ in range(count)]

    def take(self) -> int:
        self.taken = self.channel.get(timeout_s=20)
        return int(self.taken.max())

    def make(self, name: str) -> None:
        Channel.create(name)

    def double(self) -> None:
        item = self.channel.get(key="in", timeout_s=20)
        item["x"] *= 2
        self.channel.put(item, key="out")


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> Iterator[WorkerGroup]:
    yield Endpoint.create_group().launch(cluster, "0-1", name="endpoint")


@pytest.fixture
def channel(group: WorkerGroup, request: pytest.FixtureRequest) -> Iterator[Channel]:
    created = Channel.create(request.node.name, maxsize=getattr(request, "param", 0))
    group.open(request.node.name).wait()
    yield created
    created.close()


def test_order_is_kept_per_key(channel: Channel) -> None:
    for i in range(6):
        channel.put(i, key=i % 2)
    assert channel.qsize(0) == 3 and channel.empty("other")
    assert [channel.get(key=1) for _ in range(3)] == [1, 3, 5]
    assert [channel.get(key=0) for _ in range(3)] == [0, 2, 4]
    assert channel.empty(0)


def test_a_wait_for_an_item_is_known_as_one(channel: Channel) -> None:
    """A wait for a channel shows in heartbeats, so that a long wait is not taken for a hang."""
    activity, got = Activity(), []

    def method() -> None:
        with activity.method("take"):
            got.append(channel.get(timeout_s=20))

    thread = threading.Thread(target=method)
    thread.start()
    deadline = time.monotonic() + 10
    while activity.waiting_for is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert activity.waiting_for == f"the channel {channel.name!r}"
    channel.put(1)
    thread.join()
    assert got == [1] and activity.waiting_for is None


def test_observations_from_worker_to_worker(channel: Channel, group: WorkerGroup) -> None:
    image = torch.randint(0, 255, (4, 256, 256, 3), dtype=torch.uint8)
    sent: dict[str, Any] = {
        "images": {"base": image},
        "half": torch.ones(70_000).bfloat16(),
        "text": ["pick"],
        "x": np.ones(3),
    }
    _, received = wait_all(group.execute_on(0).put_all([sent]), group.execute_on(1).get_all(1))
    assert torch.equal(received[0][0]["images"]["base"], image) and torch.equal(received[0][0]["half"], sent["half"])
    assert received[0][0]["text"] == ["pick"]


def test_driver_and_worker_share_it_and_items_are_copies(channel: Channel, group: WorkerGroup) -> None:
    item = {"x": np.arange(100_000)}
    handle = group.execute_on(0).double()
    channel.put(item, key="in")
    item["x"][:] = 0
    doubled = channel.get(key="out", timeout_s=20)
    np.testing.assert_array_equal(doubled["x"], 2 * np.arange(100_000))
    doubled["x"][0] = 5  # writable
    handle.wait()


def test_many_producers_and_consumers(channel: Channel, group: WorkerGroup) -> None:
    producers = group.put_ranked(30)
    taken = [channel.get(timeout_s=20) for _ in range(20)] + [
        item for items in group.get_all(20).wait() for item in items
    ]
    producers.wait()
    assert sorted(taken) == sorted((rank, i) for rank in range(2) for i in range(30))
    mine = [i for rank, i in taken[:20] if rank == 0]
    assert mine == sorted(mine)


@pytest.mark.parametrize("channel", [2], indirect=True)
def test_a_full_channel_makes_producers_wait(channel: Channel, group: WorkerGroup) -> None:
    producer = group.execute_on(0).put_all([1, 2, 3])
    deadline = time.monotonic() + 20
    while channel.qsize() < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.4)
    assert not producer.done() and channel.qsize() == 2
    with pytest.raises(ChannelTimeoutError, match=r"full for 0\.1 s"):
        channel.put(4, timeout_s=0.1)
    assert [channel.get() for _ in range(3)] == [1, 2, 3]
    assert producer.wait()[0] > 0.3
    assert channel.empty()


def test_an_empty_channel_makes_consumers_wait(channel: Channel, group: WorkerGroup) -> None:
    with pytest.raises(ChannelTimeoutError, match=r"channel 'test_an_empty.*', key 'k': nothing arrived in 0\.1 s"):
        channel.get(key="k", timeout_s=0.1)
    consumer = group.execute_on(1).get_all(1, key="k")
    channel.put("x", key="k")
    assert consumer.wait() == [["x"]]


@pytest.mark.parametrize("channel", [2], indirect=True)
def test_batches_by_weight(channel: Channel, group: WorkerGroup) -> None:
    producer = group.execute_on(0).put_all([1])
    producer.wait()
    channel.put("b", weight=3)
    with pytest.raises(ChannelTimeoutError):
        channel.get_batch(4, timeout_s=0.2)
    assert channel.qsize() == 2  # nothing was lost
    assert channel.get_batch(3) == [1, "b"]

    async def more_than_fits() -> list[Any]:
        batch = asyncio.create_task(channel.get_batch_async(10))
        for i in range(5):
            await channel.put_async(i, weight=2)
        return await batch

    assert asyncio.run(more_than_fits()) == [0, 1, 2, 3, 4]


def test_async_twins(channel: Channel) -> None:
    async def talk() -> tuple[Any, int, bool]:
        waiting = asyncio.create_task(channel.get_async(timeout_s=20))
        await asyncio.sleep(0.05)
        await channel.put_async({"x": np.arange(3)})
        item = await waiting
        return item, await channel.qsize_async(), await channel.empty_async()

    item, size, empty = asyncio.run(talk())
    assert item["x"].tolist() == [0, 1, 2] and (size, empty) == (0, True)


def test_names(channel: Channel, cluster: Cluster) -> None:
    with pytest.raises(SchedulerError, match="exists already"):
        Channel.create("test_names")
    with pytest.raises(SchedulerError, match="no channel named 'nope'"):
        Channel.connect("nope")


def test_closing_ends_waits(group: WorkerGroup) -> None:
    channel = Channel.create("closing")
    group.open("closing").wait()
    waiting = group.get_all(1)
    time.sleep(0.3)
    channel.close()
    with pytest.raises(WorkerError, match=r"the channel 'closing' (is gone: it )?was closed"):
        waiting.wait(10)
    with pytest.raises(SchedulerError, match="the channel 'closing' is gone: it was closed, or its creator ended"):
        channel.put(1)
    Channel.create("closing").close()  # the name is free


def test_a_channel_ends_with_its_creator(cluster: Cluster) -> None:
    creator = Endpoint.create_group().launch(cluster, "2", name="creator")
    creator.make("mortal").wait()
    channel = Channel.connect("mortal")
    channel.put(1)
    os.kill(creator.members[0].pid, signal.SIGKILL)
    with pytest.raises(SchedulerError, match="the channel 'mortal' is gone"):
        channel.get(key="nothing")
    Channel.create("mortal").close()
    creator.shutdown()


def test_many_can_wait_at_once(channel: Channel) -> None:
    async def talk() -> list[int]:
        waiting = [asyncio.create_task(channel.get_async(key=i, timeout_s=20)) for i in range(40)]
        await asyncio.sleep(0.05)
        for i in range(40):
            await channel.put_async(i, key=i)
        return await asyncio.gather(*waiting)

    assert asyncio.run(talk()) == list(range(40))


def test_keys_that_are_used_up_are_forgotten() -> None:
    async def use() -> None:
        queues = Queues("used", 1)
        for key in range(20):
            await queues.put(key, key, 0, None)
            with pytest.raises(ChannelTimeoutError):
                await queues.put(key, key, 0, 0.01)
            assert await queues.qsize(f"never used {key}") == 0
        assert [await queues.get(key, None, None) for key in range(20)] == [[key] for key in range(20)]
        with pytest.raises(ChannelTimeoutError):
            await queues.get("empty", None, 0.01)
        assert not queues._items and not queues._lines

    asyncio.run(use())


def test_who_comes_later_waits_for_those_who_wait() -> None:
    """Also where there is room, or an item, that those before have not been given yet."""

    async def producers() -> list[Any]:
        queues = Queues("full", 1)
        await queues.put("key", 0, 0, None)
        waiting = [asyncio.create_task(queues.put("key", i, 0, 20)) for i in (1, 2)]
        await asyncio.sleep(0)

        async def take_and_put() -> list[Any]:
            taken = await queues.get("key", None, 20)
            await queues.put("key", 3, 0, 20)
            return taken

        later = asyncio.create_task(take_and_put())
        await asyncio.sleep(0)
        taken = [item for _ in range(3) for item in await queues.get("key", None, 20)]
        await asyncio.gather(*waiting)
        return [*await later, *taken]

    async def consumers() -> list[Any]:
        queues = Queues("empty", 0)
        waiting = [asyncio.create_task(queues.get("key", None, 20)) for _ in range(2)]
        await asyncio.sleep(0)

        async def put_and_take() -> list[Any]:
            await queues.put("key", 0, 0, 20)
            return await queues.get("key", None, 20)

        waiting.append(asyncio.create_task(put_and_take()))
        await asyncio.sleep(0)
        for i in (1, 2, 3):
            await queues.put("key", i, 0, 20)
        return [item for items in await asyncio.gather(*waiting) for item in items]

    assert asyncio.run(producers()) == [0, 1, 2, 3]
    assert asyncio.run(consumers()) == [0, 1, 2]
