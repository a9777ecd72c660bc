"""Training goes on when its workers die: nothing is lost, and the result is that of an undisturbed run, bit for bit."""

import json
import math
import os
import re
import signal
import threading

import pytest
import torch

from rlinf_lite.control import JobFailedError
from rlinf_lite.control.context import ask_master
from rlinf_lite.runners import AsyncEmbodiedRunner, AsyncOffPolicyRunner, OffPolicyRunner
from rlinf_lite.runners.checkpoints import verify
from rlinf_lite.scheduler import WorkerDiedError
from tests.control.conftest import Hurt, changed, events, pids
from tests.runners.conftest import OFF_POLICY_WORKERS, SMALL_SAC, read_metrics


@pytest.fixture(scope="module")
def made():
    return {}


@pytest.fixture
def undisturbed(start, made, tmp_path_factory):
    """The final weights of a run without failures."""
    if not made:
        made["weights"] = run_to_end(start(root=tmp_path_factory.mktemp("undisturbed")))
        start.stop()
    return made["weights"]


def run_to_end(runner):
    result = runner.run()
    assert result.completed_steps == result.total_steps and not result.interrupted
    return weights(runner)


def weights(runner):
    from safetensors.torch import load_file

    directory = runner.run_dir / "final"
    runner.actor.save_checkpoint(str(directory)).wait()
    return load_file(directory / "policy" / "model.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def check_whole(runner):
    """Every step is in the log once, in order."""
    steps = [line["step"] for line in read_metrics(runner.run_dir) if "time/step" in line]
    assert steps == [*range(1, runner.total_steps + 1)]


def check_nothing_lost(runner, *failed):
    """What failed, in order, and that it was noticed in time and cost no completed step."""
    recovered = events(runner.run_dir, "recovered")
    assert [set(event["failed"]) for event in recovered] == [set(names) for names in failed]
    assert all(event["steps_lost"] == 0 for event in recovered)
    check_whole(runner)


@pytest.mark.slow
def test_killed_one_after_the_other_and_together(start, undisturbed):
    """Each role once, two of a role and of two roles at once, and one that was killed before again."""
    runner = start("runner.val_check_interval=3")
    before = pids(runner)
    hurts = [
        Hurt(runner, 2, ("env", 1)),
        Hurt(runner, 4, ("rollout", 0)),
        Hurt(runner, 6, ("actor", 1)),
        Hurt(runner, 8, ("env", 0), ("env", 1)),
        Hurt(runner, 10, ("rollout", 1), ("env", 0)),
        Hurt(runner, 12, ("env", 1)),
    ]
    final = run_to_end(runner)
    for hurt in hurts:
        hurt.join()
    assert changed(before, runner) == set(before)
    levels = [(event["level"], sorted(event["failed"])) for event in events(runner.run_dir, "recovered")]
    assert levels[:3] == [("worker", ["env[1]"]), ("worker", ["rollout[0]"]), ("group", ["actor[1]"])]
    assert levels[-1] == ("worker", ["env[1]"])
    detected = events(runner.run_dir, "detected")
    for hurt, following in zip(hurts, [*hurts[1:], None], strict=True):
        until = min(hurt.at + 5, math.inf if following is None else following.at)
        for pid, (name, rank) in zip(hurt.pids, hurt.victims, strict=True):
            found = [e for e in detected if (e["group"], e["rank"]) == (name, rank) and hurt.at <= e["time"] < until]
            assert [event["kind"] for event in found] == ["crashed"], pid
    assert [e["kind"] for e in detected].count("crashed") == sum(len(hurt.victims) for hurt in hurts)
    assert sum(event["steps_lost"] for event in events(runner.run_dir, "recovered")) == 0
    check_whole(runner)
    last = [line for line in read_metrics(runner.run_dir) if "time/step" in line][-1]
    assert last["control/failures"] == len(levels) and last["control/steps_lost"] == 0
    assert equal(final, undisturbed)


def hurt_within(runner, method, victims):
    """Kill workers as soon as the runner has called a method so many times: `{call: (group, rank)}`."""
    original, calls = getattr(runner, method), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) in victims:
            name, rank = victims[len(calls)]
            groups = {group.name: group for group in runner._groups}
            threading.Timer(0.0, os.kill, (groups[name].members[rank].pid, signal.SIGKILL)).start()
        return original(*args, **kwargs)

    setattr(runner, method, wrapped)


def test_killed_during_weight_sync(start, undisturbed):
    runner = start()
    hurt_within(runner, "update_rollout_weights", {3: ("actor", 0), 6: ("rollout", 1), 9: ("actor", 1)})
    assert equal(run_to_end(runner), undisturbed)
    check_nothing_lost(runner, ["actor[0]"], ["rollout[1]"], ["actor[1]"])


