"""Several roles in one process: one group per role on the same processes."""

import os
from typing import Any

import numpy as np
import pytest

from rlinf_lite.scheduler import Cluster, SchedulerError, Worker, WorkerDiedError, WorkerError, fuse


class Actor(Worker):
    def __init__(self, size: int) -> None:
        self.weights = np.zeros(size)

    def train(self) -> int:
        self.weights += 1 + self.rank
        return self.weights.ctypes.data

    def where(self) -> tuple[Any, ...]:
        return self.name, self.role, self.rank, self.world_size, os.getpid(), self.master_port

    def tell(self) -> None:
        self.send(f"hello from {self.name} {self.rank}", "rollout", 1 - self.rank)

    def die(self) -> None:
        os._exit(7)


class Rollout(Worker):
    def __init__(self, fail: bool = False) -> None:
        if fail:
            raise ValueError("no engine")
        self.actor = self.fused["actor"]

    def total(self) -> tuple[float, int]:
        """The sum of the actor's weights in this process."""
        return float(self.actor.weights.sum()), self.actor.weights.ctypes.data

    def where(self) -> tuple[Any, ...]:
        return self.name, self.role, self.rank, self.world_size, os.getpid(), self.master_port

    def hear(self) -> str:
        return self.recv("actor", 1 - self.rank, timeout_s=20)

    def fails(self) -> None:
        raise KeyError("nothing")


def test_roles_share_processes_and_memory(cluster: Cluster) -> None:
    groups = fuse(actor=Actor.create_group(5), rollout=Rollout.create_group()).launch(cluster, "0-1")
    try:
        actors, rollouts = groups.actor.where().wait(), groups["rollout"].where().wait()
        assert list(groups) == ["actor", "rollout"] and groups.actor.world_size == 2
        assert [one[:4] for one in actors] == [("actor", "actor", rank, 2) for rank in range(2)]
        assert [one[:4] for one in rollouts] == [("rollout", "rollout", rank, 2) for rank in range(2)]
        assert [one[4] for one in actors] == [one[4] for one in rollouts] and actors[0][4] != actors[1][4]
        assert actors[0][5] != rollouts[0][5], "each role has a port of its own"

        addresses = groups.actor.train().wait()
        assert groups.rollout.total().wait() == [(5.0, addresses[0]), (10.0, addresses[1])], "nothing was moved"

        told, heard = groups.actor.tell(), groups.rollout.hear()
        told.wait()
        assert heard.wait() == ["hello from actor 1", "hello from actor 0"]
        with pytest.raises(WorkerError, match=r"rollout\[1\]\.fails"):
            groups.rollout.execute_on(1).fails().wait()
        with pytest.raises(AttributeError, match="no role 'critic' was fused; there are actor, rollout"):
            _ = groups.critic
    finally:
        groups.shutdown()
    assert groups.rollout.world_size == 0
    Actor.create_group(1).launch(cluster, "0", name="actor").shutdown()  # the names are free again


def test_a_constructor_that_fails_names_its_role_and_frees_everything(cluster: Cluster) -> None:
    with pytest.raises(WorkerError, match=r"rollout\[0\].*no engine"):
        fuse(actor=Actor.create_group(1), rollout=Rollout.create_group(fail=True)).launch(cluster, "0")
    groups = fuse(actor=Actor.create_group(1), rollout=Rollout.create_group()).launch(cluster, "0")
    with pytest.raises(SchedulerError, match="runs already"):
        fuse(actor=groups.actor)
    with pytest.raises(ValueError, match="no role can be called 'items'"):
        fuse(items=Actor.create_group(1))
    groups.rollout.shutdown()
    assert groups.actor.world_size == 0, "a process ends with all of its workers"


def test_death_is_that_of_every_role(cluster: Cluster) -> None:
    groups = fuse(actor=Actor.create_group(1), rollout=Rollout.create_group()).launch(cluster, "0")
    try:
        with pytest.raises(WorkerDiedError, match=r"actor\[0\]"):
            groups.actor.die().wait()
        with pytest.raises(WorkerDiedError, match=r"rollout\[0\]"):
            groups.rollout.total().wait()
    finally:
        groups.shutdown()
