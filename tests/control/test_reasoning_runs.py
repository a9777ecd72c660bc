"""Language models train on when their workers die, and end with the same weights."""

import time

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.control import supervise
from rlinf_lite.data.problems import open_problems
from rlinf_lite.runners import AsyncReasoningRunner, ReasoningRunner
from rlinf_lite.scheduler import HybridComponentPlacement
from rlinf_lite.workers.reasoning import launch_roles
from tests.control.conftest import Hurt, changed, events, pids
from tests.control.test_runs import check_whole, equal, hurt_within, run_to_end
from tests.runners.conftest import FUSED, SMALL_MATH, placed, read_metrics, write_reward_model

CRITIC = ["algorithm.adv_type=gae", "control.snapshot_interval=1", "control.backoff_s=0.1"]
CRITIC += ["algorithm.kl={place: loss, coef: 0.1}", "runner.max_steps=10", "actor.num_threads=1"]


@pytest.fixture
def start_reasoning(cluster, start, tmp_path):
    """As `start`, for language models."""

    def start_reasoning(*overrides, root=tmp_path):
        paths = [f"runner.logger.log_path={root}"]
        cfg = load_config("math/math_arithmetic_grpo", [*SMALL_MATH, *CRITIC, *paths, *overrides])
        supervisor = start.stack.enter_context(supervise(cfg, cluster))
        roles = launch_roles(cfg, cluster, HybridComponentPlacement(cfg))
        for group in roles.values():
            start.stack.callback(group.shutdown)
        runner_class = AsyncReasoningRunner if cfg.runner.mode == "async" else ReasoningRunner
        runner = runner_class(cfg, open_problems(cfg), **roles, supervisor=supervisor)
        runner.init_workers()
        return runner

    return start_reasoning


@pytest.mark.parametrize(
    "overrides, victims, restarted",
    [
        pytest.param(
            [placed(rollout="'0-1'", num_slots=2)],
            [("rollout", 1), ("reward", 0), ("actor", 0), ("critic", 0)],
            {"rollout[1]", "reward[0]", "actor[0]", "critic[0]"},
            marks=pytest.mark.slow,
        ),
        (
            [placed(fuse=FUSED)],
            [("rollout", 0)],
            {"actor[0]", "rollout[0]", "critic[0]", "reference[0]"},
        ),
    ],
    ids=["apart", "fused"],
)
def test_killed(start, start_reasoning, tmp_path_factory, overrides, victims, restarted):
    undisturbed = run_to_end(start_reasoning(*overrides, root=tmp_path_factory.mktemp("undisturbed")))
    start.stop()
    runner = start_reasoning(*overrides)
    before = pids(runner)
    hurts = [Hurt(runner, 2 * count, victim) for count, victim in enumerate(victims, 1)]
    final = run_to_end(runner)
    for hurt in hurts:
        hurt.join()
    assert changed(before, runner) == restarted
    recovered = events(runner.run_dir, "recovered")
    assert len(recovered) == len(victims) and all(event["steps_lost"] == 0 for event in recovered)
    check_whole(runner)
    assert equal(final, undisturbed)


@pytest.mark.slow
def test_a_killed_reward_model_is_loaded_again(start, start_reasoning, tmp_path_factory, repo):
    directory = write_reward_model(tmp_path_factory.mktemp("model") / "sevens", repo)
    scored = [f"reward.model={directory}", "reward.weights.rule=0.5", placed(rollout="'0'"), "runner.max_steps=5"]
    undisturbed = run_to_end(start_reasoning(*scored, root=tmp_path_factory.mktemp("undisturbed")))
    start.stop()
    runner = start_reasoning(*scored)
    before = pids(runner)
    hurt = Hurt(runner, 2, ("reward", 0))
    final = run_to_end(runner)
    hurt.join()
    assert changed(before, runner) == {"reward[0]"} and equal(final, undisturbed)
    assert [event["steps_lost"] for event in events(runner.run_dir, "recovered")] == [0]


ASYNC = ["runner.mode=async", "algorithm.correction.kind=tis", placed(rollout="'0-1'", num_slots=2)]


@pytest.mark.slow
def test_killed_while_answering_and_training_overlap(start, start_reasoning):
    """Whatever was answered ahead is answered again, by the weights of the step to which everything goes back."""
    runner = start_reasoning(*ASYNC, "runner.max_staleness=2", "rollout.partial_rollouts=true")
    hurt_within(runner, "_train", {2: ("rollout", 1), 4: ("reward", 0), 6: ("actor", 0)})
    assert runner.run().completed_steps == 10
    recovered = events(runner.run_dir, "recovered")
    failed = {name for event in recovered for name in event["failed"]}  # one recovery may mend two deaths
    assert failed == {"rollout[1]", "reward[0]", "actor[0]"}, recovered
    assert all(event["steps_lost"] == 0 for event in recovered)
    check_whole(runner)
    staleness = [line["async/staleness_max"] for line in read_metrics(runner.run_dir) if "time/step" in line]
    assert max(staleness) <= 2 and min(staleness[2:]) == 0  # nothing was ahead after a recovery


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2])
def test_killed_before_anyone_has_told_whom_it_sends_to(start, start_reasoning, call):
    """The actor offers weights and waits for who is dead; heartbeats, which say that, come every other second."""
    runner = start_reasoning(*ASYNC, "runner.max_staleness=0", "runner.phase_timeout_s=25")
    hurt_within(runner, "_train", {call: ("rollout", 0)})
    started = time.monotonic()
    assert runner.run().completed_steps == 10
    assert time.monotonic() - started < 25  # nobody waited for a message that never came
    assert [event["failed"] for event in events(runner.run_dir, "recovered")] == [["rollout[0]"]]
    check_whole(runner)


@pytest.mark.slow
def test_without_staleness_a_run_recovers_exactly(start, start_reasoning, tmp_path_factory):
    exact = [*ASYNC, "runner.max_staleness=0"]
    undisturbed = run_to_end(start_reasoning(*exact, root=tmp_path_factory.mktemp("undisturbed")))
    start.stop()
    runner = start_reasoning(*exact)
    hurt_within(runner, "_train", {3: ("rollout", 0), 7: ("actor", 0)})
    assert equal(run_to_end(runner), undisturbed)
    check_whole(runner)
