"""Built jobs on a Ray cluster of three nodes, whose processes are really killed."""

import os
import signal
import subprocess
import sys
import time

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster
from ray.experimental import internal_kv

from rlinf_lite.config.schema import ControlConfig
from rlinf_lite.control import JobFailedError
from rlinf_lite.control.context import KVBackend, ask_master
from rlinf_lite.control.job import JobHandle
from rlinf_lite.jobs import JobSpecError, RLJobBuilder
from rlinf_lite.scheduler.processes import is_ray_process
from tests.control.conftest import events, wait_for
from tests.jobs.jobs import ROLES

pytestmark = pytest.mark.usefixtures("own_ray")

HERE = "tests.jobs.jobs"
STEPS = 60


@pytest.fixture(scope="module")
def machines():
    machines = RayCluster(initialize_head=True, head_node_args={"num_cpus": 2})
    ray.init(address=machines.address, log_to_driver=False)  # on the head, and so are masters and trainers
    for _ in range(2):
        machines.add_node(num_cpus=2)
    yield machines
    ray.shutdown()
    machines.shutdown()


@pytest.fixture
def submit(machines, tmp_path):
    """`submit(name, **config)` submits a job of five roles, whose trainer needs about 3 s; it is stopped at the end."""
    handles = []

    def submit(name, *, nodes=1, control=None, **config):
        home = tmp_path / name
        home.mkdir()
        config = {"steps": STEPS, "step_s": 0.01, "state": str(home / "state"), "log": str(home / "log"), **config}
        builder = RLJobBuilder().node_num(nodes).device_per_node(6).device_type("CPU").config(config)
        builder.global_env({"JOB": name}).trainer(HERE, "StepByStep")
        for role in ROLES:
            builder.role(role, HERE, "Held" if role in ("actor", "critic") else "Alone")
            if role in ("actor", "rollout"):
                builder.total(2).per_node(2 if nodes == 1 else 1)
        builder.with_collocation("actor", "rollout")
        control = ControlConfig(**{"backoff_s": 0.1, **(control or {})})
        handle = builder.build().submit(name, directory=home, control=control)
        handles.append(handle)
        handle.home, handle.seen = home, set()
        return handle

    yield submit
    for handle in handles:
        handle.stop()
        wait_for(lambda handle=handle: not handle.has_master())
        wait_for(lambda handle=handle: not processes(handle), 10)


def processes(handle):
    """Those of the processes that the job was seen to have that still live."""
    pids(handle)
    return [pid for pid in handle.seen if is_ray_process(pid)]


def pids(handle):
    context = handle.status()
    found = {name: record.pid for name, record in context.workers.items()}
    handle.seen |= {*found.values(), context.trainer_pid} - {0}
    return found


def reach(handle, step):
    wait_for(lambda: handle.status().step >= step and len(pids(handle)) == 7, 60)


def kill(*numbers, how=signal.SIGKILL):
    for pid in numbers:
        os.kill(pid, how)
    return time.time()


def steps_done(handle):
    return [int(line) for line in (handle.home / "log").read_text().split()]


def finish(handle, restarts, pid_changes, before, trainer_restarts=0):
    """The job ends well, every step was done once and in order, and only what had to has started again."""
    context = handle.wait(120)
    assert context.stage == "finished" and context.step == STEPS
    assert steps_done(handle) == list(range(STEPS))
    assert {name for name, pid in before.items() if context.workers[name].pid != pid} == set(pid_changes)
    assert {name: r.restarts for name, r in context.workers.items() if r.restarts} == dict.fromkeys(pid_changes, 1)
    assert len(context.failovers) == restarts and context.trainer_restarts == trainer_restarts
    assert all(failover.outcome == "done" for failover in context.failovers)
    return context


def test_one_worker_of_each_role_killed_once_and_two_at_once(submit):
    handle = submit("once", steps=6 * STEPS)
    victims = {
        "rollout[1]": (["rollout[1]"], "worker"),
        "reference[0]": (["reference[0]"], "worker"),
        "reward[0]": (["reward[0]"], "worker"),
        "actor[1]": (["actor[0]", "actor[1]"], "group"),
        "critic[0]": (["critic[0]"], "group"),
    }
    for count, (victim, (restarted, level)) in enumerate(victims.items(), 1):
        reach(handle, handle.status().step + 3)
        before = pids(handle)
        at = kill(before[victim])
        wait_for(lambda count=count: [f.outcome for f in handle.status().failovers] == ["done"] * count, 30)
        after, failure = pids(handle), handle.status().failovers[-1]
        assert {name for name in before if before[name] != after[name]} == set(restarted)
        assert (failure.kind, failure.failed, failure.level) == ("crashed", [victim], level)
        detected = events(handle.home, "detected")
        assert len(detected) == count and 0 <= detected[-1]["time"] - at < 5
    reach(handle, handle.status().step + 3)
    before = pids(handle)
    kill(before["rollout[0]"], before["rollout[1]"])
    context = handle.wait(120)
    after = {name: record.pid for name, record in context.workers.items()}
    assert {name for name in before if before[name] != after[name]} == {"rollout[0]", "rollout[1]"}
    assert context.step == 6 * STEPS and steps_done(handle) == list(range(6 * STEPS))


