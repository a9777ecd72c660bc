"""A machine is lost: its workers restart on another one."""

import os
import signal
import time

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from rlinf_lite.scheduler import Cluster, WorkerDiedError, WorkerError, ray_runtime
from rlinf_lite.scheduler.context import run_on
from tests.scheduler.talkers import Talker

pytestmark = pytest.mark.usefixtures("own_ray")


@pytest.mark.parametrize("with_spare", [True, False])
def test_workers_of_a_lost_node_move(with_spare: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runtime, "LOST_NODE_S", 1.0)
    machines = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1})
    doomed = machines.add_node(num_cpus=1)
    try:
        ray.init(address=machines.address, log_to_driver=False)
        with Cluster(num_nodes=2, num_gpus_per_node=1, accelerator="cpu") as cluster:
            group = Talker.create_group().launch(cluster, "0-1", name="talker")
            group.init("settings").wait()
            first, lost = group.node().wait()
            spare = machines.add_node(num_cpus=1) if with_spare else None
            kept = group.members[0].pid
            machines.remove_node(doomed)
            group.execute_on(0).greet("talker", 1).wait()  # the message is lost, and the sender does not fail
            with pytest.raises(WorkerDiedError, match=r"talker\[1\]"):
                group.known().wait(60)
            group.restart(1)
            where = group.node().wait()
            assert where[0] == first and where[1] != lost
            assert where[1] == (first if spare is None else spare.node_id)
            assert group.members[0].pid == kept and group.known().wait()[1] == (1, ("settings",))
            heard = group.execute_on(0).hear("talker", 1)
            group.execute_on(1).greet("talker", 0).wait()
            assert heard.wait(10) == ["from talker[1]"]
            group.clear_abort()  # as after every recovery: old addresses are forgotten
            for _ in range(2):
                group.execute_on(0).greet("talker", 1).wait()
                assert group.execute_on(1).hear("talker", 0).wait(10) == ["from talker[0]"]
            if spare is not None:  # this node's workers live but get no messages: that must be an error
                os.kill(run_on(spare.node_id, os.getpid), signal.SIGKILL)
                with pytest.raises(WorkerError, match=r"talker\[0\]"):
                    for _ in range(20):
                        group.execute_on(0).greet("talker", 1).wait()
                        time.sleep(0.5)
    finally:
        ray.shutdown()
        machines.shutdown()
