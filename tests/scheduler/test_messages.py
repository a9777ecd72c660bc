import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_lite.scheduler import (
    AbortedError,
    Cluster,
    PeerError,
    RecvTimeoutError,
    Worker,
    WorkerDiedError,
    WorkerError,
    WorkerGroup,
    shared_memory,
    wait_all,
)
from rlinf_lite.scheduler.context import get_context


class Peer(Worker):
    def say(self, values: list[Any], group: str, rank: int, pause_s: float = 0.0) -> None:
        for value in values:
            self.send(value, group, rank)
            time.sleep(pause_s)

    def hear(self, count: int, group: str, rank: int, timeout_s: float | None = 20.0) -> list[Any]:
        return [self.recv(group, rank, timeout_s) for _ in range(count)]

    def hear_any(self, count: int, group: str, timeout_s: float | None = 20.0) -> list[tuple[int, Any]]:
        return [self.recv_any(group, timeout_s) for _ in range(count)]

    def swap(self, group: str, rank: int, count: int, num_bytes: int) -> int:
        """Send everything before receiving anything."""
        for i in range(count):
            self.send(np.full(num_bytes, i % 100, np.uint8), group, rank)
        return sum(int(self.recv(group, rank, 20.0)[0]) for _ in range(count))

    def kept(self) -> tuple[int, int]:
        """Segments that this worker has for messages to others, and those that are free."""
        segments = [segment for shelf in shared_memory._written.values() for segment in shelf]
        return len(segments), sum(segment.is_free() for segment in segments)

    def flood(self, count: int, group: str, rank: int) -> None:
        for i in range(count):
            self.send({"x": np.full(2_000_000, i % 250, np.uint8), "i": i}, group, rank)

    def hold(self, count: int, group: str, rank: int) -> list[Any]:
        self.held = [self.recv(group, rank, 20.0) for _ in range(count)]
        return [(message["i"], bool((message["x"] == message["i"] % 250).all())) for message in self.held]

    def drop(self) -> None:
        del self.held

    def observation(self, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        image = torch.randint(0, 255, (16, 64, 64, 3), dtype=torch.uint8, generator=generator)
        state = torch.randn(16, 9, generator=generator)
        return {
            "images": {"base": image, "wrist": image[:, ::2]},
            "state": state,
            "half": state.to(torch.bfloat16).repeat(1000, 1),
            "array": np.arange(50_000, dtype=np.int32),
            "instruction": ["push the cube"] * 16,
        }

    def say_observation(self, group: str, rank: int) -> None:
        self.send(self.observation(3), group, rank)

    def hear_observation(self, group: str, rank: int) -> bool:
        received, expected = self.recv(group, rank, 20.0), self.observation(3)
        received["state"][0] += 0  # writable
        return (
            all(torch.equal(received["images"][name], expected["images"][name]) for name in ("base", "wrist"))
            and torch.equal(received["half"], expected["half"])
            and torch.equal(received["state"], expected["state"])
            and bool((received["array"] == expected["array"]).all())
            and received["instruction"] == expected["instruction"]
        )


@pytest.fixture(scope="module")
def env(cluster: Cluster) -> Iterator[WorkerGroup]:
    yield Peer.create_group().launch(cluster, "0:0-1", name="env")


@pytest.fixture(scope="module")
def rollout(cluster: Cluster) -> Iterator[WorkerGroup]:
    yield Peer.create_group().launch(cluster, "1", name="rollout")


def test_messages_of_one_source_keep_their_order(env: WorkerGroup, rollout: WorkerGroup) -> None:
    values = [i if i % 3 else np.full(100_000, i) for i in range(30)]
    _, heard = wait_all(env.execute_on(1).say(values, "rollout", 0), rollout.hear(30, "env", 1))
    assert [int(np.max(value)) for value in heard[0]] == list(range(30))


def test_each_source_has_its_own_queue(env: WorkerGroup, rollout: WorkerGroup) -> None:
    env.say([1, 2], "rollout", 0).wait()
    assert rollout.hear(2, "env", 1).wait() == [[1, 2]]
    assert rollout.hear(2, "env", 0).wait() == [[1, 2]]


def test_recv_any_serves_whoever_is_first(env: WorkerGroup, rollout: WorkerGroup) -> None:
    env.execute_on(1).say(["early"], "rollout", 0).wait()
    env.execute_on(0).say(["late"], "rollout", 0).wait()
    assert rollout.hear_any(2, "env").wait() == [[(1, "early"), (0, "late")]]


def test_nested_observations_travel_whole(env: WorkerGroup, rollout: WorkerGroup, cluster: Cluster) -> None:
    sender = env.execute_on(0)
    _, heard = wait_all(sender.say_observation("rollout", 0), rollout.hear_observation("env", 0))
    assert heard == [True]
    assert os.listdir(get_context().shm_dir) == ["lock"]


def test_a_slow_receiver_of_large_messages(env: WorkerGroup, rollout: WorkerGroup, cluster: Cluster) -> None:
    sender, shm_dir = env.execute_on(0), get_context().shm_dir
    for _ in range(2):
        sender.flood(100, "rollout", 0).wait()
        assert rollout.hold(100, "env", 0).wait() == [[(i, True) for i in range(100)]]
        assert os.listdir(shm_dir) == ["lock"]
        assert sender.kept().wait()[0][0] == shared_memory.KEPT_SEGMENTS  # the other segments were for one use
    sender.flood(3, "rollout", 0).wait()
    again = rollout.execute_on(0).say([1], "env", 1)  # a held message does not block others
    env.execute_on(1).hear(1, "rollout", 0).wait()
    again.wait()
    rollout.drop().wait()
    assert rollout.hold(3, "env", 0).wait() == [[(i, True) for i in range(3)]]
    rollout.drop().wait()
    (count, free), *_ = sender.kept().wait()
    assert count == free == shared_memory.KEPT_SEGMENTS
    assert os.listdir(shm_dir) == ["lock"]


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_killed_in_the_middle_of_large_messages(cluster: Cluster, victim: str) -> None:
    shm_dir, names = get_context().shm_dir, ("talks", "listens")
    groups = [Peer.create_group().launch(cluster, str(slot), name=name) for slot, name in enumerate(names)]
    talks, listens = groups
    talks.flood(6, "listens", 0).wait()
    assert listens.hold(3, "talks", 0).wait() == [[(i, True) for i in range(3)]]
    deadline = time.monotonic() + 10
    while os.listdir(shm_dir) != ["lock"]:  # until the others have arrived too
        assert time.monotonic() < deadline
        time.sleep(0.01)
    talks.flood(4 if victim == "sender" else 80, "listens", 0).wait()
    gone = groups[victim == "receiver"]
    os.kill(gone.members[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        gone.kept().wait(10)
    if victim == "sender":  # messages that it sent before still arrive
        assert listens.hold(7, "talks", 0).wait() == [[(i, True) for i in (3, 4, 5, 0, 1, 2, 3)]]
    assert os.listdir(shm_dir) == ["lock"]
    gone.restart(0)
    talks.flood(5, "listens", 0).wait()
    assert listens.hold(5, "talks", 0).wait() == [[(i, True) for i in range(5)]]
    assert talks.kept().wait() == [(5, 0)]  # none of those before
    assert os.listdir(shm_dir) == ["lock"]
    for group in groups:
        group.shutdown()


def test_two_workers_that_send_before_they_receive_do_not_deadlock(env: WorkerGroup, rollout: WorkerGroup) -> None:
    one, other = env.execute_on(0).swap("rollout", 0, 100, 500_000), rollout.swap("env", 0, 100, 500_000)
    assert wait_all(one, other, timeout_s=60) == [[4950], [4950]]
    one, other = env.execute_on(0).swap("rollout", 0, 2000, 50_000), rollout.swap("env", 0, 2000, 50_000)
    wait_all(one, other, timeout_s=60)


def test_a_worker_can_send_to_its_own_group(env: WorkerGroup) -> None:
    assert wait_all(env.execute_on(0).say([7], "env", 1), env.execute_on(1).hear(1, "env", 0))[1] == [[7]]


def test_timeouts_name_the_source(rollout: WorkerGroup) -> None:
    with pytest.raises(
        WorkerError, match=r"rollout\[0\] waited 0\.2 s for a message from env\[1\]; none came"
    ) as error:
        rollout.hear(1, "env", 1, timeout_s=0.2).wait()
    assert isinstance(error.value.__cause__, RecvTimeoutError)
    with pytest.raises(WorkerError, match="from any rank of env"):
        rollout.hear_any(1, "env", timeout_s=0.2).wait()


def test_unknown_peers(env: WorkerGroup, rollout: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerError, match=r"env\[5\] does not exist: the group 'env' has ranks 0\.\.1") as error:
        rollout.say([1], "env", 5).wait()
    assert isinstance(error.value.__cause__, PeerError)
    with pytest.raises(WorkerError, match=r"no group named 'critic' is running \(running: env, rollout\)"):
        rollout.say([1], "critic", 0).wait()


def test_abort_ends_a_pending_receive_until_it_is_cleared(env: WorkerGroup, rollout: WorkerGroup) -> None:
    pending = rollout.hear(1, "env", 0, timeout_s=None)
    time.sleep(0.2)
    start = time.monotonic()
    rollout.abort("env[0] crashed")
    with pytest.raises(WorkerError, match="gave up waiting for env\\[0\\]: env\\[0\\] crashed") as error:
        pending.wait(10)
    assert time.monotonic() - start < 9 and isinstance(error.value.__cause__, AbortedError)
    with pytest.raises(WorkerError, match="crashed"):  # a later receive too
        rollout.hear(1, "env", 0).wait(10)
    rollout.clear_abort()
    env.execute_on(0).say([1], "rollout", 0).wait()
    assert rollout.hear(1, "env", 0).wait(10) == [[1]]


def test_abort_while_computing_is_seen_at_the_next_receive(env: WorkerGroup, rollout: WorkerGroup) -> None:
    busy = rollout.say([1, 2, 3], "env", 0, pause_s=0.2)
    pending = rollout.hear(1, "env", 0, timeout_s=None)
    rollout.abort("stop")
    busy.wait(10)
    with pytest.raises(WorkerError, match="stop"):
        pending.wait(10)
    rollout.clear_abort()
    env.execute_on(0).hear(3, "rollout", 0).wait()


def test_messages_of_an_aborted_step_are_dropped(env: WorkerGroup, rollout: WorkerGroup, cluster: Cluster) -> None:
    env.say(["stale", np.zeros(100_000)], "rollout", 0).wait()
    for group in (env, rollout):
        group.abort("redo the step")
    for group in (env, rollout):
        group.clear_abort()
    env.say(["fresh"], "rollout", 0).wait()
    assert sorted(rollout.hear_any(2, "env").wait()[0]) == [(0, "fresh"), (1, "fresh")]
    with pytest.raises(WorkerError, match="none came"):
        rollout.hear_any(1, "env", timeout_s=0.2).wait()
    assert os.listdir(get_context().shm_dir) == ["lock"]


def test_a_failure_elsewhere_ends_a_blocked_receive(env: WorkerGroup, rollout: WorkerGroup) -> None:
    start = time.monotonic()
    waiting = rollout.hear(1, "env", 0, timeout_s=None)
    with pytest.raises(WorkerError, match=r"env\[0\]\.say raised .*(?s:.)*no group named 'nobody'"):
        wait_all(env.execute_on(0).say([1], "nobody", 0), waiting)
    with pytest.raises(WorkerError, match=r"gave up waiting for env\[0\]: env\[0\]\.say raised PeerError"):
        waiting.wait(10)
    assert time.monotonic() - start < 25
    rollout.clear_abort()


def test_spans_come_back_to_the_driver(env: WorkerGroup) -> None:
    assert env.pop_spans().wait() == [[], []]
