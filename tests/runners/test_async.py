"""Asynchronous embodied runs: exact where possible, and data are never older than `max_staleness` allows."""

import json
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from rlinf_lite.runners import AsyncEmbodiedRunner, AsyncOffPolicyRunner, OffPolicyRunner, stopping
from rlinf_lite.workers import EnvWorker, MultiStepRolloutWorker
from tests.runners.conftest import OFF_POLICY_WORKERS, SMALL_SAC, WORKERS, read_metrics

ASYNC = ["runner.mode=async", "algorithm.correction.kind=decoupled", "runner.max_steps=5", "runner.save_interval=5"]
SPREAD = ["cluster.component_placement={actor: '0', rollout: 0-1, env: 0-1}", "rollout.pipeline_stage_num=2"]
TWO_ACTORS = ["cluster.component_placement={actor: 0-1, rollout: 0-1, env: 0-1}", "rollout.pipeline_stage_num=2"]


def weights(result):
    return load_file(result.checkpoint / "policy" / "model.safetensors")


def numbers(line):
    return {name: x for name, x in line.items() if not name.startswith(("time", "perf/", "async/", "control/"))}


@pytest.mark.parametrize(
    "spread",
    [[], SPREAD, pytest.param(TWO_ACTORS, marks=(pytest.mark.processes, pytest.mark.slow))],
    ids=["one of each", "spread", "two actors"],
)
def test_without_staleness_it_is_the_synchronous_run_bit_for_bit(start, tmp_path, spread):
    steps = ["runner.max_steps=4", "runner.save_interval=4", "runner.val_check_interval=2", *spread]
    sync = start(*steps, root=tmp_path / "sync").run()
    start.stop()
    overrides = [*steps, "runner.mode=async", "runner.max_staleness=0"]
    found = start(*overrides, root=tmp_path / "async", runner_class=AsyncEmbodiedRunner).run()
    assert weights(sync).keys() == weights(found).keys()
    assert all(torch.equal(weights(sync)[name], x) for name, x in weights(found).items())
    for one, other in zip(read_metrics(sync.run_dir), read_metrics(found.run_dir), strict=True):
        assert numbers(one) == numbers(other)
    assert sync.evals[-1].total.return_mean == found.evals[-1].total.return_mean


