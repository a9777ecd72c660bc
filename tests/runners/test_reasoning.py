"""The language loop: every estimator, placement and failure, with a model of a few thousand parameters."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlinf_lite.config import load_config
from rlinf_lite.data.problems import open_problems
from rlinf_lite.data.prompt_files import DatasetError
from rlinf_lite.rewards import RewardError
from rlinf_lite.runners import ReasoningRunner
from rlinf_lite.scheduler import HybridComponentPlacement, WorkerError
from rlinf_lite.workers.reasoning import launch_roles
from rlinf_lite.workers.reasoning.base import build_model
from tests.runners.conftest import APART, SMALL_MATH, placed, read_metrics


def weights(result):
    return load_file(result.checkpoint / "policy" / "model.safetensors")


ESTIMATORS = {
    "grpo": [],
    "ppo": ["algorithm.adv_type=gae", "algorithm.normalize_advantages=true"],
    "remax": ["algorithm.adv_type=remax", "algorithm.group_size=2", "actor.global_batch_size=4"],
    "kl in the reward": ["algorithm.adv_type=reinforce_plus_plus", "algorithm.kl={place: reward, kind: k1}"],
    "kl in the loss": [
        "algorithm.adv_type=rloo",
        "algorithm.kl={place: loss, coef: 0.1}",
        "algorithm.correction.kind=tis",
    ],
    "gspo": ["algorithm.loss_type=gspo", "algorithm.loss_agg_mode=seq-mean-token-mean"],
    "dppo_tv": ["algorithm.loss_type=dppo_tv", "algorithm.loss_agg_mode=seq-mean-token-sum-norm"],
    "not scored again": ["algorithm.recompute_logprobs=false"],
    "rejecting": [
        "algorithm.correction={kind: reject, metric: k3, level: sequence, high: 0.5}",
        "algorithm.overlong.buffer_length=8",
    ],
}


@pytest.mark.parametrize("overrides", ESTIMATORS.values(), ids=ESTIMATORS)
def test_every_estimator_trains(start_reasoning, overrides):
    result = start_reasoning("runner.save_interval=2", "algorithm.update_epochs=2", *overrides).run()
    lines = read_metrics(result.run_dir)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert np.isfinite([value for name, value in line.items() if name.startswith("train/")]).all()
        assert line["rollout/logprob_drift"] < 1e-4
        assert line["train/actor/grad_norm"] > 0 and line["train/actor/skipped_updates"] == 0
        assert 0 < line["rollout/rewards"] <= 1 and line["rollout/failed_rewards"] == 0
    assert (result.checkpoint / "policy" / "tokenizer.json").is_file()


def test_ratios_are_one_on_the_first_pass(start_reasoning):
    result = start_reasoning("runner.max_steps=1", "actor.global_batch_size=16").run()
    line = read_metrics(result.run_dir)[0]
    assert line["train/actor/ratio_mean"] == pytest.approx(1, abs=1e-5)
    for name in ("importance_weight_mean", "importance_weight_max", "effective_sample_size"):
        assert line[f"train/actor/{name}"] == pytest.approx(1, abs=1e-3)
    assert abs(line["train/actor/behaviour_k3"]) < 1e-6 and line["train/actor/rejected_fraction"] == 0
    assert line["train/actor/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert line["train/actor/approx_kl"] == pytest.approx(0, abs=1e-5)


def test_adapters_train_in_place_of_the_weights(start_reasoning):
    """With a reference that has adapters too, after supervised training, and a critic without adapters."""
    lora = ["model.lora={rank: 2, alpha: 4}", "sft.num_steps=1", "algorithm.adv_type=gae"]
    lora += ["algorithm.kl={place: loss, coef: 0.1}", "runner.save_interval=1"]
    whole = start_reasoning(*lora).run()
    cfg = load_config("math/math_arithmetic_grpo", [*SMALL_MATH, *lora])
    untrained = build_model(cfg, None, "sdpa").state_dict()
    for name, x in weights(whole).items():
        own = untrained["language_model." + name.replace("proj.weight", "proj.base_layer.weight")]
        assert torch.equal(x, own), f"{name} has changed"
    adapters = load_file(whole.checkpoint / "policy" / "adapter" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 7 * cfg_layers(whole) and all(x.any() for x in adapters.values())
    critic = load_file(next((whole.checkpoint / "training_state").rglob("critic*/**/model.safetensors")))
    assert not any("lora" in name or "base_layer" in name for name in critic)
    assert read_metrics(whole.run_dir)[0]["rollout/logprob_drift"] < 1e-5


def cfg_layers(result):
    return json.loads((result.checkpoint / "policy" / "config.json").read_text())["num_hidden_layers"]


def test_groups_without_a_signal_are_replaced_but_not_for_ever(start_reasoning, tmp_path, caplog):
    filtering = ["algorithm.filter_groups=true", "algorithm.max_refills=2", "runner.max_steps=1"]
    some = start_reasoning(*filtering, "reward.fn=tests.runners.rewards:odd_prompts", root=tmp_path / "some").run()
    line = read_metrics(some.run_dir)[0]
    assert line["rollout/num_groups"] == 4 and line["rollout/filtered_groups_frac"] > 0
    start_reasoning.stop()
    none = start_reasoning(*filtering, "reward.fn=tests.runners.rewards:always_one", root=tmp_path / "none").run()
    assert none.completed_steps == 1
    assert read_metrics(none.run_dir)[0]["rollout/filtered_groups_frac"] == 1
    assert "step 1: every group was filtered" in caplog.text


def test_evaluation_is_greedy_and_reads_the_rule(start_reasoning):
    runner = start_reasoning("reward.fn=null", "runner.val_check_interval=1", "runner.max_steps=1")
    result = runner.run()
    summary = result.last_eval
    assert summary.mode == "greedy" and summary.total.num_episodes == 6
    assert [task.task_id for task in summary.tasks] == ["arithmetic"]
    assert json.loads((result.run_dir / "eval" / "step_000001.json").read_text())["step"] == 1


def test_a_reward_function_that_raises_costs_its_sample_and_is_told(start_reasoning, caplog):
    result = start_reasoning("reward.fn=tests.runners.rewards:raises_sometimes", "runner.max_steps=1").run()
    assert read_metrics(result.run_dir)[0]["rollout/failed_rewards"] > 0
    assert "this answer is too odd" in caplog.text


@pytest.mark.parametrize(
    "when",
    [
        ["runner.val_check_interval=-1", placed("'0'", rollout="'0-1'", num_slots=2), "rollout.pipeline_stage_num=2"],
        ["runner.val_check_interval=1"],
        ["runner.mode=async", placed("'0'", rollout="'1'", num_slots=2), "algorithm.correction.kind=tis"],
        ["algorithm.filter_groups=true", "algorithm.max_refills=2"],
    ],
    ids=["a step", "an evaluation", "async", "refills"],
)
def test_a_reward_function_that_fails_at_a_whole_batch_ends_the_run(start_reasoning, when):
    runner = start_reasoning("reward.fn=tests.runners.rewards:raises_always", *when)
    with pytest.raises(RewardError, match=r"^reward\.fn: no response of a batch could be scored") as caught:
        runner.run()
    num, said = (6 if "runner.val_check_interval=1" in when else 16), str(caught.value)
    assert f"({num} of {num} failed). The first, to " in said
    file, row = re.search(r"to (\S+), row (\d+):\n", said).groups()
    truth = json.loads(Path(file).read_text().splitlines()[int(row) - 1])["reward_model"]["ground_truth"]
    assert f"LookupError: nothing is known of {truth}" in said and "rewards.py" in said
    assert runner.completed_steps == 0


def test_what_counts_is_the_whole_batch_not_one_workers_share(start_reasoning, tmp_path):
    row = {"data_source": "x", "prompt": "1+1=?\n", "reward_model": {"ground_truth": "2"}}
    row["extra_info"] = {"claim": str(tmp_path / "claim")}
    file = tmp_path / "rows.jsonl"
    file.write_text((json.dumps(row) + "\n") * 8)
    two = placed("'0'", rollout="'0-1'", num_slots=2)
    own = [f"data.train_files=[{file}]", "reward.fn=tests.runners.rewards:raises_in_one_process"]
    result = start_reasoning(two, *own, "runner.max_steps=1").run()
    line = read_metrics(result.run_dir)[0]
    assert (line["rollout/failed_rewards"], line["rollout/rewards"]) == (8, 0.5)


def test_other_numbers_of_a_reward_function_are_metrics(start_reasoning, tmp_path):
    """They are the same on any number of workers; a number that some rows lack is averaged over the others."""
    lines = []
    for name, where in (("one", placed()), ("two", placed("'0'", rollout="'0-1'", num_slots=2))):
        own = ["reward.fn=tests.runners.rewards:as_verl_returns_it", "runner.val_check_interval=1"]
        result = start_reasoning(where, *own, "runner.max_steps=1", root=tmp_path / name).run()
        start_reasoning.stop()
        lines.append(next(line for line in read_metrics(result.run_dir) if "rollout/rewards" in line))
        answers = (result.run_dir / "eval" / "step_000001.answers.jsonl").read_text().splitlines()
        for answer in map(json.loads, answers):
            assert answer["metrics"]["third"] == pytest.approx(answer["score"] / 3)
    names = {"reward/acc", "reward/odd", "reward/third"}
    given = [{name: value for name, value in line.items() if name.startswith("reward/")} for line in lines]
    assert given[0].keys() == names and given[0] == given[1]
    assert given[0]["reward/third"] == pytest.approx(lines[0]["rollout/rewards"] / 3)
    assert given[0]["reward/odd"] == 3 and 0 <= given[0]["reward/acc"] <= 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_engine_of_ones_own_generates(start_reasoning, mode):
    """It is told of new weights before every batch of prompts, and training uses its responses."""
    overlapping = ["runner.mode=async", "algorithm.correction.kind=tis", placed(fuse="null")] * (mode == "async")
    runner = start_reasoning("rollout.engine=tests.runners.engines:Curt", "runner.max_staleness=0", *overlapping)
    lines = [line for line in read_metrics(runner.run().run_dir) if "time/step" in line]
    assert len(lines) == 2
    assert all(line["rollout/response_length"] <= 3 and line["rollout/logprob_drift"] < 1e-5 for line in lines)


def test_an_engine_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"rollout\.engine: nothing is registered as 'vllm'"):
        load_config("math_arithmetic_grpo", ["rollout.engine=vllm"])
    for part in ("json:JSONDecoder", "json:dumps"):  # a class, and a function, that generate nothing
        with pytest.raises(ValueError, match=rf"rollout\.engine: {part} is .*, no class with stream, generate"):
            load_config("math_arithmetic_grpo", [f"rollout.engine={part}"])
    load_config("math_arithmetic_grpo", ["rollout.engine=tests.runners.engines:Curt"])


def test_supervised_training_needs_solutions(tmp_path):
    row = {"data_source": "arithmetic", "prompt": "1+1=?\n", "reward_model": {"ground_truth": "2"}}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    cfg = load_config("math/math_arithmetic_grpo", [*SMALL_MATH, f"data.train_files=[{file}]", "sft.num_steps=1"])
    with pytest.raises(DatasetError, match=r"row \d: no extra_info.solution"):
        open_problems(cfg)


def test_not_finite_updates_are_skipped_and_then_end_the_run(start_reasoning):
    runner = start_reasoning("actor.optim.lr=1e30", "runner.max_steps=4", "control.max_bad_updates=2")
    with pytest.raises(WorkerError, match=r"not finite \(data rows"):
        runner.run()


@pytest.fixture
def tiny_qwen(tmp_path, repo):
    """A checkpoint in the form of published Qwen2.5 models, with 0.1 M parameters."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(repo / "assets" / "char_tokenizer"))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    directory = tmp_path / "qwen"
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.processes
@pytest.mark.parametrize(
    "config", ["gsm8k_ppo_qwen2_5_0_5b", pytest.param("gsm8k_grpo_qwen2_5_0_5b", marks=pytest.mark.slow)]
)
def test_configs_of_real_models_run_on_a_checkpoint_as_published(cluster, tiny_qwen, tmp_path, config):
    rows = [{"question": f"What is {i} and 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(8)]
    file = tmp_path / "gsm8k.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = [
        f"rollout.model_dir={tiny_qwen}",
        f"data={{train_files: [{file}], val_files: [{file}], max_prompt_length: 200, num_prompts: 4}}",
        "rollout.max_response_length=8",
        "actor.global_batch_size=8",
        "algorithm.critic_warmup_steps=0",
        "runner={task_type: reasoning, max_steps: 1, val_check_interval: 1, save_interval: 1, report: false}",
        f"runner.logger.log_path={tmp_path}",
    ]
    cfg = load_config(f"math/{config}", small)
    roles = launch_roles(cfg, cluster, HybridComponentPlacement(cfg))
    try:
        runner = ReasoningRunner(cfg, open_problems(cfg), **roles)
        runner.init_workers()
        result = runner.run()
    finally:
        for group in roles.values():
            group.shutdown()
    assert result.completed_steps == 1 and result.last_eval.total.num_episodes == 8
    written, published = (
        json.loads((d / "config.json").read_text()) for d in (result.checkpoint / "policy", tiny_qwen)
    )
    assert written["architectures"] == published["architectures"] == ["Qwen2ForCausalLM"]
    assert weights(result).keys() == load_file(tiny_qwen / "model.safetensors").keys()


def test_the_report_shows_answers_before_and_after(start_reasoning):
    asked = ["reward.fn=null", "runner.val_check_interval=2", "runner.report=true", "runner.timeline=true"]
    result = start_reasoning(*asked).run()
    page = result.report.read_text()
    assert "<th>Before, step 0<th>After, step 2" in page and "Response length" in page
    lines = (result.run_dir / "eval" / "step_000002.answers.jsonl").read_text().splitlines()
    assert len(lines) == 6 and {*json.loads(lines[0])} == {"prompt", "response", "ground_truth", "score"}
    trace = json.loads((result.run_dir / "timeline.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"generate", "score", "log-probs", "update"} <= names


@pytest.mark.slow
@pytest.mark.processes
def test_stages_overlap_with_scoring(start_reasoning, tmp_path):
    """With rollout and actor on different slots, finished groups are scored while others are generated."""
    apart = [
        APART,
        "rollout.max_batch_size=32",
        "data.num_prompts=32",
        "data.arithmetic.num_train=64",
        "actor.global_batch_size=128",
    ]
    lines = {}
    for stages in (1, 4):
        overrides = [*apart, f"rollout.pipeline_stage_num={stages}"]
        result = start_reasoning(*overrides, "algorithm.adv_type=rloo", root=tmp_path / str(stages)).run()
        start_reasoning.stop()
        lines[stages] = read_metrics(result.run_dir)[-1]
    assert lines[1]["perf/overlap_frac"] == 0
    assert lines[4]["perf/overlap_frac"] > 0.3
    assert lines[4]["rollout/rewards"] == pytest.approx(lines[1]["rollout/rewards"])


def test_half_precision_on_a_shared_model(start_reasoning):
    """After generation, neither its autocast nor its eval mode remains in a process that then trains."""
    bf16 = ["actor.precision=bf16", "model.gradient_checkpointing=true", "rollout.pipeline_stage_num=2"]
    result = start_reasoning(*bf16, "runner.save_interval=2", "runner.phase_timeout_s=300").run()
    for line in read_metrics(result.run_dir):
        assert 0 < line["rollout/logprob_drift"] < 0.05 and line["train/actor/grad_norm"] > 0
    assert {tensor.dtype for tensor in weights(result).values()} == {torch.float32}
