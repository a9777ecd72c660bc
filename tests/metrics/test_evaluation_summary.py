"""Evaluation summaries: headline, intervals, rows by task."""

import json
from dataclasses import dataclass

import pytest

from rlinf_lite.metrics import env_metrics, summarize_episodes
from rlinf_lite.metrics.evaluation import mean_interval, student_t_975, wilson_interval


@dataclass(frozen=True)
class Episode:
    return_: float = 1.0
    success_once: bool | None = None
    success_at_end: bool | None = None
    length: int = 50
    task_id: str = "PushCube-v1"
    seed: int = 0
    env_id: int = 0
    steps_to_success: int | None = None


def test_headline_of_a_success_rate() -> None:
    episodes = [Episode(success_once=i < 158, success_at_end=i < 100, seed=i) for i in range(280)]
    summary = summarize_episodes(episodes, mode="greedy")
    assert summary.headline() == "success 56.4% [50.6, 62.1] (158/280), greedy"
    assert summary.metrics() == {
        "eval/success_once": pytest.approx(158 / 280),
        "eval/success_at_end": pytest.approx(100 / 280),
        "eval/return": 1.0,
        "eval/episode_len": 50.0,
        "eval/reward": pytest.approx(0.02),
        "eval/num_episodes": 280.0,
    }


def test_headline_of_returns() -> None:
    episodes = [Episode(return_=-180.0 + (10 if i % 2 else -10), seed=i) for i in range(100)]
    summary = summarize_episodes(episodes, mode="sampled")
    assert summary.headline() == "return -180.0 [-182.0, -178.0] (100 episodes), sampled"
    assert "eval/success_once" not in summary.metrics()
    assert summarize_episodes(episodes[:1], "greedy").headline() == "return -190.0 (1 episode), greedy"


def test_rows_by_task_and_json_that_reads_back() -> None:
    episodes = [Episode(task_id=task, success_once=task == "a", seed=s) for s in range(3) for task in ("b", "a")]
    summary = summarize_episodes(episodes, mode="greedy")
    assert [(row.task_id, row.num_successes, row.num_episodes) for row in summary.tasks] == [("a", 3, 3), ("b", 0, 3)]
    assert summary == summarize_episodes(reversed(episodes), mode="greedy")
    content = json.loads(summary.to_json())
    assert content["headline"] == summary.headline()
    assert content["tasks"][0]["success_once"] == 1.0
    assert content["episodes"][0] == {
        "task_id": "a",
        "seed": 0,
        "length": 50,
        "return": 1.0,
        "success_once": True,
        "success_at_end": None,
        "steps_to_success": None,
    }


def test_intervals() -> None:
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    quantiles = {1: 12.7062, 2: 4.3027, 4: 2.7764, 5: 2.5706, 10: 2.2281, 30: 2.0423, 99: 1.9842}
    for dof, quantile in quantiles.items():
        assert student_t_975(dof) == pytest.approx(quantile, abs=1e-3)
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-3)


def test_a_step_without_finished_episodes_says_only_that() -> None:
    assert env_metrics([]) == {"env/num_episodes": 0.0}
    metrics = env_metrics([Episode(return_=4.0, length=8), Episode(return_=2.0, length=4)])
    assert metrics == {"env/return": 3.0, "env/episode_len": 6.0, "env/reward": 0.5, "env/num_episodes": 2.0}


def test_an_episode_that_says_nothing_of_success_had_none_where_others_report_it() -> None:
    records = [
        Episode(),
        Episode(success_once=True, success_at_end=False, seed=1),
        Episode(task_id="b", seed=2),
        Episode(task_id="b", seed=3),
    ]
    assert env_metrics(records)["env/success_once"] == 0.25 and env_metrics(records)["env/success_at_end"] == 0.0
    summary = summarize_episodes(records, mode="greedy")
    assert summary.headline() == "success 25.0% [4.6, 69.9] (1/4), greedy"
    assert [(row.task_id, row.num_successes) for row in summary.tasks] == [("PushCube-v1", 1), ("b", 0)]
    only_at_some_step = summarize_episodes([Episode(success_once=True), Episode()], mode="greedy")
    assert only_at_some_step.total.success_once == 0.5 and only_at_some_step.total.success_at_end is None


def test_bad_records_are_refused() -> None:
    with pytest.raises(ValueError, match="no finished episode"):
        summarize_episodes([], mode="greedy")


def test_steps_to_success_are_those_of_the_episodes_that_succeeded() -> None:
    episodes = [Episode(success_once=True, steps_to_success=n, seed=n) for n in (10, 20)]
    summary = summarize_episodes([*episodes, Episode(success_once=False)], mode="greedy")
    assert summary.total.steps_to_success == 15.0
    assert [episode["steps_to_success"] for episode in summary.episodes] == [None, 10, 20]
    assert summarize_episodes([Episode(success_once=False)], mode="greedy").total.steps_to_success is None