def test_the_same_role_killed_three_times_and_then_too_often(submit):
    handle = submit("often", control={"max_restarts": 3})
    for count in range(1, 4):
        reach(handle, 3 * count)
        kill(pids(handle)["rollout[0]"])
        wait_for(lambda count=count: len(handle.status().failovers) == count, 30)
        wait_for(lambda: handle.status().stage == "running", 60)
    assert handle.status().workers["rollout[0]"].restarts == 3
    assert [f.level for f in handle.status().failovers] == ["worker"] * 3
    at = kill(pids(handle)["rollout[0]"])
    with pytest.raises(
        JobFailedError, match=r"rollout\[0\] failed 4 times within 3600 s, and control\.max_restarts is 3"
    ):
        handle.wait(30)
    assert handle.status().ended - at < 10
    wait_for(lambda: not processes(handle), 10 - (time.time() - at))
    history = handle.status().failovers
    assert [failover.level for failover in history] == ["worker", "worker", "worker", "fail"]


def test_killed_during_a_failover(submit, tmp_path):
    """The worker that takes the dead one's place dies as well, in its `init`."""
    trap = {"role": "reward", "armed": str(tmp_path / "armed"), "sprung": str(tmp_path / "sprung")}
    handle = submit("again", trap_init=trap)
    reach(handle, 5)
    before = pids(handle)
    (tmp_path / "armed").touch()
    kill(before["reward[0]"])
    context = handle.wait(120)
    assert context.stage == "finished" and steps_done(handle) == list(range(STEPS))
    assert (tmp_path / "sprung").exists()
    assert [failover.outcome for failover in context.failovers] == ["done"] and context.failovers[0].attempts == 2
    assert events(handle.home, "recovery_failed")
    assert context.workers["rollout[0]"].pid == before["rollout[0]"]


def test_a_worker_that_hangs_is_replaced(submit, tmp_path):
    hang = {"role": "rollout", "rank": 1, "step": 9, "marker": str(tmp_path / "hung")}
    handle = submit("hangs", hang=hang, control={"hang_timeout_s": 3.0})
    reach(handle, 9)
    before, began = pids(handle), time.time()
    context = finish(handle, 1, ["rollout[1]"], before)
    assert context.failovers[0].kind == "hung" and "work has made no progress for" in context.failovers[0].evidence
    assert events(handle.home, "detected")[0]["time"] - began < 3 + 5


def test_a_stopped_worker_is_replaced(submit):
    handle = submit("stopped", control={"hang_timeout_s": 5.0})
    reach(handle, 5)
    before = pids(handle)
    at = kill(before["rollout[0]"], how=signal.SIGSTOP)
    context = finish(handle, 1, ["rollout[0]"], before)
    assert context.failovers[0].kind == "hung" and "state T (stopped)" in context.failovers[0].evidence
    assert events(handle.home, "detected")[0]["time"] - at < 5 + 5


def test_a_trainer_that_raises_what_nobody_recovers_from(submit):
    handle = submit("raises", recoverable=False, **{"raise": {"step": 10, "times": 1}})
    reach(handle, 3)
    with pytest.raises(JobFailedError, match="RuntimeError: the trainer stumbled"):
        handle.wait(60)
    assert steps_done(handle) == list(range(10))
    wait_for(lambda: not processes(handle), 10)


def test_a_trainer_that_raises_and_then_its_process_is_killed(submit):
    """The process owns the workers: everything starts again, from what the trainer has written down."""
    handle = submit("trainer", recoverable=True, step_s=0.1, **{"raise": {"step": 10, "times": 1}})
    reach(handle, 15)
    before = pids(handle)
    kill(handle.status().trainer_pid)
    context = finish(handle, 2, list(before), before, trainer_restarts=2)
    raised, killed = context.failovers
    assert raised.failed == ["trainer"] and "stumbled" in raised.evidence
    assert killed.level == "trainer" and "died" in killed.evidence


def master_pid(handle):
    return ask_master(handle.name, "process_id")


def test_the_master_is_killed_while_all_is_well_and_during_a_failover(submit):
    handle = submit("master", steps=6 * STEPS)
    reach(handle, 5)
    before, master = pids(handle), master_pid(handle)
    kill(master)
    reach(handle, 12)
    assert master_pid(handle) != master and pids(handle) == before
    assert len(events(handle.home, "master_restarted")) == 1
    kill(before["rollout[1]"], master_pid(handle))
    context = handle.wait(120)
    assert context.stage == "finished" and steps_done(handle) == list(range(6 * STEPS))
    after = {name: record.pid for name, record in context.workers.items()}
    assert {name for name in before if before[name] != after[name]} == {"rollout[1]"}
    assert [failover.outcome for failover in context.failovers] == ["done"]


