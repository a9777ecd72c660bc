"""Rules for off-policy learning: the replay buffer, the critics, and keys that only one kind of run reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlinf_lite import registry
from rlinf_lite.cards import Problem, Section
from rlinf_lite.config.names import reads_demonstrations
from rlinf_lite.config.off_policy import OffPolicyConfig, ReplayConfig
from rlinf_lite.config.plan import PLACEMENT, Plan, policy_card_of
from rlinf_lite.config.rules import rule
from rlinf_lite.config.schema import AlgorithmConfig, Config


@rule("runner.task_type", "algorithm", "off_policy", "replay", kinds=("embodied", "off_policy"))
def _keys_of_the_other_kind(config: Config, plan: Plan) -> Iterator[Problem]:
    from_replay = config.runner.task_type == "off_policy"
    sections: dict[str, tuple[Section, type[Section]]] = {"algorithm": (config.algorithm, AlgorithmConfig)}
    reads = "off_policy and replay"
    if not from_replay:
        sections = {"off_policy": (config.off_policy, OffPolicyConfig), "replay": (config.replay, ReplayConfig)}
        reads = "algorithm"
    for section, (values, kind) in sections.items():
        for name, field in kind.model_fields.items():
            if getattr(values, name) != field.get_default(call_default_factory=True):
                text = f"is set, and runner.task_type: {config.runner.task_type} reads {reads} instead"
                yield Problem(f"{section}.{name}", f"{text}. Leave it out, or change the task_type")


@rule("off_policy.target_subset", "off_policy.num_critics", kinds=("off_policy",))
def _targets_are_of_critics(config: Config, plan: Plan) -> Iterator[Problem]:
    subset, num = config.off_policy.target_subset, config.off_policy.num_critics
    if subset > num:
        yield Problem("off_policy.target_subset", f"{subset} of {num} critics. Use {num} or less, or more num_critics")


@rule("off_policy", kinds=("off_policy",))
def _losses_read_what_is_set(config: Config, plan: Plan) -> Iterator[Problem]:
    own = config.off_policy
    try:
        unread = registry.off_policy_needs(own.algorithm).unread
    except registry.PartError:  # reported by its own rule
        return
    for name in unread:
        if getattr(own, name) != OffPolicyConfig.model_fields[name].default:
            readers = [x for x in registry.OFF_POLICY.names() if name not in registry.off_policy_needs(x).unread]
            text = f"is set, and {own.algorithm} does not read it. Leave it out, or set off_policy.algorithm to"
            yield Problem(f"off_policy.{name}", f"{text} {' or '.join(readers)}")


@rule("replay", "env.train.num_envs", "rollout.num_chunks", kinds=("off_policy",))
def _buffer_holds_a_step(config: Config, plan: Plan) -> Iterator[Problem]:
    replay, samples = config.replay, plan.num_samples
    if samples and replay.capacity < samples:
        text = f"{replay.capacity} decisions are fewer than the {samples} of one step. Use more"
        yield Problem("replay.capacity", text)
    if not any(replay.shares.values()):
        yield Problem("replay.shares", "gives no pool a share. Use, for example, {online: 1}")


@rule("actor.strategy", PLACEMENT, kinds=("off_policy",))
def _critics_are_whole(config: Config, plan: Plan) -> Iterator[Problem]:
    ranks, strategy = plan.size("actor"), config.actor.strategy
    try:
        copies = registry.strategy_needs(strategy).copies
    except registry.PartError:  # reported by its own rule
        return
    if ranks and ranks > 1 and not copies:
        whole = [name for name in registry.STRATEGIES.names() if registry.strategy_needs(name).copies]
        text = f"is {strategy}, and the critics of an off-policy run are whole on each of {ranks} ranks"
        yield Problem("actor.strategy", f"{text}. Set it to {' or '.join(whole)}")


@rule("model.id", kinds=("off_policy",))
def _policy_samples_with_gradients(config: Config, plan: Plan) -> Iterator[Problem]:
    card = policy_card_of(config)
    if card is None:
        return
    part: Any = None
    if registry.IMPORT_PATH.fullmatch(config.model.id):
        try:
            part = registry.policy_part(config.model.id)
        except registry.PartError:  # reported by its own rule
            return
    base = registry.import_part(registry.POLICY, "model.id") if part is not None else None
    own = getattr(part, "sample_with_logprob", None)
    if not (card.off_policy or (base is not None and own is not None and own is not base.sample_with_logprob)):
        text = f"{config.model.id} has no sample_with_logprob, by which off-policy learning trains it"
        others = [name for name in registry.POLICIES.names() if registry.policy_card(name).off_policy]
        yield Problem("model.id", f"{text}. Use {' or '.join(others)}, or write that method (docs/off_policy.md)")


@rule("replay.shares", "data.action_noise", kinds=("off_policy",))
def _demonstrated_actions_are_those_that_were_executed(config: Config, plan: Plan) -> Iterator[Problem]:
    noise = config.data.action_noise
    if noise and reads_demonstrations(config):
        text = (
            f"is {noise:g}, and demonstrations hold the actions without it, which critics would take for the cause of"
        )
        yield Problem("data.action_noise", f"{text} what followed. Set it to 0")


@rule("replay.shares", "data", kinds=("off_policy",))
def _demonstrations_need_a_share(config: Config, plan: Plan) -> Iterator[Problem]:
    data = config.data
    if not reads_demonstrations(config) and data.demos_dir is not None:
        text = "is set, and replay.shares gives demonstrations no share of a batch"
        yield Problem("data.demos_dir", f"{text}. Leave it out, or write replay.shares.demonstrations=0.5")
