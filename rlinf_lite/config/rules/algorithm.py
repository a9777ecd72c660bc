"""Rules for estimators and losses: their needs, and the keys that they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlinf_lite import registry
from rlinf_lite.cards import Problem
from rlinf_lite.config.names import loss_needs_of, needs_of
from rlinf_lite.config.plan import Plan, policy_card_of
from rlinf_lite.config.resources import chunk_of, policy_config, policy_directory
from rlinf_lite.config.rules import REINFORCED, TRAINED, rule
from rlinf_lite.config.schema import BaseAlgorithmConfig, Config

_LEVELS = ("chunk_level", "action_level", "token_level")  # from coarse to fine
_OF_LOSSES = ("clip_ratio_c", "behaviour_kl_coef")
"""The keys of `algorithm` that only some losses read (`LossNeeds.unread`)."""


@rule("algorithm.adv_type", "algorithm.group_size", "algorithm.filter_groups", kinds=REINFORCED)
def _groups(config: Any, plan: Any) -> Iterator[Problem]:
    algorithm, reasoning = config.algorithm, config.runner.task_type == "reasoning"
    needs, size = needs_of(config), algorithm.group_size
    if needs.groups and size < 2:
        of_what = f"the episodes of a group, and a group has {size}"
        if reasoning:
            of_what = f"the responses to a prompt, and there is {size}"
        yield Problem("algorithm.group_size", f"{algorithm.adv_type} compares {of_what}. Use 2 or more")
    if algorithm.filter_groups and not needs.groups and not reasoning:
        yield Problem("algorithm.filter_groups", f"{algorithm.adv_type} has no groups to drop. Set it to false")
    elif algorithm.filter_groups and size < 2:
        text = "a group of 1 has nothing to differ from. Set it to false, or raise group_size"
        yield Problem("algorithm.filter_groups", text)


@rule("algorithm.adv_type", kinds=("embodied",))
def _simulators_play_no_greedy_answer(config: Config, plan: Plan) -> Iterator[Problem]:
    if needs_of(config).greedy:
        text = f"{config.algorithm.adv_type} compares with a greedy answer to the same prompt, which simulators do not"
        yield Problem("algorithm.adv_type", f"{text} play. Use rloo, or grpo")


@rule("algorithm.adv_type", "algorithm.critic_warmup_steps", kinds=REINFORCED)
def _critic_to_warm_up(config: Any, plan: Any) -> Iterator[Problem]:
    if config.algorithm.critic_warmup_steps and not needs_of(config).values:
        text = f"{config.algorithm.adv_type} has no critic to warm up. Set it to 0"
        yield Problem("algorithm.critic_warmup_steps", text)


@rule("algorithm.adv_type", "algorithm.reward_type", "model.value_type", kinds=("embodied",))
def _values_match_rewards(config: Config, plan: Plan) -> Iterator[Problem]:
    adv_type, reward, value = config.algorithm.adv_type, config.algorithm.reward_type, config.model.value_type
    if reward != value and needs_of(config).values:
        text = f"{value} does not match algorithm.reward_type: {reward}, and {adv_type} subtracts one from the other"
        yield Problem("model.value_type", f"{text}. Set it to {reward}")


@rule("algorithm.reward_type", "algorithm.logprob_type", "algorithm.entropy_type", kinds=("embodied",))
def _levels_match_rewards(config: Config, plan: Plan) -> Iterator[Problem]:
    reward_type = config.algorithm.reward_type
    for key in ("logprob_type", "entropy_type"):
        level = getattr(config.algorithm, key)
        if _LEVELS.index(level) < _LEVELS.index(reward_type):
            text = f"{level} is coarser than algorithm.reward_type: {reward_type}, so that one number would meet"
            yield Problem(f"algorithm.{key}", f"{text} several advantages. Set it to {reward_type} or finer")


@rule("algorithm.clip_ratio_c")
def _dual_clip(config: Any, plan: Any) -> Iterator[Problem]:
    dual = config.algorithm.clip_ratio_c
    if dual is not None and dual <= 1:
        text = f"is {dual:g}, and the dual clip must be above 1. Use 3, or null to turn it off"
        yield Problem("algorithm.clip_ratio_c", text)


@rule("algorithm.loss_type", "algorithm.clip_ratio_low", kinds=REINFORCED)
def _lower_clip(config: Any, plan: Any) -> Iterator[Problem]:
    loss, low = config.algorithm.loss_type, config.algorithm.clip_ratio_low
    if low >= 1 and loss_needs_of(config).clips_below:
        text = f"is {low:g}, so that {loss} never clips below: nothing falls so far. Use less than 1, or cispo"
        yield Problem("algorithm.clip_ratio_low", text)


@rule("algorithm.loss_type", *(f"algorithm.{name}" for name in _OF_LOSSES), kinds=REINFORCED)
def _loss_reads_what_is_set(config: Any, plan: Any) -> Iterator[Problem]:
    for name in _OF_LOSSES:
        value, default = getattr(config.algorithm, name), BaseAlgorithmConfig.model_fields[name].default
        if value != default and name in loss_needs_of(config).unread:
            readers = [loss for loss in registry.LOSSES.names() if name not in registry.loss_needs(loss).unread]
            usual = "null" if default is None else f"{default:g}"
            text = f"is {value:g}, and {config.algorithm.loss_type} does not read it. Set it to {usual}"
            yield Problem(f"algorithm.{name}", f"{text}, or algorithm.loss_type to {' or '.join(readers)}")


@rule("algorithm.loss_type", "algorithm.adv_type", "algorithm.filter_groups", kinds=REINFORCED)
def _distillation_reads_no_rewards(config: Any, plan: Any) -> Iterator[Problem]:
    loss, estimator = config.algorithm.loss_type, config.algorithm.adv_type
    needs = loss_needs_of(config)
    if needs_of(config).teacher and not needs.teacher:
        losses = " or ".join(name for name in registry.LOSSES.names() if registry.loss_needs(name).teacher)
        text = f"is {loss}, and the advantages of algorithm.adv_type: {estimator} are all 0. Set it to {losses}, or"
        yield Problem("algorithm.loss_type", f"{text} adv_type to another estimator")
    if "adv_type" not in needs.unread:
        return
    if not needs_of(config).teacher:
        zero = " or ".join(name for name in registry.ESTIMATORS.names() if registry.estimator_needs(name).teacher)
        yield Problem("algorithm.adv_type", f"is {estimator}, whose advantages {loss} does not read. Set it to {zero}")
    if config.algorithm.filter_groups:
        text = f"is true, which drops groups by their rewards, and {loss} reads none. Set it to false"
        yield Problem("algorithm.filter_groups", text)


@rule("algorithm.loss_type", "teacher.model_dir", kinds=TRAINED)
def _teacher_for_those_who_learn_from_one(config: Config, plan: Plan) -> Iterator[Problem]:
    loss, directory = config.algorithm.loss_type, config.teacher.model_dir
    asks = config.runner.task_type == "embodied" and loss_needs_of(config).teacher
    if asks and directory is None:
        yield Problem("teacher.model_dir", f"is null, and {loss} learns from a teacher. Name its directory")
    elif asks and not (policy_directory(str(directory)) / "config.json").is_file():
        yield Problem("teacher.model_dir", f"{directory} holds no policy (no config.json). Name one, or a checkpoint")
    elif asks:
        said = policy_config(policy_directory(str(directory)))
        theirs = said.get("policy_id", config.model.id), chunk_of(said) or config.model.num_action_chunks
        if theirs != (ours := (config.model.id, config.model.num_action_chunks)):
            kinds = [f"{name} with chunks of {chunk}" for name, chunk in (theirs, ours)]
            text = f"{directory} is {kinds[0]}, and the student {kinds[1]}. Name one alike"
            yield Problem("teacher.model_dir", text)
    elif directory is not None and not asks:
        learns = {
            "sft": "imitation has data.teacher_dir instead",
            "off_policy": "off-policy runs learn from no teacher",
        }
        why = learns.get(config.runner.task_type, f"{loss} learns from no teacher")
        yield Problem("teacher.model_dir", f"is set, and {why}. Leave it out")


@rule("algorithm.loss_type", "algorithm.logprob_type", "model.id", kinds=("embodied",))
def _loss_has_probabilities_to_compare(config: Config, plan: Plan) -> Iterator[Problem]:
    loss, model, level = config.algorithm.loss_type, config.model.id, config.algorithm.logprob_type
    card = policy_card_of(config)
    if card is None or not loss_needs_of(config).probabilities:
        return
    if not card.probabilities:
        yield Problem(
            "algorithm.loss_type",
            f"{loss} compares probabilities of actions, and {model} does not say that it has any (`probabilities` of "
            "its card): densities of continuous actions may be above 1. Use ppo, for data of other policies with "
            "algorithm.correction",
        )
    elif level != "token_level":
        yield Problem(
            "algorithm.logprob_type",
            f"is {level}, and {loss} compares probabilities, of which those of many tokens together are all close to "
            "0, so that nothing would bound an update. Set it to token_level",
        )
