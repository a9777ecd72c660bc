"""Asynchronous language runs: exact where possible, and data are never older than `max_staleness` allows."""

import json
import os
import signal
import time

import pytest
import torch

from rlinf_lite.config import ConfigError, load_config
from rlinf_lite.runners import stopping
from rlinf_lite.workers import reasoning
from tests.runners.conftest import APART, FUSED, SMALL_MATH, placed, read_metrics
from tests.runners.test_async import numbers
from tests.runners.test_reasoning import weights

SLOTS = [APART, "runner.val_check_interval=-1", "runner.max_steps=5", "runner.save_interval=5"]
ASYNC = [*SLOTS, "runner.mode=async", "algorithm.correction.kind=tis"]
REFILLED = ["algorithm.filter_groups=true", "algorithm.max_refills=2", "reward.fn=tests.runners.rewards:odd_prompts"]
SPREAD = [placed("'0-1'", rollout="'1-2'", num_slots=3), "rollout.pipeline_stage_num=2", *REFILLED]


@pytest.mark.parametrize(
    "more",
    [[], pytest.param(SPREAD, marks=(pytest.mark.processes, pytest.mark.slow))],
    ids=["one of each", "spread, with prompts in place of others"],
)
def test_without_staleness_it_is_the_synchronous_run_bit_for_bit(start_reasoning, tmp_path, more):
    more = [*SLOTS, "runner.val_check_interval=2", "algorithm.correction.kind=tis", *more]
    sync = start_reasoning(*more, root=tmp_path / "sync").run()
    start_reasoning.stop()
    found = start_reasoning(*more, "runner.mode=async", "runner.max_staleness=0", root=tmp_path / "async").run()
    assert all(torch.equal(weights(sync)[name], x) for name, x in weights(found).items())
    for one, other in zip(read_metrics(sync.run_dir), read_metrics(found.run_dir), strict=True):
        assert numbers(one) == numbers(other)


