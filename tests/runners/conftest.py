"""Short runs on the shared cluster."""

import json
from pathlib import Path

import pytest

from rlinf_lite.config import load_config
from rlinf_lite.data.problems import open_problems
from rlinf_lite.runners import AsyncReasoningRunner, EmbodiedRunner, ReasoningRunner
from rlinf_lite.scheduler import HybridComponentPlacement
from rlinf_lite.workers import (
    EmbodiedFSDPActor,
    EnvWorker,
    MultiStepRolloutWorker,
    OffPolicyActor,
    ReplayRolloutWorker,
)
from rlinf_lite.workers.reasoning import launch_roles

WORKERS = {"actor": EmbodiedFSDPActor, "rollout": MultiStepRolloutWorker, "env": EnvWorker}
OFF_POLICY_WORKERS = {"actor": OffPolicyActor, "rollout": ReplayRolloutWorker, "env": EnvWorker}

SMALL_PENDULUM = [
    "env.train.num_envs=8",
    "env.train.max_episode_steps=10",
    "env.eval.num_envs=4",
    "env.eval.num_episodes=6",
    "env.eval.max_episode_steps=10",
    "rollout.num_chunks=8",
    "rollout.pipeline_stage_num=1",
    "algorithm.update_epochs=2",
    "actor.global_batch_size=16",
    "actor.micro_batch_size=16",
    "actor.optim.lr_scheduler=constant",  # else the learning rate depends on max_steps
    "runner.max_steps=3",
    "runner.val_check_interval=-1",
    "runner.save_interval=-1",
    "runner.phase_timeout_s=60",
    "cluster.num_gpus_per_node=2",
    "cluster.component_placement={actor: '0', rollout: '0', env: '0'}",
]

SMALL_SAC = [
    *(x for x in SMALL_PENDULUM if not x.startswith(("algorithm.", "rollout.pipeline", "actor.micro"))),
    "env.train.num_envs=4",
    "off_policy={updates_per_step: 3, random_steps: 1, hidden_sizes: [16]}",
    "replay={min_size: 16, capacity: 64}",  # of two steps
    "actor.micro_batch_size=16",
]


@pytest.fixture
def start(cluster, tmp_path):
    """`start(*overrides, config=...)` launches three groups and returns an initialised runner; the groups end with the
    test."""
    launched = []

    def start(
        *overrides,
        config="gym_pendulum_ppo_mlp",
        workers=WORKERS,
        small=SMALL_PENDULUM,
        root=tmp_path,
        runner_class=EmbodiedRunner,
    ):
        paths = [f"runner.logger.log_path={root}"]
        cfg = load_config(f"embodiment/{config}", [*small, *paths, *overrides])
        placement = HybridComponentPlacement(cfg)
        groups = cluster.launch(placement, **{name: worker.create_group(cfg) for name, worker in workers.items()})
        launched.extend(groups.values())
        runner = runner_class(cfg=cfg, **groups)
        runner.init_workers()
        return runner

    def stop():
        while launched:
            launched.pop().shutdown()

    start.stop = stop
    yield start
    stop()


def starting(start, **defaults):
    """`start`, with other defaults."""

    def start_so(*overrides, **arguments):
        return start(*overrides, **{**defaults, **arguments})

    start_so.stop = start.stop
    return start_so


def placed(policies="'0'", rollout=None, fuse="null", num_slots=1):
    """The slots of actor, critic and reference, and those of the rollout workers if they differ."""
    lines = {role: policies for role in ("actor", "reference", "critic")}
    lines |= {"rollout": rollout or policies, "reward": rollout or policies}
    placement = ", ".join(f"{role}: {spec}" for role, spec in lines.items())
    return f"cluster={{num_gpus_per_node: {num_slots}, component_placement: {{{placement}}}, fuse: {fuse}}}"


FUSED = "'actor,rollout,reference,critic'"
APART = placed(rollout="'1'", num_slots=2)
SMALL_MATH = [
    "runner.max_steps=2",
    "runner.val_check_interval=-1",
    "runner.save_interval=-1",
    "runner.phase_timeout_s=300",
    "runner.report=false",
    "data.num_prompts=4",
    "data.max_prompt_length=12",
    "data.arithmetic={num_train: 40, num_val: 6, num_terms: 2}",
    "rollout.max_response_length=16",
    "algorithm.group_size=4",
    "algorithm.filter_groups=false",
    "actor.global_batch_size=8",
    "actor.max_tokens_per_micro_batch=64",
    "actor.optim.lr=1e-3",
    "sft.num_steps=0",
    "sft.batch_size=4",
    "reward.fn=tests.runners.rewards:arbitrary",
    placed(fuse=FUSED),
]


@pytest.fixture
def start_reasoning(cluster, tmp_path):
    """`start(*overrides)` returns an initialised runner of a language model; its groups end with the test."""
    launched = []

    def start(*overrides, root=tmp_path, config="math_arithmetic_grpo"):
        paths = [f"runner.logger.log_path={root}"]
        cfg = load_config(f"math/{config}", [*SMALL_MATH, *paths, *overrides])
        roles = launch_roles(cfg, cluster, HybridComponentPlacement(cfg))
        launched.extend(roles.values())
        runner_class = AsyncReasoningRunner if cfg.runner.mode == "async" else ReasoningRunner
        runner = runner_class(cfg, open_problems(cfg), **roles)
        runner.init_workers()
        return runner

    def stop():
        for group in launched:
            group.shutdown()
        launched.clear()

    start.stop = stop
    yield start
    stop()


def write_reward_model(directory: Path, repo: Path) -> Path:
    """A Llama of one layer whose score grows with the share of sevens in a text, built by hand."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(str(repo / "assets" / "char_tokenizer"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, 0] = 1
        model.model.embed_tokens.weight[tokenizer("7", add_special_tokens=False)["input_ids"][-1], 1] = 1
        attention = model.model.layers[0].self_attn  # of all tokens alike: queries and keys are 0
        attention.v_proj.weight[1, 1] = attention.o_proj.weight[2, 1] = 1
        model.score.weight[0, 2] = 1
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
