"""Rules for rewards that are a function of observations (`env.train.reward`)."""

from __future__ import annotations

from collections.abc import Iterator

from rlinf_lite import registry
from rlinf_lite.cards import Problem
from rlinf_lite.config.plan import Plan, observed
from rlinf_lite.config.resources import classifier_config, classifier_misfit
from rlinf_lite.config.rules import PLAYED, rule
from rlinf_lite.config.schema import Config, StepRewardConfig


@rule("env.train.ignore_terminations", "env.train.reward.id", kinds=PLAYED)
def _success_does_not_end_episodes(config: Config, plan: Plan) -> Iterator[Problem]:
    if config.env.train.reward.id is not None and not config.env.train.ignore_terminations:
        text = "is false, and episodes that end with success would tell the policy more than env.train.reward does"
        yield Problem("env.train.ignore_terminations", f"{text}. Set it to true")


@rule("env.train.reward", "env.id", "env.task", "env.options", kinds=PLAYED)
def _classifier_is_there_and_fits(config: Config, plan: Plan) -> Iterator[Problem]:
    own, key = config.env.train.reward, "env.train.reward.model_dir"
    if own.id is None:
        for name, field in StepRewardConfig.model_fields.items():
            if getattr(own, name) != field.default:
                text = "is set, and env.train.reward.id: null takes the environment's own rewards"
                yield Problem(f"env.train.reward.{name}", f"{text}. Leave it out, or name the reward")
        return
    try:
        if not callable(part := registry.STEP_REWARDS.get(own.id)):
            yield Problem("env.train.reward.id", f"{own.id} is {part!r}, neither a function nor a class. Name one")
        if not registry.step_reward_needs(own.id).classifier:
            return
    except registry.PartError:  # reported by its own rule
        return
    if own.model_dir is None:
        yield Problem(key, f"is null, and {own.id} needs a folder that rlinf-lite reward has written. Name it")
        return
    try:
        trained = classifier_config(own.model_dir)["cameras"]
    except (OSError, ValueError) as error:
        yield Problem(key, str(error))
        return
    seen = observed(config)
    if seen is not None and (problem := classifier_misfit(trained, seen.cameras)):
        yield Problem(key, problem)


@rule("runner.task_type", "env.train.reward.id", "replay.shares", kinds=("off_policy", "sft"))
def _pools_have_the_same_rewards(config: Config, plan: Plan) -> Iterator[Problem]:
    name = config.env.train.reward.id
    if name is None:
        return
    if config.runner.task_type == "sft":
        yield Problem("env.train.reward.id", f"is {name}, and imitation reads no rewards. Leave it out")
    elif others := [pool for pool, share in config.replay.shares.items() if share and pool != "online"]:
        text = f"has {', '.join(others)}, which are by the environment's own success or rewards, and"
        yield Problem("replay.shares", f"{text} env.train.reward.id is {name}. Use {{online: 1}}")
