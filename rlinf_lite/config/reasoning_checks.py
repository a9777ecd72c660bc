"""Rules of runs that train language models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_lite.cards import Problem
from rlinf_lite.config.names import ROLES
from rlinf_lite.config.placing import PLACEMENT
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import missing_directory
from rlinf_lite.config.roles import fused_roles
from rlinf_lite.config.rules import largest_divisor, quotient, rule
from rlinf_lite.registry import IMPORT_PATH, did_you_mean, language_card

if TYPE_CHECKING:
    from rlinf_lite.scheduler.placement import ProcessPlacement


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


@rule("data.num_prompts", "algorithm.group_size", "actor.global_batch_size", kinds=("reasoning",))
def _batches(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    samples, batch = plan.num_samples, config.actor.global_batch_size
    if samples % batch:
        yield Problem(
            "actor.global_batch_size",
            f"a step has {config.data.num_prompts} prompts x {config.algorithm.group_size} responses = {samples} "
            f"samples, which are no whole number of batches of {batch} ({quotient(samples, batch)}). Use "
            f"{largest_divisor(samples, batch)}, or change data.num_prompts or algorithm.group_size",
        )


@rule(
    *("data.max_prompt_length", "rollout.max_response_length", "actor.max_tokens_per_micro_batch"), kinds=("reasoning",)
)
def _passes_hold_sequences(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    budget = config.actor.max_tokens_per_micro_batch
    if budget < prompt + response:
        yield Problem(
            "actor.max_tokens_per_micro_batch",
            f"{budget} tokens do not hold one sequence of {prompt} + {response} = {prompt + response} "
            "(data.max_prompt_length + rollout.max_response_length). Use that many or more",
        )


@rule(
    *("model", "data.max_prompt_length", "rollout.max_response_length", "rollout.model_dir", "cluster.fuse"),
    "actor.checkpoint_load_path",
    kinds=("reasoning",),
)
def _what_the_models_card_says(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    yield from language_card().problems(config, shares_process={"actor", "rollout"} <= set(fused_roles(config)))


@rule("algorithm.kl", kinds=("reasoning",))
def _kl(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    kl = config.algorithm.kl
    if kl.place == "loss" and kl.kind == "k1":
        yield Problem(
            "algorithm.kl.kind",
            "k1 in the loss holds nothing back: its gradient, that of log p(token), is 0 on average over tokens drawn "
            "from p. Use k2, whose gradient is that of the KL, or k3; k1 is for algorithm.kl.place: reward",
        )
    if kl.controller == "adaptive" and kl.place != "reward":
        yield Problem(
            "algorithm.kl.controller",
            f"adaptive steers the weight of the KL in the reward, and algorithm.kl.place is {kl.place}. Set that to "
            "reward, or this to fixed",
        )


@rule("cluster.fuse", PLACEMENT, "algorithm.adv_type", "algorithm.kl.place", kinds=("reasoning",))
def _sharing(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    roles = fused_roles(config)
    for role in roles:
        if role not in ROLES:
            yield Problem("cluster.fuse", f"there is no role {role!r}. {did_you_mean(role, ROLES)}")
    if len(set(roles)) < len(roles):
        yield Problem("cluster.fuse", f"{config.cluster.fuse} names a role twice. Name each once")
    shown = {role: [process.slots for process in plan.placements[role]] for role in roles if role in plan.placements}
    different = [role for role, slots in shown.items() if slots != shown[next(iter(shown))]]
    if different:
        yield Problem(
            "cluster.fuse",
            f"{next(iter(shown))} and {different[0]} share processes, and {PLACEMENT} puts them in different places. "
            "Give them one line",
        )


@rule("reward.fn", kinds=("reasoning",))
def _reward_function(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    if config.reward.fn is not None and not IMPORT_PATH.fullmatch(config.reward.fn):
        yield Problem("reward.fn", f"{config.reward.fn!r} is no import path. Write pkg.module:function")


@rule("critic.model_dir", kinds=("reasoning",))
def _critic_to_start_from(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    yield from missing_directory("critic.model_dir", config.critic.model_dir)


@rule("actor.tokenizer.tokenizer_model", kinds=("reasoning",))
def _tokenizer(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    key = "actor.tokenizer.tokenizer_model"
    yield from missing_directory(key, config.actor.tokenizer.tokenizer_model, is_policy=False)


@rule("data.train_files", "data.val_files", "runner.val_check_interval", kinds=("reasoning",))
def _problem_files(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    data = config.data
    for key, paths in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for path in paths:
            if not Path(path).is_file():
                yield Problem(key, f"no file {path!r} (looked for {Path(path).absolute()}). Correct it")
    if config.runner.val_check_interval > 0 and data.train_files and not data.val_files:
        text = "is empty, and runner.val_check_interval is not. Name some, or set that to -1"
        yield Problem("data.val_files", text)
