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

pytestmark = pytest.mark.usefixtures("own_ray", "forks")

HERE = "tests.jobs.jobs"
STEPS = 60
NUM_WORKERS = 5


@pytest.fixture(scope="module")
def machines():
    machines = RayCluster(initialize_head=True, head_node_args={"num_cpus": 2})
    ray.init(address=machines.address, log_to_driver=False)  # on the head, and so are masters and trainers
    yield machines
    ray.shutdown()
    machines.shutdown()


@pytest.fixture
def submit(machines, tmp_path):
    """`submit(name, **config)` submits a job of three roles, with 60 steps of about 3 s, and stops it at the end."""
    handles = []

    def submit(name, *, nodes=1, control=None, **config):
        home = tmp_path / name
        home.mkdir()
        config = {"steps": STEPS, "step_s": 0.01, "state": str(home / "state"), "log": str(home / "log"), **config}
        builder = RLJobBuilder().node_num(nodes).device_per_node(3).device_type("CPU").config(config)
        builder.global_env({"JOB": name}).trainer(HERE, "StepByStep")
        for role in ROLES:
            builder.role(role, HERE, "Held" if role == "actor" else "Alone")
            if role != "reward":
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
    wait_for(lambda: handle.status().step >= step and len(pids(handle)) == NUM_WORKERS, 60)


def kill(*numbers, how=signal.SIGKILL):
    for pid in numbers:
        os.kill(pid, how)
    return time.time()


def steps_done(handle):
    return [int(line) for line in (handle.home / "log").read_text().split()]


def recovered(handle, count):
    """Waits until `count` failures are dealt with; returns the last."""
    wait_for(lambda: [f.outcome for f in handle.status().failovers] == ["done"] * count, 60)
    return handle.status().failovers[-1]


def replaced(handle, before):
    """The workers that have started again."""
    after = pids(handle)
    return {name for name in before if before[name] != after[name]}


def finish(handle, steps, failures):
    """The job ends well, and every step was done once and in order."""
    context = handle.wait(120)
    assert (context.stage, context.step) == ("finished", steps) and steps_done(handle) == list(range(steps))
    assert [failover.outcome for failover in context.failovers] == ["done"] * failures
    pids(handle)
    return context


@pytest.mark.slow
def test_workers_are_killed_alone_two_at_once_and_while_they_start(submit, tmp_path):
    trap = {"role": "reward", "armed": str(tmp_path / "armed"), "sprung": str(tmp_path / "sprung")}
    handle = submit("once", steps=6 * STEPS, trap_init=trap)
    victims = {"rollout[1]": (["rollout[1]"], "worker"), "actor[1]": (["actor[0]", "actor[1]"], "group")}
    for count, (victim, (restarted, level)) in enumerate(victims.items(), 1):
        reach(handle, handle.status().step + 3)
        before = pids(handle)
        at = kill(before[victim])
        failure = recovered(handle, count)
        assert replaced(handle, before) == set(restarted)
        assert (failure.kind, failure.failed, failure.level) == ("crashed", [victim], level)
        detected = events(handle.home, "detected")
        assert len(detected) == count and 0 <= detected[-1]["time"] - at < 5

    reach(handle, handle.status().step + 3)
    before = pids(handle)
    (tmp_path / "armed").touch()
    kill(before["reward[0]"])  # and the worker that takes its place dies as well, in its `init`
    assert recovered(handle, 3).attempts == 2 and (tmp_path / "sprung").exists()
    assert events(handle.home, "recovery_failed") and replaced(handle, before) == {"reward[0]"}

    reach(handle, handle.status().step + 3)
    before = pids(handle)
    kill(before["rollout[0]"], before["rollout[1]"])
    context = handle.wait(120)  # Ray may report the two one after the other
    assert context.stage == "finished" and steps_done(handle) == list(range(6 * STEPS))
    assert {name for name in before if context.workers[name].pid != before[name]} == {"rollout[0]", "rollout[1]"}


@pytest.mark.slow
def test_two_jobs_at_once_of_which_one_fails_too_often(submit):
    other = submit("other", steps=100_000)
    handle = submit("often", steps=100_000, control={"max_restarts": 2})
    for count in (1, 2):
        reach(handle, handle.status().step + 3)
        kill(pids(handle)["rollout[0]"])
        assert recovered(handle, count).level == "worker"
    reach(other, 5)
    before = pids(other)
    assert handle.status().workers["rollout[0]"].restarts == 2
    reach(handle, handle.status().step + 3)
    at = kill(pids(handle)["rollout[0]"])
    why = r"rollout\[0\] failed 3 times within 3600 s, and control\.max_restarts is 2"
    with pytest.raises(JobFailedError, match=why):
        handle.wait(30)
    assert handle.status().ended - at < 10
    wait_for(lambda: not processes(handle), 10 - (time.time() - at))
    assert [failover.level for failover in handle.status().failovers] == ["worker", "worker", "fail"]

    # the other one notices nothing; its logs, what it does, and its end
    reach(other, other.status().step + 3)
    assert pids(other) == before and not other.status().failovers
    assert not set(before.values()) & handle.seen
    assert set(other.logs()) == {"trainer", *before} and set(other.logs("rollout", 1)) == {"rollout[1]"}
    wait_for(lambda: set(other.doing()) == set(before), 10)
    builder = RLJobBuilder().device_type("CPU").config({"a": 1}).trainer(HERE, "StepByStep").actor(HERE, "Held")
    with pytest.raises(JobSpecError, match="a job of that name runs"):
        builder.build().submit(other.name)
    assert len(processes(other)) >= NUM_WORKERS
    assert other.stop().stage == "stopped"
    wait_for(lambda: not processes(other), 10)
    assert other.stop().stage == "stopped"