ASYNC = ["runner.mode=async", "algorithm.correction.kind=decoupled"]
ONE_OF_EACH = {3: ("rollout", 1), 5: ("env", 0), 8: ("actor", 0)}


@pytest.mark.slow
def test_killed_while_playing_and_training_overlap(start):
    """Whatever was played ahead is played again, by the weights of the step to which everything goes back."""
    runner = start(*ASYNC, "runner.max_staleness=2", "runner.val_check_interval=4", runner_class=AsyncEmbodiedRunner)
    hurt_within(runner, "_train", ONE_OF_EACH)
    result = runner.run()
    assert result.completed_steps == 14 and len(result.evals) == 5
    check_nothing_lost(runner, ["rollout[1]"], ["env[0]"], ["actor[0]"])
    staleness = [line["async/staleness_max"] for line in read_metrics(runner.run_dir) if "time/step" in line]
    assert max(staleness) == 2 and min(staleness[3:]) <= 1  # nothing was ahead after a recovery


@pytest.mark.slow
def test_a_replay_buffer_holds_what_it_would_have_held(start, tmp_path):
    """Whoever is killed: the same weights, and the same transitions by their checksums."""

    def off_policy(name):
        return start(
            "runner.max_steps=10",
            root=tmp_path / name,
            runner_class=OffPolicyRunner,
            config="gym_pendulum_sac_mlp",
            small=SMALL_SAC,
            classes=OFF_POLICY_WORKERS,
        )

    def held(runner):
        state = json.loads((runner.run_dir / "final" / "training_state" / "replay.json").read_text())
        return {**state, "directory": None}

    whole = off_policy("whole")
    expected = run_to_end(whole)
    start.stop()
    runner = off_policy("hurt")
    hurt_within(runner, "_train", ONE_OF_EACH)
    assert equal(run_to_end(runner), expected) and held(runner) == held(whole)
    assert held(whole)["end"] == 10 and held(whole)["first"] == 8
    check_nothing_lost(runner, ["rollout[1]"], ["env[0]"], ["actor[0]"])


@pytest.mark.slow
def test_an_off_policy_run_that_plays_ahead_loses_no_step(start):
    where = {"config": "gym_pendulum_sac_mlp", "small": SMALL_SAC, "classes": OFF_POLICY_WORKERS}
    ahead = ["runner.mode=async", "runner.max_staleness=2", "runner.max_steps=10"]
    runner = start(*ahead, runner_class=AsyncOffPolicyRunner, **where)
    hurt_within(runner, "_train", ONE_OF_EACH)
    run_to_end(runner)
    check_nothing_lost(runner, ["rollout[1]"], ["env[0]"], ["actor[0]"])
    state = json.loads((runner.run_dir / "final" / "training_state" / "replay.json").read_text())
    assert (state["first"], state["end"]) == (8, 10)


@pytest.mark.slow
def test_job_stop_ends_a_run_whose_rollouts_are_ahead(start):
    """With a checkpoint of the last completed step, from which it goes on."""
    more = [*ASYNC, "runner.max_staleness=2", "runner.max_steps=200", "runner.resume=auto"]
    runner = start(*more, runner_class=AsyncEmbodiedRunner)
    train = runner._train

    def stopped_at_the_third(*handles):
        if runner.completed_steps == 2:
            ask_master(runner.supervisor.job, "stop", "its user stopped it")  # as rlinf-lite job stop does
        return train(*handles)

    runner._train = stopped_at_the_third
    result = runner.run()
    assert result.interrupted and 3 <= result.completed_steps < 200
    assert [line["step"] for line in read_metrics(runner.run_dir)] == [*range(1, result.completed_steps + 1)]
    verify(result.checkpoint)
    start.stop()
    again = start(*more, runner_class=AsyncEmbodiedRunner)
    assert again.completed_steps == result.completed_steps


@pytest.mark.slow
def test_an_update_counts_although_somebody_who_plays_ahead_dies(start):
    """The only snapshot is of the beginning: an update that were broken off would cost every step."""
    runner = start(*ASYNC, "control.snapshot_interval=100", runner_class=AsyncEmbodiedRunner)
    hurt_within(runner, "_train", {3: ("env", 0), 7: ("rollout", 1)})
    assert runner.run().completed_steps == 14
    check_nothing_lost(runner, ["env[0]"], ["rollout[1]"])


@pytest.mark.slow
def test_a_run_without_staleness_recovers_exactly(start, undisturbed):
    runner = start("runner.mode=async", "runner.max_staleness=0", runner_class=AsyncEmbodiedRunner)
    hurt_within(runner, "_train", ONE_OF_EACH)
    assert equal(run_to_end(runner), undisturbed)
    check_nothing_lost(runner, ["rollout[1]"], ["env[0]"], ["actor[0]"])


