"""Two Ray nodes on this machine: communication between them takes the same path as between machines."""

import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster as RayCluster

from rlinf_lite.config.schema import NodeGroup
from rlinf_lite.scheduler import (
    AbortedError,
    Channel,
    Cluster,
    ClusterError,
    PlacementError,
    ProcessPlacement,
    ResourcePool,
    Worker,
    WorkerDiedError,
    WorkerError,
    WorkerGroup,
    wait_all,
)
from rlinf_lite.scheduler.context import get_context, run_on

pytestmark = pytest.mark.usefixtures("own_ray")


class Remote(Worker):
    def where(self) -> tuple[int, int, int, str, str]:
        node_id = ray.get_runtime_context().get_node_id()
        return self.node_rank, self.local_rank, self.local_world_size, node_id, os.environ.get("SIMULATOR", "")

    def say(self, values: list[Any], group: str, rank: int) -> None:
        for value in values:
            self.send(value, group, rank)

    def hear(self, count: int, group: str, rank: int) -> list[Any]:
        return [self.recv(group, rank, 30.0) for _ in range(count)]

    def put(self, name: str, item: Any) -> None:
        Channel.connect(name).put(item)

    def get(self, name: str) -> Any:
        return Channel.connect(name).get(timeout_s=30)

    def leave(self) -> None:
        print("leaving this node", flush=True)
        os._exit(1)


@pytest.fixture(scope="module")
def machines() -> Iterator[RayCluster]:
    machines = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1})
    machines.add_node(num_cpus=1)
    ray.init(address=machines.address, log_to_driver=False)
    yield machines
    ray.shutdown()
    machines.shutdown()


@pytest.fixture(scope="module")
def cluster(machines: RayCluster) -> Iterator[Cluster]:
    groups = [NodeGroup(label="sim", nodes=1, env_vars={"SIMULATOR": "physx"})]
    with Cluster(num_nodes=2, num_gpus_per_node=2, accelerator="cpu", node_groups=groups) as running:
        yield running
    assert ray.is_initialized()  # not ours to end


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> Iterator[WorkerGroup]:
    yield Remote.create_group().launch(cluster, "1-2", name="remote")


def test_no_process_spans_two_nodes(cluster: Cluster) -> None:
    both = "rank 0 would own slots 1..2, which lie on two nodes of 2 slots. Use more processes, so that each stays"
    with pytest.raises(PlacementError, match=f"wide: processes: {re.escape(both)}"):
        Remote.create_group().launch(cluster, [ProcessPlacement(0, (2, 1))], name="wide")
    pool = ResourcePool(cluster, "middle", "1-2")
    with pytest.raises(PlacementError, match=f"wide: 0-1:0 of the pool 'middle': {re.escape(both)}"):
        pool.get_strategy("wide", "0-1:0")
    assert [process.slots for process in pool.get_strategy("narrow", "all").processes] == [(1,), (2,)]
    pool.release()


def test_slots_are_numbered_across_nodes(cluster: Cluster, group: WorkerGroup) -> None:
    assert cluster.shape.describe() == "0..3 (2 nodes x 2, accelerator=cpu)"
    first, second = group.where().wait()
    assert first[:3] == (0, 0, 1) and second[:3] == (1, 0, 1)
    assert first[3] == cluster.nodes[0].node_id == ray.get_runtime_context().get_node_id()
    assert second[3] == cluster.nodes[1].node_id != first[3]
    assert (first[4], second[4]) == ("", "physx")


def test_messages_cross_nodes_in_order(group: WorkerGroup) -> None:
    sender, receiver = group.execute_on(0), group.execute_on(1)
    values = [i if i % 2 else {"x": torch.full((300_000,), float(i)).bfloat16()} for i in range(6)]
    _, heard = wait_all(sender.say(values, "remote", 1), receiver.hear(6, "remote", 0))
    for sent, received in zip(values, heard[0], strict=True):
        if isinstance(sent, dict):
            assert torch.equal(received["x"], sent["x"])
            received["x"] += 1  # writable
        else:
            assert received == sent


def test_channels_cross_nodes(cluster: Cluster, group: WorkerGroup) -> None:
    channel = Channel.create("across")
    item = {"x": np.arange(200_000), "text": ["pick"]}
    _, received = wait_all(group.execute_on(1).put("across", item), group.execute_on(0).get("across"))
    np.testing.assert_array_equal(received[0]["x"], item["x"])
    group.execute_on(1).put("across", item).wait()
    mine = channel.get(timeout_s=30)
    np.testing.assert_array_equal(mine["x"], item["x"])
    mine["x"][0] = 1
    channel.put(item)
    assert group.execute_on(1).get("across").wait()[0]["text"] == ["pick"]
    channel.close()
    for node in range(2):
        assert os.listdir(run_on(cluster.nodes[node].node_id, get_context).shm_dir) == ["lock"]


def test_abort_reaches_the_other_node(group: WorkerGroup) -> None:
    pending = group.execute_on(1).hear(1, "remote", 0)
    group.abort("stop")
    with pytest.raises(WorkerError, match="stop") as error:
        pending.wait(10)
    assert isinstance(error.value.__cause__, AbortedError)
    group.clear_abort()


def test_a_death_on_the_other_node_is_reported_with_its_log(cluster: Cluster) -> None:
    doomed = Remote.create_group().launch(cluster, "3", name="doomed")
    with pytest.raises(WorkerDiedError, match=r"doomed\[0\] on node 1") as error:
        doomed.leave().wait()
    assert "leaving this node" in error.value.log_tail


def test_shutdown_leaves_the_foreign_ray_as_it_was(machines: RayCluster, cluster: Cluster, group: WorkerGroup) -> None:
    contexts = [run_on(node.node_id, get_context) for node in cluster.nodes]
    directories = [path for context in contexts for path in (context.temp_dir, context.shm_dir)]
    assert all(os.path.isdir(path) for path in directories)
    cluster.shutdown()
    assert not any(os.path.exists(path) for path in directories)
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    with pytest.raises(ClusterError, match=r"cluster\.num_nodes: 3, but only 2 joined within 0\.5 s"):
        Cluster(num_nodes=3, start_timeout_s=0.5)
    with pytest.raises(ClusterError, match=r"cluster\.num_gpus_per_node: 2, but node 0 .* has 0 GPUs"):
        Cluster(num_nodes=2, num_gpus_per_node=2, accelerator="cuda")