@pytest.mark.slow
def test_workers_that_hang_or_are_stopped_are_replaced(submit, tmp_path):
    hang = {"role": "rollout", "rank": 1, "step": 9, "marker": str(tmp_path / "hung")}
    handle = submit("hangs", hang=hang, control={"hang_timeout_s": 3.0}, steps=3 * STEPS)
    reach(handle, 9)
    before, began = pids(handle), time.time()
    hung = recovered(handle, 1)
    assert hung.kind == "hung" and "work has made no progress for" in hung.evidence
    assert events(handle.home, "detected")[0]["time"] - began < 3 + 5 and replaced(handle, before) == {"rollout[1]"}
    before = pids(handle)
    at = kill(before["rollout[0]"], how=signal.SIGSTOP)
    context = finish(handle, 3 * STEPS, 2)
    assert context.failovers[1].kind == "hung" and "state T (stopped)" in context.failovers[1].evidence
    assert events(handle.home, "detected")[1]["time"] - at < 5 + 5
    assert {name for name in before if context.workers[name].pid != before[name]} == {"rollout[0]"}


def test_a_trainer_that_raises_and_then_its_process_is_killed(submit):
    """The process owns the workers: everything starts again, from what the trainer has written down."""
    handle = submit("trainer", recoverable=True, step_s=0.05, **{"raise": [10, 0]})
    reach(handle, 15)
    before = pids(handle)
    kill(handle.status().trainer_pid)
    context = finish(handle, STEPS, 2)
    assert {name: record.restarts for name, record in context.workers.items()} == dict.fromkeys(before, 1)
    raised, killed = context.failovers
    assert context.trainer_restarts == 2 and raised.failed == ["trainer"] and "stumbled" in raised.evidence
    assert killed.level == "trainer" and "died" in killed.evidence


def master_pid(handle):
    return ask_master(handle.name, "process_id")


@pytest.mark.slow
def test_the_master_is_killed_in_a_failover_and_where_what_it_kept_is_damaged_or_gone(submit):
    handle, backend = submit("master", steps=6 * STEPS), KVBackend()
    reach(handle, 5)
    before = pids(handle)
    kill(before["rollout[1]"], master_pid(handle))
    recovered(handle, 1)
    assert replaced(handle, before) == {"rollout[1]"}

    reach(handle, handle.status().step + 3)
    before, master = pids(handle), master_pid(handle)
    os.kill(master, signal.SIGSTOP)  # it must not write again
    backend.save(handle.name, damaged := '{"stage": "runn')
    kill(master)
    wait_for(lambda: backend.load(handle.name) != damaged, 30)
    wait_for(lambda: len(handle.status().workers) == NUM_WORKERS, 30)
    assert pids(handle) == before and handle.status().failovers[0].failed == ["rollout[1]"]  # as the trainer knows

    master = master_pid(handle)
    os.kill(master, signal.SIGSTOP)
    # the trainer's process has ended its workers by then
    wait_for(lambda: len(steps_done(handle)) == 6 * STEPS and not any(map(is_ray_process, before.values())), 120)
    internal_kv._internal_kv_del(f"rlinf_lite/jobs/{handle.name}")
    kill(master)
    wait_for(lambda: backend.load(handle.name) is not None, 30)
    context = finish(handle, 6 * STEPS, 1)
    assert {name: record.pid for name, record in context.workers.items()} == before
    problems = [event.get("problem", "") for event in events(handle.home, "master_restarted")]
    assert problems[0] == "" and "damaged" in problems[1] and "no persisted context" in problems[2]


@pytest.mark.slow
def test_a_node_is_removed(submit, machines):
    for _ in range(3):
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


@pytest.mark.slow
def test_a_job_outlives_the_script_that_submitted_it(machines, tmp_path):
    environment = {**os.environ, "RAY_ADDRESS": machines.address, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", SUBMITS_AND_LEAVES, str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=120)
    context = JobHandle("left", KVBackend()).wait(120)
    assert context.step == 60 and not context.failovers
    assert [int(line) for line in (tmp_path / "log").read_text().split()] == list(range(60))


def test_refused_before_anything_starts(machines):
    job = (
        RLJobBuilder().device_type("CPU").config({"a": 1}).trainer(HERE, "Missing").actor("not.there", "Actor").build()
    )
    with pytest.raises(JobSpecError) as error:
        job.submit("refused")
    assert "no 'Missing'" in str(error.value) and "not.there:Actor cannot be imported" in str(error.value)
    with pytest.raises(JobSpecError, match="not a name"):
        job.submit("not a name")
