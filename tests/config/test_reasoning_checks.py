"""Every rule between the keys of a reasoning run, broken alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_lite.algorithms import whitens
from rlinf_lite.config import ConfigError, ReasoningConfig, load_config
from rlinf_lite.config.names import coarsest_precision, recomputed_logprobs

BASE = str(Path(__file__).parent / "yaml" / "reasoning.yaml")
BROKEN = {
    "actor.global_batch_size: a step has 32 prompts x 8 responses = 256 samples, which are no whole number of "
    "batches of 100 (256 / 100 = 2.56). Use 64": ["actor.global_batch_size=100"],
    "actor.max_tokens_per_micro_batch: 10 tokens do not hold one sequence of 24 + 48 = 72": [
        "actor.max_tokens_per_micro_batch=10"
    ],
    "rollout.max_response_length: 24 + 5000 = 5024 tokens (with data.max_prompt_length), and the model has 512 "
    "positions. Use 488 or less": ["rollout.max_response_length=5000"],
    "algorithm.group_size: grpo compares the responses to a prompt, and there is 1. Use 2": [
        "algorithm.group_size=1",
        "actor.global_batch_size=32",
    ],
    "algorithm.critic_warmup_steps: grpo has no critic": ["algorithm.critic_warmup_steps=1"],
    "algorithm.clip_ratio_c: is 1, and the dual clip must be above 1": ["algorithm.clip_ratio_c=1"],
    "algorithm.kl.controller: adaptive steers the weight of the KL in the reward": ["algorithm.kl.controller=adaptive"],
    "algorithm.kl.horizon: is 50, and one step of 256 responses could take the weight of the KL to 0 or below. Use "
    "more than 51.2, 2560 for example": ["algorithm.kl={place: reward, controller: adaptive, horizon: 50}"],
    "algorithm.kl.kind: k1 in the loss holds nothing back: its gradient, that of log p(token), is 0 on average over "
    "tokens drawn from p. Use k2": ["algorithm.kl={place: loss, kind: k1}"],
    "algorithm.kl.coef: is 5.0, and algorithm.kl.place: none counts no KL. Set that to loss or reward, or this to "
    "0.001": ["algorithm.kl.coef=5"],
    "algorithm.kl.kind: is k2, and algorithm.kl.place: none counts no KL": ["algorithm.kl.kind=k2"],
    "algorithm.correction.low: is 0.5, and kind: tis has no low. Set it to null, or the kind to icepop or reject": [
        "algorithm.correction={kind: tis, low: 0.5}"
    ],
    "algorithm.correction.high: is 2.0, and kind: none has no high. Set it to null, or the kind to decoupled or tis": [
        "algorithm.correction.high=2"
    ],
    "algorithm.correction.level: is sequence, and kind: icepop has no level. Set it to token, or the kind to tis": [
        "algorithm.correction={kind: icepop, level: sequence}"
    ],
    "algorithm.correction.metric: is k3, and kind: decoupled has no metric. Set it to ratio": [
        "algorithm.correction={kind: decoupled, metric: k3}"
    ],
    "algorithm.correction.proximal: is interpolate, and kind: none has no proximal. Set it to recompute": [
        "algorithm.correction.proximal=interpolate"
    ],
    "algorithm.clip_ratio_c: is 3, and gspo does not read it. Set it to null, or algorithm.loss_type to opd or ppo": [
        "algorithm.loss_type=gspo",
        "algorithm.clip_ratio_c=3",
    ],
    "algorithm.behaviour_kl_coef: is 0.1, and ppo does not read it. Set it to 0.001, or algorithm.loss_type to "
    "dppo_tv": ["algorithm.behaviour_kl_coef=0.1"],
    "algorithm.max_refills: is 9, and with algorithm.filter_groups: false no group is dropped that others could "
    "replace. Set that to true, or this to 3": ["algorithm.max_refills=9"],
    "rollout.top_p: is 0.9, and algorithm.correction.kind: tis weighs tokens by the probability that they were drawn "
    "with": ["rollout.top_p=0.9", "algorithm.correction.kind=tis"],
    "rollout.top_k: is 5, and algorithm.loss_type: dppo_tv weighs tokens by the probability": [
        "rollout.top_k=5",
        "algorithm.loss_type=dppo_tv",
    ],
    "algorithm.correction.high: is 0.4, not above low (0.5), so that nothing is in bounds": [
        "algorithm.correction={kind: icepop, high: 0.4}"
    ],
    "algorithm.correction.high: is 0.9, which shuts out what has not changed: where both policies agree, ratio is 1. "
    "Use 1 or more": ["algorithm.correction={kind: tis, high: 0.9}"],
    "algorithm.correction.low: is 0.1, which shuts out what has not changed: where both policies agree, k1 is 0. Use 0 "
    "or less": ["algorithm.correction={kind: reject, metric: k1, low: 0.1}"],
    "algorithm.correction.high: is null, as is low, and k3 has no usual bound. Set it, for example to 0.3": [
        "algorithm.correction={kind: reject, metric: k3}"
    ],
    "algorithm.correction.kind: is tis, and dppo_tv forms its ratios against the policy that acted already": [
        "algorithm.correction.kind=tis",
        "algorithm.loss_type=dppo_tv",
    ],
    "algorithm.overlong.buffer_length: 48 tokens are not fewer than rollout.max_response_length: 48": [
        "algorithm.overlong.buffer_length=48"
    ],
    "cluster.fuse: there is no role 'learner'": ["cluster.fuse='actor,learner'"],
    "cluster.fuse: actor,actor names a role twice": ["cluster.fuse='actor,actor'"],
    "cluster.fuse: names actor alone, which shares nothing. Name two roles or more": ["cluster.fuse=actor"],
    "cluster.fuse: actor and reward share processes, and cluster.component_placement puts them in different places": [
        "cluster.fuse='actor,reward'"
    ],
    "model.attn_implementation: actor and rollout share a process": ["model.attn_implementation=eager"],
    "actor.strategy: nothing is registered as 'fspd'. Did you mean fsdp?": ["actor.strategy=fspd"],
    "algorithm.adv_type: nothing is registered as 'grppo'. Did you mean grpo?": ["algorithm.adv_type=grppo"],
    "cluster.fuse: has rollout and actor share processes, and with runner.mode: async": [
        "runner.mode=async",
        "algorithm.correction.kind=tis",
    ],
    "reward.fn: 'length' is no import path": ["reward.fn=length"],
    "rollout.model_dir: no directory 'nowhere'": ["rollout.model_dir=nowhere"],
    "data.train_files: no file 'rows.jsonl'": ["data.train_files=[rows.jsonl]", "runner.val_check_interval=-1"],
    "runner.resume: no directory 'nowhere'": ["runner.resume=nowhere"],
    "rollout.tempreature: there is no such key. Did you mean rollout.temperature?": ["+rollout.tempreature=1"],
    "env: there is no such key": ["+env.id=tabletop"],
    "actor.micro_batch_size: there is no such key. In runs of this runner.task_type it is actor.max_tokens_per_micro_"
    "batch": ["actor.micro_batch_size=4"],
    "cluster.fuse: a run has one value of it, here are several (actor,rollout). `rlinf-lite sweep` runs each. A text "
    'is "cluster.fuse=': ["cluster.fuse=actor,rollout"],
    "data.train_files: a run has one value of it, here are several (a,b). `rlinf-lite sweep` runs each. A list is "
    "'data.train_files=[a,b]'": [
        "data.train_files=a,b",
        "runner.val_check_interval=-1",
    ],
    "cluster.component_placement: no component is called 'env'": ["+cluster.component_placement.env=0"],
}


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, overrides)
    return caught.value.problems


@pytest.mark.parametrize(("said", "overrides"), BROKEN.items(), ids=lambda x: x[:50] if isinstance(x, str) else "")
def test_one_broken_rule_is_one_problem(said: str, overrides: list[str]) -> None:
    found = problems(*overrides)
    assert len(found) == 1 and found[0].startswith(said), found


def test_names_on_the_hub_get_the_command_that_downloads_them() -> None:
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "hf://Qwen/Qwen2.5-0.5B-Instruct"):
        for key in ("rollout.model_dir", "reward.model"):
            (found,) = problems(f"{key}={name}")
            assert found.startswith(f"{key}: no directory '{name}'") and "null" not in found
            assert "Models are not downloaded. First `hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir" in found
    for name in ("docs/nowhere", "./Qwen/nowhere", "/tmp/nowhere"):  # a path that is not quite right
        assert problems(f"rollout.model_dir={name}")[0].endswith("Correct it, or set it to null: random weights")


def test_a_text_with_commas_is_taken_as_it_is_recommended() -> None:
    assert load_config(BASE, ["cluster.fuse='actor,rollout'"]).cluster.fuse == "actor,rollout"


def test_all_problems_come_at_once() -> None:
    found = problems("actor.global_batch_size=100", "reward.fn=length", "+rolout.x=1", "actor.optim.lr=fast")
    where = [text.partition(":")[0] for text in found]
    assert sorted(where) == ["actor.global_batch_size", "actor.optim.lr", "reward.fn", "rolout"]


def test_a_role_that_the_algorithm_needs_must_be_placed() -> None:
    placement = "cluster.component_placement={actor: 0, rollout: 0, reward: 0}"
    alone = ["~cluster.component_placement", placement, "cluster.fuse=null"]
    assert isinstance(load_config(BASE, alone), ReasoningConfig)
    found = problems(*alone, "algorithm.adv_type=gae", "algorithm.kl.place=loss")
    assert found == [
        f"cluster.component_placement: {role} is not placed. Add a line such as '{role}: all'"
        for role in ("reference", "critic")
    ]


def test_files_to_train_on_without_some_to_evaluate_on(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    found = problems(f"data.train_files=[{tmp_path / 'rows.jsonl'}]")
    assert found == ["data.val_files: is empty, and runner.val_check_interval is not. Name some, or set that to -1"]


def test_more_ranks_and_stages_than_rows_are_no_problem() -> None:
    config = load_config(BASE, ["data.num_prompts=1", "actor.global_batch_size=1", "sft.batch_size=1"])
    assert isinstance(config, ReasoningConfig)


def test_k1_is_for_rewards() -> None:
    assert load_config(BASE, ["algorithm.kl={place: reward, kind: k1}"]).algorithm.kl.kind == "k1"


def test_tokens_are_not_discounted_and_whitened_where_a_critic_is_the_baseline() -> None:
    for adv_type, whitened in (("gae", True), ("grpo", False), ("rloo", False), ("remax", False), ("opo", False)):
        algorithm = load_config("math/math_arithmetic_grpo", [f"algorithm.adv_type={adv_type}"]).algorithm
        assert (algorithm.gamma, algorithm.gae_lambda) == (1.0, 1.0)
        assert whitens(algorithm) == whitened
        assert whitens(algorithm.model_copy(update={"normalize_advantages": not whitened})) != whitened
    ppo = load_config("math/math_arithmetic_ppo").algorithm
    assert whitens(ppo) and (ppo.gamma, ppo.gae_lambda) == (1.0, 1.0)


@pytest.mark.parametrize(("trains", "acts", "coarsest"), [("fp32", "null", "fp32"), ("fp32", "bf16", "bf16")])
def test_drift_is_held_against_what_the_coarser_side_computes_in(trains: str, acts: str, coarsest: str) -> None:
    overrides = [f"actor.precision={trains}", f"rollout.dtype={acts}", "cluster.fuse=null"]
    config = load_config("math/math_arithmetic_grpo", overrides)
    assert coarsest_precision(config) == coarsest


def test_why_log_probabilities_are_computed_again_is_said_of_what_there_is() -> None:
    stale = ["algorithm.loss_type=dppo_tv", "runner.mode=async", "cluster.fuse=null"]
    again, why = recomputed_logprobs(load_config(BASE, stale))
    assert again and why.startswith("older weights act") and "correction" not in why
    again, why = recomputed_logprobs(
        load_config(BASE, [*stale, "algorithm.loss_type=ppo", "algorithm.correction.kind=tis"])
    )
    assert again and why == "algorithm.correction compares them with those of acting"
