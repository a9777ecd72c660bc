"""Runs with a reward model: it trains the policy, also with rules, in synchronous and asynchronous runs, and after the
death of any worker."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaForSequenceClassification

from rlinf_lite.config import load_config
from rlinf_lite.config.plan import plan_of
from rlinf_lite.data import DataProto
from rlinf_lite.data.problems import open_problems
from rlinf_lite.preview.dry_run import describe
from rlinf_lite.preview.memory import estimate
from rlinf_lite.rewards import RewardError, UnknownSourceError
from rlinf_lite.runners import ReasoningRunner, check_rewards
from rlinf_lite.runners.scored import ScoringLog
from tests.runners.conftest import APART, SMALL_MATH, read_metrics, write_reward_model


@pytest.fixture(scope="module")
def likes_sevens(tmp_path_factory, repo):
    return write_reward_model(tmp_path_factory.mktemp("likes") / "sevens", repo)


def rewarded(directory, weights="{rule: 0, model: 1}"):
    return [f"reward.model={directory}", f"reward.weights={weights}"]


def means(run_dir, name):
    return [line[name] for line in read_metrics(run_dir) if name in line]


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_a_policy_learns_what_a_reward_model_likes(start_reasoning, likes_sevens, mode):
    is_async = ["runner.mode=async", "algorithm.correction.kind=tis", APART] if mode == "async" else []
    steps = ["runner.max_steps=14", "actor.optim.lr=1e-2", "actor.max_tokens_per_micro_batch=2048"]
    sizes = ["data.num_prompts=8", "algorithm.group_size=8", "actor.global_batch_size=64"]
    result = start_reasoning(*rewarded(likes_sevens), *steps, *sizes, *is_async).run()
    scores = means(result.run_dir, "rollout/model_rewards")
    assert scores == means(result.run_dir, "rollout/all_rewards")
    assert np.mean(scores[-3:]) > 2 * np.mean(scores[:3]) > 0, scores
    assert not means(result.run_dir, "rollout/rule_rewards")
    assert sum(means(result.run_dir, "rollout/failed_rewards") + means(result.run_dir, "rollout/cut_rewards")) == 0


def test_rules_and_model_are_summed_and_the_rule_says_what_succeeds(start_reasoning, likes_sevens):
    both = rewarded(likes_sevens, "{rule: 1, model: 0.5}")
    once = ["runner.max_steps=1", "runner.val_check_interval=1", "algorithm.filter_groups=false"]
    result = start_reasoning(*both, *once, "reward.fn=tests.runners.rewards:always_one").run()
    line = next(line for line in read_metrics(result.run_dir) if "rollout/all_rewards" in line)
    assert line["rollout/rule_rewards"] == 1
    assert line["rollout/all_rewards"] == pytest.approx(1 + 0.5 * line["rollout/model_rewards"], abs=1e-6)
    assert result.last_eval.total.success_once == 1 and result.last_eval.total.num_episodes == 6


def test_only_what_a_rule_judges_succeeds_and_the_protocol_says_how(monkeypatch):
    cfg = load_config("math/math_arithmetic_grpo", SMALL_MATH)
    runner = object.__new__(ReasoningRunner)
    runner.cfg, runner.problems = cfg, open_problems(cfg)
    sources = runner.problems.val.batch(np.arange(6)).non_tensor_batch["data_source"]
    sources[:2] = "judged by none"
    given = {"response_mask": torch.ones(6, 4)}
    answers = DataProto(given, {"data_source": sources})
    monkeypatch.setattr(runner, "update_rollout_weights", lambda: None)
    runner.scoring, runner.step_log = ScoringLog(), SimpleNamespace(phase=lambda _: nullcontext())
    runner.rollout = SimpleNamespace(generate_sequences=lambda _: answers)

    def evaluated(by_rule):
        scores = {"scores": torch.full((6,), 0.25), "rule_scores": torch.tensor(by_rule)}
        runner.reward = SimpleNamespace(compute_rewards=lambda _: None)
        runner._wait = lambda *_, what: (answers, DataProto(scores, {}))
        return runner.evaluate()

    nan = float("nan")
    assert evaluated([nan] * 6).headline().startswith("return 0.250 [0.250, 0.250] (6 episodes)")
    mixed = evaluated([nan, nan, 0.0, 1.0, 1.0, 1.0])
    assert mixed.total.success_once is None
    assert {task.task_id: task.success_once for task in mixed.tasks} == {sources[2]: 0.75, "judged by none": None}
    assert evaluated([0.0, 1.0, 0.0, 1.0, 1.0, 1.0]).total.num_successes == 4

    found = evaluated([1.0] * 6).protocol
    assert (found["max_prompt_length"], found["max_response_length"], found["tokenizer"]) == (12, 16, None)
    assert found["reward"]["fn"] == "tests.runners.rewards:arbitrary" and found["reward"]["weights"]["rule"] == 1
    assert found["arithmetic"]["num_terms"] == 2 and found["engine"] == "transformers"


def test_before_anything_starts(likes_sevens, tmp_path):
    paths = [f"runner.logger.log_path={tmp_path}"]
    cfg = load_config("math/math_arithmetic_grpo", [*SMALL_MATH, *rewarded(likes_sevens), *paths])
    found = estimate(plan_of(cfg))
    assert found.unknown == []
    size = sum(p.nbytes for p in LlamaForSequenceClassification.from_pretrained(likes_sevens).parameters())
    held = found.ranks["reward"]
    assert size <= held.held["weights"] <= size + 4096 and held.working["scoring"] > 0
    assert "reward model" in describe(cfg)
    check_rewards(cfg, open_problems(cfg))

    row = '{"prompt": "hello", "reward_model": {"style": "model"}}\n'
    (tmp_path / "rows.jsonl").write_text(row * 8)
    files = [f"data.train_files=[{tmp_path}/rows.jsonl]"]
    cfg = load_config("math/math_arithmetic_grpo", [*SMALL_MATH, *rewarded(likes_sevens), *paths, *files])
    check_rewards(cfg, open_problems(cfg))
    cfg = load_config("math/math_arithmetic_grpo", [*SMALL_MATH, *paths, *files])
    with pytest.raises(RewardError, match=r"data\.train_files: 8 rows have reward_model\.style: model, and reward\.mo"):
        check_rewards(cfg, open_problems(cfg))
    own = '{"data_source": "own", "prompt": "hello", "reward_model": {"ground_truth": "1"}}\n'
    (tmp_path / "rows.jsonl").write_text(own.replace("own", "arithmetic") * 5 + own * 3)
    cfg = load_config("math/math_arithmetic_grpo", [*SMALL_MATH, *paths, *files, "reward.fn=null"])
    with pytest.raises(UnknownSourceError, match=r"data\.train_files: \S+rows\.jsonl, row 6: no rule scores data_"):
        check_rewards(cfg, open_problems(cfg))