@pytest.mark.parametrize(("damage", "when"), [("missing", "late"), ("corrupt", "early")])
def test_the_persisted_context_is_gone_when_the_master_starts_again(submit, damage, when):
    handle = submit(f"{damage}-{when}")
    reach(handle, 3)
    kill(pids(handle)["reward[0]"])
    wait_for(lambda: [failover.outcome for failover in handle.status().failovers] == ["done"], 30)
    before = pids(handle)
    master = master_pid(handle)
    os.kill(master, signal.SIGSTOP)  # it must not write again
    backend = KVBackend()
    if when == "late":  # the trainer's process has ended its workers by now
        wait_for(lambda: steps_done(handle) == list(range(STEPS)) and not any(map(is_ray_process, before.values())))
    if damage == "missing":
        internal_kv._internal_kv_del(f"rlinf_lite/jobs/{handle.name}")
    else:
        backend.save(handle.name, '{"stage": "runn')
    kill(master)
    wait_for(lambda: backend.load(handle.name) not in (None, '{"stage": "runn'), 30)
    context = handle.wait(120)
    assert context.stage == "finished" and steps_done(handle) == list(range(STEPS))
    assert {name: record.pid for name, record in context.workers.items()} == before
    assert [failover.failed for failover in context.failovers] == [["reward[0]"]], "the trainer knows the history"
    restarted = events(handle.home, "master_restarted")
    assert ("damaged" if damage == "corrupt" else "no persisted context") in restarted[0]["problem"]


def test_two_jobs_at_once(submit):
    one, two = (submit(name, step_s=0.05) for name in ("one", "two"))  # neither ends before both have begun
    reach(one, 5)
    reach(two, 5)
    before = pids(one), pids(two)
    assert not set(before[0].values()) & set(before[1].values())
    kill(before[0]["rollout[0]"])
    finish(one, 1, ["rollout[0]"], before[0])
    finish(two, 0, [], before[1])


def test_a_node_is_removed(submit, machines):
    for _ in range(4 - sum(node["Alive"] for node in ray.nodes())):
        machines.add_node(num_cpus=2)
    handle = submit("nodes", nodes=4)
    reach(handle, 5)
    assert handle.status().trainer_node_id == machines.head_node.node_id
    used = {record.node_id for record in handle.status().workers.values()}
    node = next(node for node in machines.worker_nodes if node.node_id in used)
    machines.remove_node(node)
    context = handle.wait(180)
    assert steps_done(handle) == list(range(STEPS))
    assert any(failover.kind == "node_lost" for failover in context.failovers)
    assert all(record.node_id != node.node_id for record in context.workers.values())


SUBMITS_AND_LEAVES = """
import sys
from rlinf_lite.jobs import RLJobBuilder
config = {"steps": 60, "step_s": 0.05, "state": sys.argv[1] + "/state", "log": sys.argv[1] + "/log"}
builder = RLJobBuilder().device_per_node(2).device_type("CPU").config(config)
builder.trainer("tests.jobs.jobs", "StepByStep").actor("tests.jobs.jobs", "Held")
builder.build().submit("left", directory=sys.argv[1])
"""


def test_a_job_outlives_the_script_that_submitted_it(machines, tmp_path):
    environment = {**os.environ, "RAY_ADDRESS": machines.address, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", SUBMITS_AND_LEAVES, str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=120)
    context = JobHandle("left", KVBackend()).wait(120)
    assert context.step == 60 and not context.failovers
    assert [int(line) for line in (tmp_path / "log").read_text().split()] == list(range(60))


def test_logs_and_what_they_do_and_stop_which_leaves_nothing(submit):
    handle = submit("ended", steps=100_000)
    reach(handle, 3)
    assert set(handle.logs()) == {"trainer", *pids(handle)}
    assert set(handle.logs("rollout", 1)) == {"rollout[1]"}
    wait_for(lambda: set(handle.doing()) == set(pids(handle)), 10)
    builder = RLJobBuilder().device_type("CPU").config({"a": 1}).trainer(HERE, "StepByStep").actor(HERE, "Held")
    with pytest.raises(JobSpecError, match="a job of that name runs"):
        builder.build().submit(handle.name)
    assert len(processes(handle)) >= 7
    assert handle.stop().stage == "stopped"
    wait_for(lambda: not processes(handle), 10)
    assert handle.stop().stage == "stopped"


def test_refused_before_anything_starts(machines):
    job = (
        RLJobBuilder().device_type("CPU").config({"a": 1}).trainer(HERE, "Missing").actor("not.there", "Actor").build()
    )
    with pytest.raises(JobSpecError) as error:
        job.submit("refused")
    assert "no 'Missing'" in str(error.value) and "not.there:Actor cannot be imported" in str(error.value)
    with pytest.raises(JobSpecError, match="not a name"):
        job.submit("not a name")
