"""GPU slots, on a Ray that is started with four GPUs that do not exist and are not used."""

import os
import time
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from rlinf_lite.scheduler import Cluster, ClusterError, Worker

pytestmark = pytest.mark.usefixtures("own_ray")


class Seer(Worker):
    def sees(self) -> tuple[str, str]:
        return os.environ["CUDA_VISIBLE_DEVICES"], self.device


@pytest.fixture(scope="module")
def machine() -> Iterator[RayCluster]:
    machine = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 4})
    ray.init(address=machine.address, log_to_driver=False)
    yield machine
    ray.shutdown()
    machine.shutdown()


def free_gpus() -> float:
    return float(ray.available_resources().get("GPU", 0))


def wait_for_gpus(count: int) -> None:
    deadline = time.monotonic() + 10
    while free_gpus() < count and time.monotonic() < deadline:
        time.sleep(0.1)
    assert free_gpus() >= count


def test_each_process_sees_its_slots_alone_and_ray_knows_they_are_taken(machine: RayCluster) -> None:
    with Cluster(num_gpus_per_node=3) as cluster:
        assert cluster.shape.describe() == "0..2 (1 node x 3, accelerator=cuda)"
        assert free_gpus() == 1
        alone = Seer.create_group().launch(cluster, "0-2", name="alone")
        shared = Seer.create_group().launch(cluster, "0-1:0,2:1-2", name="shared")
        seen = [devices for devices, _ in alone.sees().wait()]
        assert sorted(seen) == seen and len(set(seen)) == 3 and set(seen) < {"0", "1", "2", "3"}
        both, third, again = shared.sees().wait()
        assert both == (f"{seen[0]},{seen[1]}", "cuda:0") and third == again == (seen[2], "cuda:0")
        assert free_gpus() == 1
        with pytest.raises(ray.exceptions.GetTimeoutError):  # another job's task waits: the fourth GPU is not enough
            ray.get(ray.remote(num_gpus=2, num_cpus=0)(lambda: 1).remote(), timeout=0.5)
    wait_for_gpus(2)  # the other two went to that task, which is still queued


def test_more_gpus_than_there_are(machine: RayCluster) -> None:
    with pytest.raises(ClusterError, match=r"cluster\.num_gpus_per_node: 8, but node 0 .* has 4 GPUs"):
        Cluster(num_gpus_per_node=8)


def test_gpus_that_another_job_holds(machine: RayCluster) -> None:
    holder = ray.remote(num_gpus=2, num_cpus=0)(Seer).remote()
    with pytest.raises(ClusterError, match=r"waited 1 s to reserve \{'GPU': 4\.0\} on each of 1 nodes, but other jobs"):
        Cluster(start_timeout_s=1.0)
    ray.kill(holder)
    wait_for_gpus(4)  # nothing stays queued


def test_gpu_machines_can_run_virtual_slots(machine: RayCluster) -> None:
    with Cluster(num_gpus_per_node=6, accelerator="cpu") as cluster:
        assert cluster.shape.num_slots == 6
        assert Seer.create_group().launch(cluster, "5").sees().wait() == [("", "cpu")]