@pytest.mark.parametrize(("bound", "partial"), [(1, "false"), (2, "true")])
def test_staleness_stays_within_its_bound(start_reasoning, bound, partial):
    more = [f"runner.max_staleness={bound}", f"rollout.partial_rollouts={partial}", "runner.max_steps=6", *REFILLED]
    lines = read_metrics(start_reasoning(*ASYNC, *more).run().run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[0]["async/staleness_max"] == 0
    assert 0 < max(line["async/staleness_max"] for line in lines) <= bound
    assert all(0 < line["train/actor/importance_weight_mean"] < 2 for line in lines)
    gaps = [line.get("rollout/logprob_drift") for line in lines]
    assert gaps[0] is not None and any(gap is not None for gap in gaps[1:])  # computed with older weights
    assert all(gap is None or gap < 1e-5 for gap in gaps)
    refilled = [line["step"] for line in lines if line["rollout/filtered_groups_frac"] > 0]
    assert refilled  # other responses were generated in between, so waiting times are not logged
    assert all(("async/rollouts_waited_s" in line) == ("perf/generated_tokens_per_s" in line) for line in lines)
    assert all("perf/rollout_idle_frac" not in line for line in lines if "async/rollouts_waited_s" not in line)
    assert any("async/rollouts_waited_s" not in line for line in lines)
    for line in lines:
        assert 0 <= line["async/trainer_waited_s"] <= line["time/generate_rollouts"]


def test_parts_without_a_prompt(start_reasoning):
    """Two rollout workers with two prompts each, which answer them in three parts."""
    more = [placed("0", rollout="'0-1'", num_slots=2), "rollout.pipeline_stage_num=3", "runner.max_steps=2"]
    assert len(read_metrics(start_reasoning(*SLOTS, *more).run().run_dir)) == 2


def test_what_was_not_computed_again_has_no_drift_before_the_first_update(start_reasoning):
    more = ["algorithm.recompute_logprobs=false", "algorithm.correction.kind=none"]
    for line in read_metrics(start_reasoning(*SLOTS, *more).run().run_dir):
        assert 0 < line["rollout/logprob_drift"] < 1e-5  # the value at the first update


class SlowRollout(reasoning.LanguageRollout):
    """Generates longer than an update takes: in each step it waits, with unfinished responses, for a version that
    arrives during generation, so that several versions occur within a step."""

    step, num_looks = -1, 0

    def start_generation(self, prompts):
        self.step, self.num_looks = self.step + 1, 0
        return super().start_generation(prompts)

    def offered(self):
        self.num_looks += 1
        deadline = time.monotonic() + 30
        while (offer := super().offered()) is None and self.num_looks == 3 and self.version < self.step:
            assert time.monotonic() < deadline, "no weights came"
            time.sleep(0.01)
        return offer


@pytest.mark.parametrize("partial", [False, True], ids=["between responses", "within responses"])
def test_generation_that_is_slower_than_training_takes_weights_as_they_come(start_reasoning, monkeypatch, partial):
    monkeypatch.setitem(reasoning.CLASSES, "rollout", SlowRollout)
    seen = []
    more = ["runner.max_staleness=3", "rollout.max_batch_size=6", f"rollout.partial_rollouts={str(partial).lower()}"]
    runner = start_reasoning(*ASYNC, *more, "runner.max_steps=6", "runner.phase_timeout_s=60")
    logged = runner._log_generated

    def keep(batch, *rest):
        seen.append((batch.batch["acted_versions"], batch.batch["response_mask"]))
        logged(batch, *rest)

    runner._log_generated = keep
    lines = read_metrics(runner.run().run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["async/staleness_max"] <= 3 for line in lines)
    assert any(len(versions[mask].unique()) > 1 for versions, mask in seen)  # two versions within a step
    mixed = [len(row[valid].unique()) > 1 for versions, mask in seen for row, valid in zip(versions, mask, strict=True)]
    assert any(mixed) == partial


def test_stopped_in_the_middle_it_answers_every_prompt_once(start_reasoning, monkeypatch):
    """Also prompts that were drawn for later steps."""
    waits = []

    def wait_all(*handles, what, **arguments):
        waits.append(what)
        if waits.count("training") == 3 and what == "training":
            os.kill(os.getpid(), signal.SIGINT)
        return original(*handles, what=what, **arguments)

    original = stopping.wait_all
    monkeypatch.setattr(stopping, "wait_all", wait_all)
    overrides = [*ASYNC, "runner.max_staleness=2", "runner.max_steps=7", "runner.resume=auto"]
    rows = []

    def run():
        runner = start_reasoning(*overrides)
        batch_of = runner.problems.train.batch
        runner.problems.train.batch = lambda chosen: (rows.append(list(chosen)), batch_of(chosen))[1]
        result = runner.run()
        start_reasoning.stop()
        return result

    stopped = run()
    assert stopped.interrupted and 2 <= stopped.completed_steps <= 3
    state = json.loads((stopped.checkpoint / "training_state" / "runner.json").read_text())
    ahead = state["drawn"]
    assert len(ahead) == 2 and list(ahead.values()) == rows[stopped.completed_steps :][:2]
    drawn, rows = rows, []
    result = run()
    assert rows[:2] == list(ahead.values()) and result.completed_steps == 7
    whole = drawn[: stopped.completed_steps] + rows
    assert len({row for batch in whole for row in batch}) == 7 * 4  # 28 of 40 problems: none twice
    lines = read_metrics(result.run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert lines[stopped.completed_steps]["async/staleness_max"] == 0  # answered with the weights of the checkpoint


def test_at_learning_rate_zero_nothing_changes_and_nothing_is_clipped(start_reasoning):
    result = start_reasoning(*ASYNC, "actor.optim.lr=0", "rollout.partial_rollouts=true").run()
    for line in read_metrics(result.run_dir):
        assert line.get("rollout/logprob_drift", 0) < 1e-5
        assert line["train/actor/clip_fraction"] == 0 and line["train/actor/approx_kl_k3"] < 1e-9
        assert line["train/actor/importance_weight_max"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    "overrides, key, why",
    [
        ([placed(fuse=FUSED)], "cluster.fuse", "rollout and actor share processes"),
        ([placed(fuse="'rollout,reward'")], "cluster.fuse", "rollout and reward share processes"),
        (["algorithm.correction.kind=none"], "algorithm.correction.kind", "biases the gradient"),
        (["runner.mode=sync", "rollout.partial_rollouts=true"], "rollout.partial_rollouts", "no weights arrive"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides, key, why):
    with pytest.raises(ConfigError, match=why) as caught:
        load_config("math/math_arithmetic_grpo", [*SMALL_MATH, *ASYNC, *overrides])
    assert key in str(caught.value)


class OffFromTheSecondVersion(reasoning.LanguageRollout):
    """Draws with other probabilities than it reports, once it has newer weights than the first."""

    def _gather(self, prompts, generations):
        batch = super()._gather(prompts, generations)
        later = batch.batch["response_mask"] & (batch.batch["acted_versions"] > 0)
        batch.batch["rollout_logprobs"][later] += 0.1
        return batch


def test_generating_that_goes_wrong_later_is_noticed(start_reasoning, monkeypatch, caplog):
    monkeypatch.setitem(reasoning.CLASSES, "rollout", OffFromTheSecondVersion)
    lines = read_metrics(start_reasoning(*ASYNC, "runner.max_staleness=2", "runner.max_steps=6").run().run_dir)
    gaps = [line["rollout/logprob_drift"] for line in lines if "rollout/logprob_drift" in line]
    assert gaps[0] < 1e-5 and gaps[-1] == pytest.approx(0.1, rel=0.1)
    assert "log-probabilities of training differ from those of acting" in caplog.text