@pytest.mark.parametrize("bound", [1, 2])
def test_staleness_stays_within_its_bound(start, bound):
    result = start(*ASYNC, f"runner.max_staleness={bound}", *SPREAD, runner_class=AsyncEmbodiedRunner).run()
    lines = read_metrics(result.run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["async/staleness_max"] == 0  # nothing is older than the first weights
    assert 0 < max(line["async/staleness_max"] for line in lines) <= bound
    assert all(0 < line["train/actor/importance_weight_mean"] < 2 for line in lines)
    gaps = [line.get("rollout/logprob_drift") for line in lines]
    assert gaps[0] is not None and any(gap is not None for gap in gaps[1:])  # computed with older weights
    assert all(gap is None or gap < 1e-5 for gap in gaps)
    assert lines[0]["async/admitted_steps"] == bound + 1 and lines[1]["async/admitted_steps"] == 1


class SlowEnvWorker(EnvWorker):
    """Simulates longer than an update takes, so that several versions arrive within a step."""

    def interact(self, step=None):
        for stage in self.stages:
            stage.simulating = lambda stage=stage: (time.sleep(0.1), type(stage).simulating(stage))[1]
        return super().interact(step)


@pytest.mark.parametrize("bound", [1, 3])
def test_rollouts_that_are_slower_than_training_take_weights_as_they_come(start, bound):
    """One transfer is taken in the middle of a rollout, while calls of several others wait after it."""
    workers = {**WORKERS, "env": SlowEnvWorker}
    overrides = [*ASYNC, f"runner.max_staleness={bound}", "runner.phase_timeout_s=20", "runner.max_steps=6"]
    lines = read_metrics(start(*overrides, workers=workers, runner_class=AsyncEmbodiedRunner).run().run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["async/staleness_max"] <= bound for line in lines)
    assert any(line["async/staleness_mean"] % 1 for line in lines)  # two versions within a step


def start_off_policy(start, *overrides, **where):
    where = {"config": "gym_pendulum_sac_mlp", "small": SMALL_SAC, "workers": OFF_POLICY_WORKERS, **where}
    return start(*overrides, **where)


def test_off_policy_without_staleness_is_the_synchronous_run_bit_for_bit(start, tmp_path):
    steps = ["runner.max_steps=4", "runner.save_interval=4", "runner.val_check_interval=2", *SPREAD]
    sync = start_off_policy(start, *steps, root=tmp_path / "sync", runner_class=OffPolicyRunner).run()
    start.stop()
    overrides = [*steps, "runner.mode=async", "runner.max_staleness=0"]
    found = start_off_policy(start, *overrides, root=tmp_path / "async", runner_class=AsyncOffPolicyRunner).run()
    for file in ("policy", "training_state/critics/model"):
        one, other = (load_file(x.checkpoint / file / "model.safetensors") for x in (sync, found))
        assert one.keys() == other.keys() and all(torch.equal(one[name], x) for name, x in other.items())
    for one, other in zip(read_metrics(sync.run_dir), read_metrics(found.run_dir), strict=True):
        assert numbers(one) == numbers(other)


@pytest.mark.parametrize("spread", [SPREAD, pytest.param(TWO_ACTORS, marks=(pytest.mark.processes, pytest.mark.slow))])
def test_off_policy_plays_ahead_and_goes_on_from_a_checkpoint(start, spread):
    overrides = ["runner.mode=async", "runner.max_staleness=2", "actor.strategy=replicated", *spread]
    overrides += ["runner.max_steps=6", "runner.save_interval=3", "runner.run_name=run", "runner.resume=auto"]
    first = start_off_policy(start, *overrides, "runner.max_steps=3", runner_class=AsyncOffPolicyRunner).run()
    start.stop()
    result = start_off_policy(start, *overrides, runner_class=AsyncOffPolicyRunner).run()
    assert (first.completed_steps, result.completed_steps) == (3, 6)
    lines = read_metrics(result.run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    most = [line["async/staleness_max"] for line in lines]
    assert most[0] == most[3] == 0 < max(most) <= 2  # step 4 is played by the weights of the checkpoint
    assert [line["env/num_steps"] for line in lines] == [32 * step for step in range(1, 7)]
    assert [line["replay/online"] for line in lines] == [32, 64, 64, 64, 64, 64]


def test_stopped_in_the_middle_it_goes_on_where_it_was(start, monkeypatch):
    waits = []

    def wait_all(*handles, what, **arguments):
        waits.append(what)
        if waits.count("rollouts") == 3 and what == "rollouts":
            os.kill(os.getpid(), signal.SIGINT)
        return original(*handles, what=what, **arguments)

    original = stopping.wait_all
    monkeypatch.setattr(stopping, "wait_all", wait_all)
    overrides = [*ASYNC, *SPREAD, "runner.max_staleness=2", "runner.resume=auto"]
    result = start(*overrides, runner_class=AsyncEmbodiedRunner).run()
    assert result.interrupted and result.completed_steps == 2
    start.stop()
    result = start(*overrides, runner_class=AsyncEmbodiedRunner).run()
    lines = read_metrics(result.run_dir)
    assert result.completed_steps == 5 and [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[2]["async/staleness_max"] == 0  # played by the weights of the checkpoint
    assert lines[-1]["env/num_steps"] == 5 * 64


def test_an_evaluation_is_of_the_present_weights(start):
    runner = start(*ASYNC, *SPREAD, "runner.val_check_interval=2", runner_class=AsyncEmbodiedRunner)
    result = runner.run()
    assert [json.loads(file.read_text())["step"] for file in sorted(result.run_dir.glob("eval/*.json"))] == [0, 2, 4, 5]
    start.stop()
    again = start(f"actor.checkpoint_load_path={result.checkpoint}").evaluate()
    assert again.total.return_mean == pytest.approx(result.evals[-1].total.return_mean, abs=1e-4)


def test_at_learning_rate_zero_nothing_changes_and_nothing_is_clipped(start):
    rates = ["actor.optim.lr=0", "actor.optim.value_lr=0"]
    lines = read_metrics(start(*ASYNC, *rates, *SPREAD, runner_class=AsyncEmbodiedRunner).run().run_dir)
    for line in lines:
        assert line.get("rollout/logprob_drift", 0) < 1e-5
        assert line["train/actor/clip_fraction"] == 0 and line["train/actor/approx_kl_k3"] < 1e-9
        assert line["train/actor/importance_weight_max"] == pytest.approx(1, abs=1e-4)


class OffFromTheSecondVersion(MultiStepRolloutWorker):
    """Acts at another temperature than the config sets, once it has newer weights than the first."""

    def init(self, *arguments):
        super().init(*arguments)
        act = self.policy.predict_action_batch

        def off(*arguments):
            output = act(*arguments)
            return replace(output, logprobs=output.logprobs + 0.1) if self.version > 0 else output

        self.policy.predict_action_batch = off


def test_acting_that_goes_wrong_later_is_noticed_and_its_usual_causes_named(start, caplog, capsys):
    """Also if no step is played by the weights that train."""
    workers = {**WORKERS, "rollout": OffFromTheSecondVersion}
    runner = start(*ASYNC, "runner.max_steps=6", workers=workers, runner_class=AsyncEmbodiedRunner)
    lines = read_metrics(runner.run().run_dir)
    gaps = [line["rollout/logprob_drift"] for line in lines if "rollout/logprob_drift" in line]
    assert gaps[0] < 1e-5 and gaps[-1] == pytest.approx(0.1, rel=0.1)
    [warning] = [record.getMessage() for record in caplog.records if "rollout/logprob_drift" in record.getMessage()]
    for cause in ("dropout", "temperature", "precision", "weights that did not arrive"):
        assert cause in warning
    said = "log-probabilities that ratios begin with: the actor's, computed before updates (algorithm.correction "
    assert f"{said}compares them with those of acting)" in capsys.readouterr().out