@pytest.mark.slow
def test_killed_while_idle_beside_an_update(start, undisturbed):
    """The step that the actor is training on completes; the only snapshot is of the beginning."""
    runner = start("control.snapshot_interval=100")
    hurt_within(runner, "_train", {3: ("env", 0), 7: ("rollout", 1)})
    assert equal(run_to_end(runner), undisturbed)
    check_nothing_lost(runner, ["env[0]"], ["rollout[1]"])


@pytest.mark.slow
def test_killed_during_a_checkpoint(start, undisturbed):
    runner = start("runner.save_interval=4")
    hurt_within(runner, "save_checkpoint", {1: ("actor", 0), 3: ("env", 1)})
    assert equal(run_to_end(runner), undisturbed)
    check_nothing_lost(runner, ["actor[0]"], ["env[1]"])
    checkpoints = sorted(path.name for path in (runner.run_dir / "checkpoints").glob("*"))
    assert checkpoints == ["last", "step_000008", "step_000012", "step_000014"]
    for checkpoint in runner.store.steps():
        verify(checkpoint)


@pytest.mark.slow
def test_without_snapshots_an_actors_death_costs_the_steps_since_the_checkpoint(start, undisturbed):
    runner = start("control.snapshot_interval=0", "runner.save_interval=4")
    hurt = Hurt(runner, 7, ("actor", 0))
    final = run_to_end(runner)
    hurt.join()
    check_whole(runner)
    assert [event["steps_lost"] for event in events(runner.run_dir, "recovered")] == [3]
    assert equal(final, undisturbed)


@pytest.mark.slow
def test_a_stopped_rollout_worker_and_the_masters_death(start, undisturbed):
    runner = start("control.hang_timeout_s=4")
    before = pids(runner)
    hurt = Hurt(runner, 2, ("rollout", 0), how=signal.SIGSTOP)
    master = ask_master(runner.supervisor.job, "process_id")
    os.kill(master, signal.SIGKILL)
    final = run_to_end(runner)
    hurt.join()
    assert changed(before, runner) == {"rollout[0]"}
    found = events(runner.run_dir, "detected")
    assert [event["kind"] for event in found] == ["hung"] and found[0]["time"] - hurt.at < 4 + 5
    assert "stopped" in found[0]["evidence"]
    assert equal(final, undisturbed)


def test_an_environment_that_hangs_is_replaced(start, tmp_path, caplog):
    """What nobody comes on for is said before the limit, and then in which line of the environment it was."""
    how = f"{{how: hang_once, after: 40, marker: '{tmp_path / 'hung'}'}}"
    broken = ["env.id=tests.runners.broken_envs:make_env", "env.task=broken", f"env.options={how}"]
    runner = start(*broken, "control.hang_timeout_s=5", "runner.max_steps=12")
    before = pids(runner)
    result = runner.run()
    assert result.completed_steps == 12
    assert len(changed(before, runner)) == 1 and changed(before, runner) <= {"env[0]", "env[1]"}
    found = events(runner.run_dir, "detected")
    assert [event["kind"] for event in found] == ["hung"] and "interact" in found[0]["evidence"]
    assert re.search(r"; it stood at \S+/broken_envs\.py:\d+ in step, from ", found[0]["evidence"])
    (hung,) = changed(before, runner)
    said = [message for message in caplog.messages if message.startswith("no worker has made progress for ")]
    assert f"{hung}: interact" in said[0] and "generate, waits for" in said[0]
    check_whole(runner)


def test_an_environment_that_raises_is_replaced_until_the_limit(start):
    broken = ["env.id=tests.runners.broken_envs:make_env", "env.task=broken", "env.options={how: raise, after: 40}"]
    alone = "cluster.component_placement={actor: '0-1', rollout: '0-1', env: '0'}"  # which raises in later steps again
    runner = start(*broken, alone, "control.max_restarts=2", "runner.max_steps=100")
    with pytest.raises(JobFailedError, match=r"control\.max_restarts is 2") as error:
        runner.run()
    assert "ZeroDivisionError: the simulator fell over" in str(error.value) and "What failed:" in str(error.value)
    assert events(runner.run_dir, "failover")[-1]["level"] == "fail"


def test_off(start):
    runner = start("control.enabled=false")
    assert runner.supervisor is None
    hurt = Hurt(runner, 1, ("env", 0))
    with pytest.raises(WorkerDiedError):
        runner.run()
    hurt.join()
    assert not (runner.run_dir / "events.jsonl").exists()
