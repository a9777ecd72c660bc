"""What must hold between keys, and the arithmetic that the messages show."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf_lite import registry
from rlinf_lite.algorithms import needs_values, register_advantage, register_policy_loss
from rlinf_lite.config import ConfigError, ReasoningConfig, load_config, resources
from rlinf_lite.config.names import fused_roles, roles_of
from rlinf_lite.preview.dry_run import describe
from rlinf_lite.registry import REGISTRIES, suite_overrides
from rlinf_lite.training.minibatches import minibatches

YAML = Path(__file__).parent / "yaml"
PPO = str(YAML / "ppo.yaml")  # 32 envs, 2 env workers, 2 stages, T = 64, batches of 512
GRPO = str(YAML / "grpo.yaml")  # groups of 8, episodes of 50
REASONING = str(YAML / "reasoning.yaml")
HYBRID = str(YAML / "hybrid.yaml")  # 4 env workers, 4 rollout workers, 8 actors

INTERPOLATED = ["algorithm.correction.kind=decoupled", "algorithm.correction.proximal=interpolate"]
OLD = ["runner.mode=async", "runner.max_staleness=2"]
ACTION_LEVEL = ["model.value_type=action_level", "algorithm.reward_type=action_level"]
TOY = ["env.id=tests.envs.toy:make_env", "env.train.max_episode_steps=8", "env.eval.max_episode_steps=8"]


VLA = ["model.id=openvla", "env.id=tabletop", "env.task=pick"]


def problems_of(name: str, *overrides: str) -> list[str]:
    try:
        load_config(name, overrides)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        (
            PPO,
            ["env.train.num_envs=30", "actor.global_batch_size=480", "actor.micro_batch_size=480"],
            "env.train.num_envs: 30 environments do not divide over 2 env workers x 2 stages = 4 slices "
            "(30 / 4 = 7.5). Use 28 or 32, or change rollout.pipeline_stage_num or the env placement",
        ),
        (
            PPO,
            ["runner.mode=async"],
            "algorithm.correction.kind: is none, and with runner.mode: async a step trains on what weights up to 1 "
            "versions older did, which biases the gradient. Choose one (docs/async.md), decoupled for example, or "
            "runner.max_staleness=0",
        ),
        (
            PPO,
            ["algorithm.recompute_logprobs=false", "algorithm.correction.kind=tis"],
            "algorithm.recompute_logprobs: is false, and algorithm.correction.kind: tis compares the actor with who "
            "acted. Set it to auto",
        ),
        (
            PPO,
            [*OLD, "algorithm.recompute_logprobs=false", "algorithm.correction.kind=tis"],
            "algorithm.recompute_logprobs: is false, and algorithm.correction.kind: tis compares the actor with who "
            "acted. Set it to auto, or algorithm.correction.proximal to interpolate",
        ),
        (
            PPO,
            INTERPOLATED,
            "algorithm.correction.proximal: is interpolate, and with runner.mode: sync no version lies between the one "
            "that acted and the one that trains: p would be b, all weights 1, and decoupled would change nothing. Set "
            "it to recompute",
        ),
        (
            PPO,
            [*INTERPOLATED, "runner.mode=async"],
            "algorithm.correction.proximal: is interpolate, and with runner.max_staleness: 1 no version lies between "
            "the one that acted and the one that trains: p would be b, all weights 1, and decoupled would change "
            "nothing. Set it to recompute",
        ),
        (
            PPO,
            ["algorithm.loss_type=cispo", "algorithm.clip_ratio_low=1", "algorithm.clip_ratio_c=3"],
            "algorithm.clip_ratio_c: is 3, and cispo does not read it. Set it to null, or algorithm.loss_type to opd "
            "or ppo",
        ),
        (
            PPO,
            ["algorithm.clip_ratio_low=1"],
            "algorithm.clip_ratio_low: is 1, so that ppo never clips below: nothing falls so far. Use less than 1, or "
            "cispo",
        ),
        (
            PPO,
            [*OLD, "algorithm.correction.kind=tis", "async.max_staleness=3"],
            "async: there is no such key. max_staleness belongs in runner.max_staleness",
        ),
        (
            PPO,
            [*OLD, *INTERPOLATED, "algorithm.target_kl=0.1"],
            "algorithm.target_kl: is 0.1, and with algorithm.correction.proximal: interpolate the KL of an update "
            "counts what changed before the step too. Set it to null, or proximal to recompute",
        ),
        (
            "embodiment/tabletop_sft_mlp",
            ["runner.mode=async"],
            "runner.mode: is async, and imitation has no rollouts to overlap with. Set it to sync",
        ),
        (
            PPO,
            ["env.train.num_envs=6", "actor.global_batch_size=384"],
            "env.train.num_envs: 6 environments do not divide over 2 env workers x 2 stages = 4 slices (6 / 4 = 1.5). "
            "Use 4 or 8, or change rollout.pipeline_stage_num or the env placement",
        ),
        (
            GRPO,
            ["algorithm.critic_warmup_steps=2"],
            "algorithm.critic_warmup_steps: grpo has no critic to warm up. Set it to 0",
        ),
        (
            GRPO,
            ["algorithm.adv_type=rloo", "algorithm.group_size=1"],
            "algorithm.group_size: rloo compares the episodes of a group, and a group has 1. Use 2 or more",
        ),
        (
            GRPO,
            ["algorithm.adv_type=remax"],
            "algorithm.adv_type: remax compares with a greedy answer to the same prompt, which simulators do not "
            "play. Use rloo, or grpo",
        ),
        (
            GRPO,
            ["algorithm.group_size=12"],
            "algorithm.group_size: 32 environments are no whole number of groups of 12 (32 / 12 = 2.667). "
            "Use 24 or 36 for env.train.num_envs, or another group_size",
        ),
        (
            PPO,
            ["cluster.component_placement.rollout=0:0-31"],
            "env.train.num_envs: 32 environments / 2 stages = 16 rows at a time are fewer than the 32 rollout workers. "
            "Use 64 or more, or fewer rollout workers",
        ),
        (
            PPO,
            ["actor.global_batch_size=500"],
            "actor.global_batch_size: a step collects 32 environments x 64 decisions = 2048 samples, which are no "
            "whole number of batches of 500 (2048 / 500 = 4.096). Use 256, or change env.train.num_envs or "
            "rollout.num_chunks",
        ),
        (
            PPO,
            ["cluster.component_placement.actor=0:0-1", "actor.global_batch_size=1"],
            "actor.global_batch_size: 1 samples do not divide over 2 actor ranks (1 / 2 = 0.5). Use 2",
        ),
        (
            PPO,
            ["actor.micro_batch_size=7"],
            "actor.micro_batch_size: a rank's share of a batch is 512 / 1 = 512 samples, which are no whole number of "
            "passes of 7 (512 / 7 = 73.14). Use 4, or 512 for one pass",
        ),
        (
            HYBRID,
            ["actor.micro_batch_size=48"],
            "actor.micro_batch_size: a rank's share of a batch is 512 / 8 = 64 samples, which are no whole number of "
            "passes of 48 (64 / 48 = 1.333). Use 32, or 64 for one pass",
        ),
        (
            PPO,
            ["model.num_action_chunks=51"],
            "model.num_action_chunks: a chunk of 51 actions is longer than an episode of 50 env steps. Use 50 or less",
        ),
        (
            GRPO,
            ["rollout.num_chunks=10", "model.num_action_chunks=4", "actor.global_batch_size=320"],
            "rollout.num_chunks: 10 chunks of 4 = 40 env steps do not cover an episode of 50, and grpo scores whole "
            "episodes. Use 13, or null",
        ),
        (
            PPO,
            ["env.train.auto_reset=false", "rollout.num_chunks=16"],
            "rollout.num_chunks: 16 chunks of 1 = 16 env steps do not cover an episode of 50, and without "
            "env.train.auto_reset a step has to play whole episodes. Use 50, or null",
        ),
        (
            GRPO,
            ["env.train.auto_reset=true"],
            "env.train.auto_reset: grpo scores one whole episode per environment and step. Set it to false",
        ),
        (
            GRPO,
            ["algorithm.group_size=1"],
            "algorithm.group_size: grpo compares the episodes of a group, and a group has 1. Use 2 or more",
        ),
        (
            PPO,
            ["algorithm.loss_type=dppo_tv"],
            "algorithm.loss_type: dppo_tv compares probabilities of actions, and mlp_gaussian does not say that it has "
            "any (`probabilities` of its card): densities of continuous actions may be above 1. Use ppo, for data of "
            "other policies with algorithm.correction",
        ),
        (
            PPO,
            ["algorithm.correction={kind: decoupled, low: 0.5}"],
            "algorithm.correction.low: is 0.5, and kind: decoupled has no low. Set it to null, or the kind to icepop "
            "or reject",
        ),
        (
            PPO,
            ["algorithm.filter_groups=true"],
            "algorithm.filter_groups: gae has no groups to drop. Set it to false",
        ),
        (
            PPO,
            ["model.value_type=action_level"],
            "model.value_type: action_level does not match algorithm.reward_type: chunk_level, and gae subtracts one "
            "from the other. Set it to chunk_level",
        ),
        (
            PPO,
            [
                "algorithm.reward_type=action_level",
                "model.value_type=action_level",
                "algorithm.entropy_type=token_level",
            ],
            "algorithm.logprob_type: chunk_level is coarser than algorithm.reward_type: action_level, so that one "
            "number would meet several advantages. Set it to action_level or finer",
        ),
        (
            PPO,
            ["algorithm.clip_ratio_c=1.0"],
            "algorithm.clip_ratio_c: is 1, and the dual clip must be above 1. Use 3, or null to turn it off",
        ),
        (
            PPO,
            ["env.eval.auto_reset=true"],
            "env.eval.auto_reset: an evaluation plays each of its seeded episodes once. Set it to false",
        ),
        (
            PPO,
            ["rollout.num_chunks=null", "env.task=SomeTask-v1"],
            "rollout.num_chunks: null means one whole episode, and how long SomeTask-v1 lasts is not known before its "
            "simulator starts. Set it, or env.train.max_episode_steps",
        ),
        (
            PPO,
            ["env.options.obs_mode=rgb"],
            "env.options.obs_mode: rgb has no state, which is what mlp_gaussian reads. Use state",
        ),
        (
            PPO,
            ["env.id=tabletop", "env.task=pick", "env.options.num_blocks=[3,1]", "env.options.obs_mode=state"],
            "env.options.num_blocks: fewest 3 is more than most 1. Use [1, 3]",
        ),
        (
            PPO,
            ["env.id=tabletop", "env.task=pick"],
            "env.options.obs_mode: rgb has no blocks in its state, which is what mlp_gaussian reads. Use state",
        ),
        (
            PPO,
            ["env.id=tabletop", "env.task=picks", "env.options.obs_mode=state", "rollout.num_chunks=16"],
            "env.task: tabletop has no task 'picks'. Did you mean pick?",
        ),
        (
            PPO,
            ["env.options.sim_backend=physx_cuda", "cluster.accelerator=cpu"],
            "env.options.sim_backend: physx_cuda simulates on GPUs, and accelerator=cpu here. Use auto or physx_cpu",
        ),
        (
            PPO,
            [
                "cluster.fuse='actor,env'",
                "cluster.num_gpus_per_node=2",
                "cluster.component_placement={actor: 0, rollout: 0, env: 0-1}",
            ],
            "cluster.fuse: there is no role 'env' that could share. Known: actor, rollout.",
        ),
        (
            PPO,
            ["runner.seed=10000"],
            "env.eval.seed: is 10000, like runner.seed, so that evaluations would play episodes of training. Use "
            "another number for one of them",
        ),
        (
            "embodiment/tabletop_sft_mlp",
            ["data.seed=5", "env.eval.seed=5", "runner.seed=5"],
            "env.eval.seed: is 5, like data.seed, so that evaluations would play the episodes that were demonstrated. "
            "Use another number for one of them",
        ),
    ],
)
def test_rules(name: str, overrides: list[str], expected: str) -> None:
    assert problems_of(name, *overrides) == [expected]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        (PPO, ["actor.micro_batch_size=4096"]),  # the largest pass, not the size of every pass
        (PPO, ["model.num_action_chunks=3", "rollout.num_chunks=17", "actor.global_batch_size=136"]),
        (PPO, [*ACTION_LEVEL, "algorithm.logprob_type=token_level", "algorithm.entropy_type=action_level"]),
        (GRPO, ["model.value_type=action_level"]),  # grpo has no values
        (GRPO, ["algorithm.adv_type=reinforce_plus_plus", "algorithm.group_size=1"]),
        (GRPO, ["algorithm.adv_type=opo", "algorithm.loss_type=cispo"]),
        (PPO, ["cluster.component_placement.rollout=0:0-2"]),  # uneven rows are routed
        (PPO, [*TOY, "model.id=examples.embodiment.custom_policy:SquashedGaussianPolicy"]),
    ],
)  # fmt: skip
def test_rules_that_hold(name: str, overrides: list[str]) -> None:
    assert problems_of(name, *overrides) == []


def test_trajectories_divide_over_actors() -> None:
    problems = problems_of(PPO, "cluster.component_placement.actor=0:0-2")
    assert problems == [
        "env.train.num_envs: 32 trajectories do not divide over 3 actor ranks (32 / 3 = 10.67). Use 30 or 33, or "
        "change the actor placement",
        "actor.global_batch_size: 512 samples do not divide over 3 actor ranks (512 / 3 = 170.7). Use 510 or 513",
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["cluster.accelerator=cpu", "cluster.component_placement.rollout=4-7"],
            "cluster.component_placement.rollout: 4-7 needs slots 4..7, this cluster has 0..0 (1 node x 1, "
            "accelerator=cpu). Set cluster.num_gpus_per_node: 8 to run eight virtual slots on CPU.",
        ),
        (
            ["cluster.component_placement={actor: 0, rollout: 0}"],
            "cluster.component_placement: env is not placed. Add a line such as 'env: all'",
        ),
        (
            ["cluster.component_placement.critic=0"],
            "cluster.component_placement: no component is called 'critic'. Known: actor, env, rollout.",
        ),
        (
            ["cluster.component_placement.rollot=0"],
            "cluster.component_placement: no component is called 'rollot'. Did you mean rollout?",
        ),
    ],
)
def test_placement(overrides: list[str], expected: str) -> None:
    assert problems_of(PPO, *overrides) == [expected]


def test_a_component_placed_twice(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    text = "defaults: [embodiment/maniskill_pushcube_ppo_mlp, _self_]\n"
    text += "cluster:\n  component_placement:\n    actor,env: all\n"
    path.write_text(text)
    problems = problems_of(str(path))
    assert any("env is placed twice, by 'env' and 'actor,env'" in problem for problem in problems)


def test_a_bad_line_does_not_hide_what_is_wrong_with_another_component() -> None:
    problems = problems_of(PPO, "cluster.component_placement.rollout=x", "env.train.num_envs=30")
    assert any(problem.startswith("cluster.component_placement.rollout: x") for problem in problems)
    assert any(problem.startswith("env.train.num_envs: 30 environments do not divide over 2") for problem in problems)


def test_base_60_numbers_are_explained(tmp_path: Path) -> None:
    """YAML 1.1 reads an unquoted 1:2 as the number 62."""
    path = tmp_path / "base60.yaml"
    path.write_text(
        "defaults: [embodiment/maniskill_pushcube_ppo_mlp, _self_]\ncluster:\n  component_placement:\n    env: 1:2\n"
    )
    for slots in (4, 64):  # in range or not
        [problem] = problems_of(str(path), f"cluster.num_gpus_per_node={slots}")
        said = "is 62, as which YAML reads an unquoted 1:2 too. Write '1:2' or '62', in quotes"
        assert problem == f"cluster.component_placement.env: {said}"


@pytest.mark.parametrize("name", [PPO, "math/math_arithmetic_grpo"])
@pytest.mark.parametrize("more", [[], ["cluster.component_placement=auto"]])
def test_gpus_that_are_not_there_are_a_problem_of_the_config(
    name: str, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlinf_lite.scheduler.placement.detect_num_gpus", lambda: 0)
    [problem] = problems_of(name, "cluster.accelerator=cuda", "cluster.num_gpus_per_node=null", *more)
    assert problem.startswith("cluster.accelerator: cuda, but this machine has no GPU. Set cluster.num_gpus_per_node")


def test_a_language_model_has_no_parameters_of_values_alone() -> None:
    [problem] = problems_of("math/math_arithmetic_grpo", "actor.optim.value_lr=1e-3")
    assert problem.startswith("actor.optim.value_lr: is of parameters that only values use, and a language model has")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.adv_type=gea", "algorithm.adv_type: nothing is registered as 'gea'. Did you mean gae?"),
        ("algorithm.loss_type=poo", "algorithm.loss_type: nothing is registered as 'poo'. Did you mean ppo?"),
        ("env.id=gymnasum", "env.id: nothing is registered as 'gymnasum'. Did you mean gymnasium?"),
        ("model.id=mlp_gausian", "model.id: nothing is registered as 'mlp_gausian'. Did you mean mlp_gaussian?"),
        ("actor.strategy=fspd", "actor.strategy: nothing is registered as 'fspd'. Did you mean fsdp?"),
    ],
)
def test_unknown_names_get_the_nearest(override: str, expected: str) -> None:
    [problem] = problems_of(PPO, override)
    assert problem.startswith(expected)


def test_names_registered_in_this_process_are_known() -> None:
    register_advantage("test_checks_estimator")(lambda inputs, cfg: None)  # type: ignore[return-value]
    assert problems_of(PPO, "algorithm.adv_type=test_checks_estimator") == []


def test_checks_ask_a_loss_what_it_needs_and_a_policy_what_it_has() -> None:
    for name, needs in (("anything", {}), ("probabilities", {"probabilities": True}), ("acted", {"behaviour": True})):
        register_policy_loss(f"test_checks_{name}", **needs)(lambda inputs, cfg: None)  # type: ignore[return-value]
    corrected = "algorithm.correction.kind=icepop"
    assert problems_of(PPO, "algorithm.loss_type=test_checks_anything", corrected) == []
    [problem] = problems_of(PPO, "algorithm.loss_type=test_checks_probabilities")
    assert problem.startswith("algorithm.loss_type: test_checks_probabilities compares probabilities")
    [problem] = problems_of(PPO, "algorithm.loss_type=test_checks_acted", corrected)
    assert problem.startswith("algorithm.correction.kind: is icepop, and test_checks_acted forms its ratios")
    tokens = ("tabletop_ppo_vla", "algorithm.loss_type=dppo_tv")
    assert problems_of(*tokens) == [] == problems_of(*tokens, *OLD)
    [problem] = problems_of(*tokens, "algorithm.logprob_type=chunk_level")
    assert problem.startswith("algorithm.logprob_type: is chunk_level, and dppo_tv compares probabilities")
    [problem] = problems_of(*tokens, *OLD, "algorithm.target_kl=0.1")
    assert problem.startswith("algorithm.target_kl: is 0.1, and with dppo_tv in an asynchronous run the KL of an")
    assert registry.loss_needs("dppo_tv") == registry.loss_needs("rlinf_lite.algorithms.losses:dppo_tv")


def test_checks_launching_and_dry_run_ask_an_estimator_alike_what_it_needs() -> None:
    register_advantage("test_checks_critic", needs_values=True)(lambda inputs, cfg: None)  # type: ignore[return-value]
    register_advantage("test_checks_groups", needs_groups=True, whole_episodes=True)(
        lambda inputs, cfg: None  # type: ignore[return-value]
    )
    warm = ["algorithm.adv_type=test_checks_critic", "algorithm.critic_warmup_steps=2"]
    assert problems_of(PPO, *warm) == [] and needs_values("test_checks_critic")
    [problem] = problems_of(PPO, "algorithm.adv_type=test_checks_critic", "model.value_type=action_level")
    assert "and test_checks_critic subtracts one from the other" in problem
    reasoning = load_config(REASONING, warm)
    assert isinstance(reasoning, ReasoningConfig) and "critic" in roles_of(reasoning)
    assert "critic" in fused_roles(load_config(REASONING, [*warm, "cluster.fuse='actor,rollout,critic'"]))
    assert "  critic " in describe(reasoning)
    found = problems_of(PPO, "algorithm.adv_type=test_checks_groups")
    assert [text.partition(":")[0] for text in found] == ["algorithm.group_size", "env.train.auto_reset"]


def test_the_built_in_names_stand_for_parts() -> None:
    for key, parts in REGISTRIES.items():
        for name in parts.names():
            assert parts.get(name) is not None, key


@pytest.mark.parametrize("key", ["runner.seed", "data.seed", "env.eval.seed"])
def test_seeds_are_what_every_generator_takes(key: str) -> None:
    for seed in (-1, 2**63):
        [problem] = problems_of(PPO, f"{key}={seed}")
        assert problem.startswith(f"{key}: "), problem
    cfg = load_config(PPO, [f"{key}={2**63 - 1}"])
    seed = cfg.runner.seed
    torch.manual_seed(seed)
    next(minibatches(np.ones(4, bool), 4, seed, 0, 0))


@pytest.mark.parametrize(
    ("missing", "overrides", "command"),
    [
        ("mani_skill", [], "pip install 'rlinf_lite[maniskill]'"),
        ("wandb", ["runner.logger.backends=[wandb]"], "pip install 'rlinf_lite[wandb]'"),
    ],
)
def test_a_missing_extra_gets_the_command(
    monkeypatch: pytest.MonkeyPatch, missing: str, overrides: list[str], command: str
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name == missing else name)
    [problem] = problems_of(PPO, *overrides)
    assert command in problem


def test_groups_of_shards_must_divide_the_ranks() -> None:
    four = ["cluster.num_gpus_per_node=4", "cluster.component_placement={env: '0-3', rollout: '0-3', actor: '0-3'}"]
    key = "actor.fsdp_size"
    assert not problems_of(PPO, *four, f"{key}=2")
    for size, more, text in (
        (3, [], "4 ranks of actor form no whole number of groups of 3"),
        (1, [], "1 divides nothing"),
        (2, ["actor.strategy=replicated"], "is 2, and actor.strategy: replicated does not read it"),
    ):
        [problem] = problems_of(PPO, *four, f"{key}={size}", *more)
        assert problem.startswith(f"{key}: {text}"), problem


def test_attention_kernels_say_what_they_need() -> None:
    key = "model.options.attn_implementation"
    for name, package in (("flash_attention_2", "flash-attn"), ("flash_attention_3", "flash-attn-3")):
        [precision, missing] = problems_of(PPO, *VLA, f"{key}={name}")
        assert precision.startswith(f"actor.precision: {name} cannot compute in fp32")
        assert (
            missing.startswith(f"{key}: {name} is not installed (no package {package}).") and "or use sdpa" in missing
        )
    [problem] = problems_of(PPO, *VLA, f"{key}=flex_attention")
    assert problem.startswith(f"{key}: flex_attention has no backward pass on CPUs")
    [problem] = problems_of(PPO, *VLA, f"{key}=flash_attention_5")
    assert problem.startswith(f"{key}: ") and "flash_attention_4" in problem


@pytest.mark.parametrize("key", ["rollout.model_dir", "actor.checkpoint_load_path", "runner.resume"])
def test_paths_must_exist(tmp_path: Path, key: str) -> None:
    [problem] = problems_of(PPO, f"{key}={tmp_path}/nope")
    assert problem.startswith(f"{key}: no directory '{tmp_path}/nope'")
    (tmp_path / "config.json").write_text("{}")
    assert problems_of(PPO, f"{key}={tmp_path}") == []


def test_a_policy_of_another_task_is_refused_before_anything_starts(repo: Path, tmp_path: Path) -> None:
    said = {"policy_id": "mlp_gaussian", "state_dim": 39, "action_low": [-1.0] * 4, "num_action_chunks": 1}
    (tmp_path / "config.json").write_text(json.dumps(said))
    start = f"rollout.model_dir={tmp_path}"
    assert problems_of("metaworld_ppo_mlp", start) == []
    suite = suite_overrides("metaworld-mt10", "metaworld")
    assert problems_of("metaworld_ppo_mlp", start, *suite) == [
        "rollout.model_dir: the policy's state has 39 numbers, and that of MT10 49: it is of another task, or of other "
        "env.options. Name one that was trained on these"
    ]
    reach = ["env.id=metaworld", "env.task=reach-v3", "env.options.obs_mode=rgb", "model.options.cameras=[corner2]"]
    problem, *_ = problems_of("tabletop_ppo_vla", f"actor.checkpoint_load_path={repo}/assets/tabletop_vla", *reach)
    assert problem.startswith("actor.checkpoint_load_path: the policy's action has 3 numbers, and that of reach-v3 4")
    statistics = {"reach": {"action": {"q01": [-1.0] * 4, "q99": [1.0] * 4}}}  # of a published one
    for num_actions, expected in ((4, 0), (5, 1)):
        statistics["reach"]["action"] = {"q01": [-1.0] * num_actions}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "openvla", "norm_stats": statistics}))
        assert len(problems_of("tabletop_ppo_vla", start, *reach)) == expected


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("tabletop_sft_mlp", ["env.options.obs_mode=state"]),
        ("tabletop_sft_vla", ["model.options.use_proprio=true"]),
        ("tabletop_sft_flow", []),
    ],
)
def test_a_policy_that_reads_states_is_not_to_learn_without(name: str, overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/info.json").write_text("{}")
    folder = ["data.source=folder", f"data.demos_dir={tmp_path}", *overrides]
    assert problems_of(name, *folder) == []
    [problem] = problems_of(name, *folder, "data.keys.state=null")
    assert problem.startswith("data.keys.state: is null, and the policy reads the state")


def test_a_dataset_is_for_imitation(tmp_path: Path) -> None:
    said = "runner.task_type: embodied reads no dataset. Set that to sft, or leave this out"
    assert problems_of(PPO, "data.source=folder", f"data.demos_dir={tmp_path}") == [
        f"data.source: is folder, and {said}",
        f"data.demos_dir: is {tmp_path}, and {said}",
    ]


def test_a_run_stands_for_the_policy_of_its_last_checkpoint(tmp_path: Path) -> None:
    for name in ("step_000001", "last"):
        policy = tmp_path / "run" / "checkpoints" / name / "policy"
        policy.mkdir(parents=True)
        (policy / "config.json").write_text("{}")
    last = tmp_path / "run" / "checkpoints" / "last"
    assert {resources.policy_directory(path) for path in (tmp_path / "run", last.parent, last, last / "policy")} == {
        last / "policy"
    }
    found = problems_of(PPO, f"actor.checkpoint_load_path={tmp_path}")
    assert found[0].startswith(f"actor.checkpoint_load_path: '{tmp_path}' is no policy, nor a checkpoint or run")
