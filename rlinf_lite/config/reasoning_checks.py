"""What must hold between the keys of a reasoning run, and outside its config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_lite.config.names import IMPORT_PATH, ROLES, did_you_mean, known_names
from rlinf_lite.config.placing import PLACEMENT, placements, touches
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import (
    missing_directory,
    package_problems,
    policy_directory,
    resume_problems,
    unknown_changes,
)
from rlinf_lite.config.roles import fused_roles, roles_of

if TYPE_CHECKING:
    from rlinf_lite.scheduler.placement import ProcessPlacement

_GROUP_ESTIMATORS = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")
_TINY_POSITIONS = 512  # of the models in models/text_presets.py, which need torch's neighbours


@dataclass(frozen=True)
class ReasoningPlan:
    """Sizes of one training step; a group's size is None where its placement is not valid."""

    config: ReasoningConfig
    placements: dict[str, Sequence[ProcessPlacement]] = field(default_factory=dict)

    def size(self, role: str) -> int | None:
        return len(self.placements[role]) if role in self.placements else None

    @property
    def num_samples(self) -> int:
        """Responses that a step trains on."""
        return self.config.data.num_prompts * self.config.algorithm.group_size


def find_reasoning_problems(config: ReasoningConfig, suspects: set[str]) -> list[str]:
    """Every violated rule. `suspects` are keys whose values are not what their author wrote."""
    found, problems = placements(config.cluster, ROLES, roles_of(config), suspects)
    plan = ReasoningPlan(config, found)
    rules = (_batches, _lengths, _algorithm, _kl, _sharing, _names, _files)
    problems += [text for rule in rules for text in rule(plan) if not touches((text.partition(":")[0],), suspects)]
    return problems


def _batches(plan: ReasoningPlan) -> Iterator[str]:
    config, samples, batch = plan.config, plan.num_samples, plan.config.actor.global_batch_size
    if samples % batch:
        num_prompts, group = config.data.num_prompts, config.algorithm.group_size
        fits = max(size for size in range(1, min(batch, samples) + 1) if samples % size == 0)
        yield (
            f"actor.global_batch_size: a step has {num_prompts} prompts x {group} responses = {samples} samples, which "
            f"are no whole number of batches of {batch} ({samples} / {batch} = {samples / batch:.4g}). Use {fits}, or "
            "change data.num_prompts or algorithm.group_size"
        )


def _lengths(plan: ReasoningPlan) -> Iterator[str]:
    config = plan.config
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    room, budget = _positions(config), config.actor.max_tokens_per_micro_batch
    if budget < prompt + response:
        yield (
            f"actor.max_tokens_per_micro_batch: {budget} tokens do not hold one sequence of {prompt} + {response} = "
            f"{prompt + response} (data.max_prompt_length + rollout.max_response_length). Use that many or more"
        )
    if room is not None and prompt + response > room:
        yield (
            f"rollout.max_response_length: {prompt} + {response} = {prompt + response} tokens (with "
            f"data.max_prompt_length), and the model has {room} positions. Use {max(room - prompt, 1)} or less"
        )


def _positions(config: ReasoningConfig) -> int | None:
    """Of the model; None where its directory does not say."""
    named = config.actor.checkpoint_load_path or config.rollout.model_dir
    if named is None:
        return _TINY_POSITIONS
    file = policy_directory(named) / "config.json"
    try:
        found = json.loads(file.read_text()).get("max_position_embeddings")
    except (OSError, ValueError):
        return None  # loading it will say more
    return found if isinstance(found, int) else None


def _algorithm(plan: ReasoningPlan) -> Iterator[str]:
    algorithm = plan.config.algorithm
    if algorithm.adv_type in _GROUP_ESTIMATORS and algorithm.group_size < 2:
        yield (
            f"algorithm.group_size: {algorithm.adv_type} compares the responses to a prompt, and there is "
            f"{algorithm.group_size}. Use 2 or more"
        )
    if algorithm.filter_groups and algorithm.group_size < 2:
        yield "algorithm.filter_groups: a group of 1 has nothing to differ from. Set it to false, or raise group_size"
    if algorithm.critic_warmup_steps and algorithm.adv_type != "gae":
        yield f"algorithm.critic_warmup_steps: {algorithm.adv_type} has no critic to warm up. Set it to 0"
    if algorithm.clip_ratio_c is not None and algorithm.clip_ratio_c <= 1:
        yield (
            f"algorithm.clip_ratio_c: is {algorithm.clip_ratio_c:g}, and the dual clip must be above 1. Use 3, or null "
            "to turn it off"
        )


