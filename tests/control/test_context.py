"""The job's context outlives its master, whole or not at all; the coordinator's decisions follow from it."""

import time

import pytest

from rlinf_lite.config.schema import ControlConfig
from rlinf_lite.control.context import (
    ContextError,
    DirectoryBackend,
    Failover,
    JobContext,
    Stage,
    WorkerRecord,
    load_context,
)
from rlinf_lite.control.diagnosis import Finding
from rlinf_lite.control.failover import FailoverCoordinator


def make_context(**failovers):
    """Two ranks of each group; `failovers`: what starts again, by group."""
    records = [
        WorkerRecord(group, rank, 1, "node 0", "id", scope) for group, scope in failovers.items() for rank in (0, 1)
    ]
    return JobContext("job", stage=Stage.RUNNING, workers={record.name: record for record in records})


@pytest.fixture
def context():
    return make_context(env="worker", rollout="worker", actor="group", trunk="job")


@pytest.fixture
def saved():
    return []


@pytest.fixture
def coordinator(context, saved):
    control = ControlConfig(max_restarts=2, max_role_restarts=3, max_job_restarts=4, backoff_s=1.0, max_backoff_s=3.0)
    return FailoverCoordinator(context, control, lambda: saved.append(context.to_json()))


def crashed(group, rank=0):
    return Finding("crashed", group, rank, "killed")


def test_a_context_is_what_was_saved(context, tmp_path):
    context.failovers.append(Failover("id", "hung", ["env[0]"], "why", time.time()))
    context.edges.append(("env", "rollout"))
    backend = DirectoryBackend(tmp_path)
    backend.save("job", context.to_json())
    assert load_context(backend, "job") == context
    assert backend.jobs() == ["job"] and load_context(backend, "other") is None


@pytest.mark.parametrize("text", ["", "{}", '{"stage": "runn', "[1]", '{"name": "job", "stage": "nowhere"}'])
def test_a_damaged_context_is_refused(tmp_path, text):
    backend = DirectoryBackend(tmp_path)
    backend.save("job", text)
    with pytest.raises(ContextError, match="the persisted context of the job 'job' is damaged"):
        load_context(backend, "job")


def test_stages(context):
    with pytest.raises(ContextError, match="is running, and cannot become starting"):
        context.move_to(Stage.STARTING)
    context.move_to(Stage.FAILED, "why")
    assert context.ended is not None and context.reason == "why"
    with pytest.raises(ContextError, match="is failed"):
        context.move_to(Stage.RUNNING)


def test_who_is_touched_follows_from_who_feeds_whom():
    context = make_context(env="worker", rollout="worker", actor="group", reward="worker", judge="worker")
    assert context.touched_by(["env"]) == ["actor", "env", "judge", "reward", "rollout"], "nothing is known yet"
    context.edges = [("env", "rollout"), ("rollout", "actor"), ("actor", "rollout"), ("reward", "judge")]
    assert context.touched_by(["env"]) == ["actor", "env", "rollout"]
    assert context.touched_by(["judge"]) == ["judge", "reward"]
    context.workers |= make_context(critic="group").workers
    assert context.touched_by(["judge"]) == ["critic", "judge", "reward"], "it may work with any"
    assert context.touched_by(["critic"]) == ["actor", "critic", "env", "judge", "reward", "rollout"]


@pytest.mark.parametrize(
    "findings, level, ranks",
    [
        ([crashed("env", 1)], "worker", {"env": [1]}),
        ([crashed("env", 0), crashed("rollout", 1)], "worker", {"env": [0], "rollout": [1]}),
        ([crashed("actor", 1)], "group", {"actor": [0, 1]}),
        ([crashed("env", 1), crashed("actor", 1)], "group", {"env": [1], "actor": [0, 1]}),
        ([crashed("trunk")], "job", {"env": [0, 1], "rollout": [0, 1], "actor": [0, 1], "trunk": [0, 1]}),
    ],
)
def test_what_starts_again(coordinator, context, saved, findings, level, ranks):
    decision = coordinator.decide("a", findings)
    assert (decision.level, decision.ranks, decision.wait_s) == (level, ranks, 0.0)
    assert context.stage == Stage.RECOVERING and JobContext.from_json(saved[-1]) == context
    coordinator.ended("a", True, 0)
    assert context.stage == Stage.RUNNING and context.failovers[0].outcome == "done"
    assert JobContext.from_json(saved[-1]) == context


def test_a_vain_try_starts_more_again(coordinator):
    levels = [coordinator.decide("a", [crashed("env")]).level]
    for _ in range(2):
        coordinator.ended("a", False, 0, "it did not help")
        levels.append(coordinator.decide("a", []).level)
    assert levels == ["worker", "group", "job"]
    coordinator.ended("a", False, 0, "nor did that")
    decision = coordinator.decide("a", [])
    assert decision.level == "fail" and "control.max_restarts is 2" in decision.reason


def test_an_answer_stands_until_it_is_known_not_to_have_helped(coordinator, context):
    first = coordinator.decide("a", [crashed("env")])
    assert coordinator.decide("a", [crashed("env")]) == first, "asked again after the master was away"
    assert len(context.failovers) == 1


def fail(coordinator, name, *findings):
    decision = coordinator.decide(name, list(findings))
    if decision.level != "fail":
        coordinator.ended(name, True, 0)
    return decision


def test_limits_of_worker_role_and_job(coordinator):
    assert [fail(coordinator, f"a{i}", crashed("env")).wait_s for i in range(2)] == [0.0, 1.0]
    of_role = fail(coordinator, "b", crashed("env", 1))
    assert of_role.level == "worker"
    of_worker = coordinator.decide("c", [crashed("env")])
    assert of_worker.level == "fail" and of_worker.reason.startswith("env failed 4 times")
    assert "control.max_role_restarts is 3" in of_worker.reason


def test_limit_of_the_job(coordinator):
    for group in ("env", "rollout", "actor", "trunk"):
        assert fail(coordinator, group, crashed(group)).level != "fail"
    assert "the job failed 5 times" in fail(coordinator, "again", crashed("rollout", 1)).reason


def test_old_failures_do_not_count(coordinator, context):
    for i in range(2):
        fail(coordinator, f"a{i}", crashed("env"))
        context.failovers[-1].time -= 4000
    assert fail(coordinator, "b", crashed("env")).wait_s == 0.0


def test_a_trainer_that_raised(coordinator):
    decision = fail(coordinator, "a")
    assert (decision.level, decision.ranks) == ("trainer", {})


def test_a_job_that_is_being_stopped_does_not_recover(coordinator, context):
    context.move_to(Stage.STOPPING, "its user stopped it")
    decision = coordinator.decide("a", [crashed("env")])
    assert decision.level == "fail" and decision.reason == "the job is stopping: its user stopped it"


def test_history(coordinator):
    fail(coordinator, "a", crashed("env"))
    assert coordinator.history()[0].endswith("env[0] crashed: env[0]: killed -> worker done")
