"""Rules for language runs: model, problems, scores, sizes, and the KL to the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlinf_lite import registry
from rlinf_lite.cards import Problem
from rlinf_lite.config.names import fused_roles, loss_needs_of
from rlinf_lite.config.plan import ReasoningPlan
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import labels_of, policy_config, policy_directory
from rlinf_lite.config.rules import largest_divisor, quotient, rule
from rlinf_lite.hub import hub_problem, on_hub

_TOKENS = "actor.max_tokens_per_micro_batch"


@rule(
    *("model", "data.max_prompt_length", "rollout.max_response_length", "rollout.model_dir", "cluster.fuse"),
    *("actor.checkpoint_load_path", "critic.model_dir", "teacher.model_dir", "actor.tensor_model_parallel_size"),
    kinds=("reasoning",),
)
def _language_model_card(config: ReasoningConfig, plan: Any) -> Iterator[Problem]:
    yield from registry.language_card().problems(config, {"actor", "rollout"} <= set(fused_roles(config)))


@rule("rollout.engine", kinds=("reasoning",))
def _engine_is_an_engine(config: ReasoningConfig, plan: Any) -> Iterator[Problem]:
    name = config.rollout.engine
    if name == registry.ENGINES.default:  # which imports torch
        return
    try:
        part = registry.ENGINES.get(name)
    except registry.PartError:  # reported by its own rule
        return
    methods = ("stream", "generate", "weights_changed")
    if not isinstance(part, type) or not all(hasattr(part, method) for method in methods):
        text = f"{name} is {part!r}, no class with {', '.join(methods)} (rlinf_lite.generation.protocol). Name one"
        yield Problem("rollout.engine", text)


@rule("reward.fn", kinds=("reasoning",))
def _reward_function(config: ReasoningConfig, plan: Any) -> Iterator[Problem]:
    if config.reward.fn is not None:
        try:
            registry.import_reward_function(config.reward.fn)
        except registry.PartError as error:
            yield Problem("reward.fn", error.text)


@rule("data.train_files", "data.val_files", "runner.val_check_interval", kinds=("reasoning",))
def _problem_files(config: ReasoningConfig, plan: Any) -> Iterator[Problem]:
    data = config.data
    for key, paths in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for path in paths:
            if on_hub(path):
                if (wrong := hub_problem(path, needs_file=True)) is not None:
                    yield Problem(key, f"{wrong}. Correct it")
            elif not Path(path).is_file():
                yield Problem(key, f"no file {path!r} (looked for {Path(path).absolute()}). Correct it")
    if config.runner.val_check_interval > 0 and data.train_files and not data.val_files:
        text = "is empty, and runner.val_check_interval is not. Name some, or set that to -1"
        yield Problem("data.val_files", text)


@rule("reward", kinds=("reasoning",))
def _something_scores(config: ReasoningConfig, plan: Any) -> Iterator[Problem]:
    reward = config.reward
    if reward.model is None:
        if not reward.weights.rule:
            text = "is 0, and reward.model is null, so that nothing scores. Use 1, or name a reward model"
            yield Problem("reward.weights.rule", text)
        return
    if not reward.weights.model:
        text = "is 0, and reward.model would score in vain. Use another weight, or set reward.model to null"
        yield Problem("reward.weights.model", text)
    try:
        said = policy_config(policy_directory(reward.model))
        labels, room = labels_of(said), said.get("max_position_embeddings")
    except (OSError, ValueError, TypeError, AttributeError):
        return  # no directory, which has its own rule; or loading it will say more
    if reward.label is None and len(labels) != 1:
        text = f"is null, and the classifier in {reward.model} has {len(labels)} labels. Name the one whose logit"
        yield Problem("reward.label", f"{text} counts: {', '.join(labels[:10])}")
    elif reward.label is not None and reward.label not in labels:
        hint = registry.did_you_mean(reward.label, labels)
        yield Problem("reward.label", f"the classifier in {reward.model} has no label {reward.label!r}. {hint}")
    if isinstance(room, int) and 0 < room < (reward.max_length or 0):
        text = f"{reward.max_length} tokens, and the reward model has {room} positions. Use {room} or less, or null"
        yield Problem("reward.max_length", text)


@rule("data.num_prompts", "algorithm.group_size", "actor.global_batch_size", kinds=("reasoning",))
def _responses_fill_batches(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    samples, batch = plan.num_samples, config.actor.global_batch_size
    if samples % batch:
        text = f"a step has {config.data.num_prompts} prompts x {config.algorithm.group_size} responses = {samples}"
        text += f" samples, which are no whole number of batches of {batch} ({quotient(samples, batch)})"
        advice = f"Use {largest_divisor(samples, batch)}, or change data.num_prompts or algorithm.group_size"
        yield Problem("actor.global_batch_size", f"{text}. {advice}")


@rule("data.max_prompt_length", "rollout.max_response_length", _TOKENS, kinds=("reasoning",))
def _passes_hold_sequences(config: ReasoningConfig, plan: ReasoningPlan) -> Iterator[Problem]:
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    budget = config.actor.max_tokens_per_micro_batch
    if budget < prompt + response:
        text = f"{budget} tokens do not hold one sequence of {prompt} + {response} = {prompt + response} "
        advice = "(data.max_prompt_length + rollout.max_response_length). Use that many or more"
        yield Problem(_TOKENS, text + advice)


@rule("algorithm.max_refills", "algorithm.filter_groups", kinds=("reasoning",))
def _dropped_groups_to_replace(config: ReasoningConfig, plan: Any) -> Iterator[Problem]:
    algorithm = config.algorithm
    usual = type(algorithm).model_fields["max_refills"].default
    if algorithm.max_refills not in (0, usual) and not algorithm.filter_groups:
        text = f"is {algorithm.max_refills}, and with algorithm.filter_groups: false no group is dropped that others"
        yield Problem("algorithm.max_refills", f"{text} could replace. Set that to true, or this to {usual}")


@rule("algorithm.loss_type", "algorithm.kl", "teacher.model_dir", kinds=("reasoning",))
def _teacher(config: ReasoningConfig, plan: Any) -> Iterator[Problem]:
    loss, directory = config.algorithm.loss_type, config.teacher.model_dir
    if not loss_needs_of(config).teacher:
        if directory is not None:
            yield Problem("teacher.model_dir", f"is set, and {loss} learns from no teacher. Leave it out")
        return
    if directory is None:
        yield Problem("teacher.model_dir", f"is null, and {loss} learns from a teacher. Name its directory")
    elif not (policy_directory(directory) / "config.json").is_file():
        text = f"{directory} holds no language model (no config.json). Name one, or a checkpoint"
        yield Problem("teacher.model_dir", text)
    if config.algorithm.kl.place != "none":
        text = f"is {config.algorithm.kl.place}, and with {loss} the teacher is the only reference. Set it to none"
        yield Problem("algorithm.kl.place", text)


@rule("algorithm.kl", kinds=("reasoning",))
def _kl(config: ReasoningConfig, plan: Any) -> Iterator[Problem]:
    kl = config.algorithm.kl
    for name in ("kind", "coef"):
        if kl.place == "none" and (value := getattr(kl, name)) != (usual := type(kl).model_fields[name].default):
            text = f"is {value}, and algorithm.kl.place: none counts no KL. Set that to loss or reward, or this to"
            yield Problem(f"algorithm.kl.{name}", f"{text} {usual}")
    if kl.place == "loss" and kl.kind == "k1":
        yield Problem(
            "algorithm.kl.kind",
            "k1 in the loss holds nothing back: its gradient, that of log p(token), is 0 on average over tokens drawn "
            "from p. Use k2, whose gradient is that of the KL, or k3; k1 is for algorithm.kl.place: reward",
        )
    if kl.controller == "adaptive" and kl.place != "reward":
        text = f"adaptive steers the weight of the KL in the reward, and algorithm.kl.place is {kl.place}"
        yield Problem("algorithm.kl.controller", f"{text}. Set that to reward, or this to fixed")
    responses = config.data.num_prompts * config.algorithm.group_size
    if kl.controller == "adaptive" and responses / 5 >= kl.horizon:  # a fifth is the largest error that it counts
        text = f"is {kl.horizon:g}, and one step of {responses} responses could take the weight of the KL to 0 or below"
        advice = f"Use more than {responses / 5:g}, {10 * responses} for example"
        yield Problem("algorithm.kl.horizon", f"{text}. {advice}")


@rule("actor.optim.value_lr", "sft.optim.value_lr", kinds=("reasoning",))
def _language_models_have_no_value(config: ReasoningConfig, plan: Any) -> Iterator[Problem]:
    for section in ("actor", "sft"):
        if getattr(config, section).optim.value_lr is not None:
            text = "is of parameters that only values use, and a language model has none. Set it to null"
            yield Problem(f"{section}.optim.value_lr", f"{text}; a critic's rate is critic.optim.lr")


@rule("algorithm.overlong.buffer_length", "rollout.max_response_length", kinds=("reasoning",))
def _overlong_penalty(config: ReasoningConfig, plan: Any) -> Iterator[Problem]:
    buffer, longest = config.algorithm.overlong.buffer_length, config.rollout.max_response_length
    if buffer >= longest:
        text = (
            f"{buffer} tokens are not fewer than rollout.max_response_length: {longest}, so that every response would"
        )
        advice = f"be too long. A fifth of it, {max(longest // 5, 1)}, is usual"
        yield Problem("algorithm.overlong.buffer_length", f"{text} {advice}")