def _kl(plan: ReasoningPlan) -> Iterator[str]:
    kl = plan.config.algorithm.kl
    if kl.place == "loss" and kl.kind == "k1":
        yield (
            "algorithm.kl.kind: k1 in the loss holds nothing back: its gradient, that of log p(token), is 0 on average "
            "over tokens drawn from p. Use k2, whose gradient is that of the KL, or k3; k1 is for algorithm.kl.place: "
            "reward"
        )
    if kl.controller == "adaptive" and kl.place != "reward":
        yield (
            f"algorithm.kl.controller: adaptive steers the weight of the KL in the reward, and algorithm.kl.place is "
            f"{kl.place}. Set that to reward, or this to fixed"
        )


def _sharing(plan: ReasoningPlan) -> Iterator[str]:
    config = plan.config
    roles = fused_roles(config)
    for role in roles:
        if role not in ROLES:
            yield f"cluster.fuse: there is no role {role!r}. {did_you_mean(role, ROLES)}"
    if len(set(roles)) < len(roles):
        yield f"cluster.fuse: {config.cluster.fuse} names a role twice. Name each once"
    shown = {role: [process.slots for process in plan.placements[role]] for role in roles if role in plan.placements}
    different = [role for role, slots in shown.items() if slots != shown[next(iter(shown))]]
    if different:
        yield (
            f"cluster.fuse: {next(iter(shown))} and {different[0]} share processes, and {PLACEMENT} puts them in "
            "different places. Give them one line"
        )
    if "actor" in roles and "rollout" in roles and config.model.attn_implementation != "sdpa":
        yield (
            "model.attn_implementation: actor and rollout share a process and a model (cluster.fuse), and generation "
            "needs sdpa. Use sdpa, or fuse others"
        )


def _names(plan: ReasoningPlan) -> Iterator[str]:
    config = plan.config
    used = {
        "algorithm.adv_type": (config.algorithm.adv_type, "function"),
        "algorithm.loss_type": (config.algorithm.loss_type, "function"),
        "actor.strategy": (config.actor.strategy, "Class"),
    }
    for key, (name, kind) in used.items():
        known = known_names(key)
        if name not in known and not IMPORT_PATH.fullmatch(name):
            yield f"{key}: nothing is registered as {name!r}. {did_you_mean(name, known)} Your own: pkg.module:{kind}"
    if config.reward.fn is not None and not IMPORT_PATH.fullmatch(config.reward.fn):
        yield f"reward.fn: {config.reward.fn!r} is no import path. Write pkg.module:function"


def _files(plan: ReasoningPlan) -> Iterator[str]:
    config = plan.config
    yield from package_problems(config.runner.logger.backends, config.model.attn_implementation)
    for key, path in (
        ("rollout.model_dir", config.rollout.model_dir),
        ("actor.checkpoint_load_path", config.actor.checkpoint_load_path),
        ("critic.model_dir", config.critic.model_dir),
    ):
        yield from missing_directory(key, path)
    tokenizer = config.actor.tokenizer.tokenizer_model
    yield from missing_directory("actor.tokenizer.tokenizer_model", tokenizer, is_policy=False)
    for key, paths in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        for path in paths:
            if not Path(path).is_file():
                yield f"{key}: no file {path!r} (looked for {Path(path).absolute()}). Correct it"
    if config.runner.val_check_interval > 0 and config.data.train_files and not config.data.val_files:
        yield "data.val_files: is empty, and runner.val_check_interval is not. Name some, or set that to -1"
    yield from resume_problems(config.runner)
    yield from unknown_changes(config)
