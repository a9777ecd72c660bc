"""Rules for names of registered or imported parts, and the rules of environment and policy cards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rlinf_lite import registry
from rlinf_lite.cards import NO_STATE, Problem
from rlinf_lite.config.plan import PLACEMENT, Plan, env_card_of, observed, policy_card_of, slots
from rlinf_lite.config.resources import policy_config, start_dir, start_key
from rlinf_lite.config.rules import SIMULATED, rule
from rlinf_lite.config.rules.cards import evaluates, imitates_no_state
from rlinf_lite.config.schema import Config
from rlinf_lite.dimensions import policy_misfits
from rlinf_lite.machine import byte_text, free_host_bytes


def _name_rule(key: str) -> None:
    card_of = {"env.id": registry.env_card, "model.id": registry.policy_card}.get(key, registry.REGISTRIES[key].get)

    @rule(key)
    def names_stand_for_parts(config: Any, plan: Any) -> Iterator[Problem]:
        name = config
        for word in key.split("."):
            name = getattr(name, word, None)
        if name is None or name in registry.REGISTRIES[key].names():  # None: a key of other runs
            return
        try:
            card_of(name)
        except registry.PartError as error:
            yield Problem(key, error.text)


for _key in registry.REGISTRIES:
    _name_rule(_key)


@rule("model.id", kinds=SIMULATED)
def _policy_is_a_policy(config: Config, plan: Plan) -> Iterator[Problem]:
    card = policy_card_of(config)
    base = sys.modules.get("rlinf_lite.models.base")  # a policy's module has imported it
    if card is None or card.part is None:
        return
    if base is None or not isinstance(card.part, type) or not issubclass(card.part, base.Policy):
        text = f"{config.model.id} is {card.part!r}, not a subclass of rlinf_lite.models.Policy. Name one"
        yield Problem("model.id", text)


@rule("env.id", kinds=SIMULATED)
def _simulator_is_installed(config: Config, plan: Plan) -> Iterator[Problem]:
    card = env_card_of(config)
    if card is not None and card.package is not None and not registry.is_installed(card.package):
        advice = registry.install_command(card.extra) if card.extra else f"pip install {card.package}"
        text = f"{card.name} is not installed (no module {card.package}). {advice}"
        yield Problem("env.id", text, of_machine=True)


@rule("env.id", "env.task", kinds=SIMULATED)
def _simulator_has_the_task(config: Config, plan: Plan) -> Iterator[Problem]:
    card, task = env_card_of(config), config.env.task
    if card is not None and card.tasks and not card.has_other_tasks and task not in card.tasks:
        yield Problem("env.task", f"{card.name} has no task {task!r}. {registry.did_you_mean(task, card.tasks)}")


@rule("env.id", "env.task", "env.options", "cluster", kinds=SIMULATED)
def _environment_card(config: Config, plan: Plan) -> Iterator[Problem]:
    card = env_card_of(config)
    if card is not None and plan.placements:
        yield from card.problems(config)


@rule("env", "runner", "cluster", kinds=SIMULATED)
def _environments_have_room(config: Config, plan: Plan) -> Iterator[Problem]:
    """Checks one machine, by the simulators alone; `--dry-run` says what the processes need besides."""
    card = env_card_of(config)
    of_one = None if card is None else card.simulator_memory(config.env.options, slots(config.cluster)[0])
    if of_one is None or config.cluster.num_nodes > 1:
        return
    rows = {
        "training": config.env.train.num_envs if config.runner.task_type != "eval" else 0,
        "evaluation": config.env.eval.num_envs if evaluates(config) else 0,
    }
    needed, free = sum(rows.values()) * of_one[1], free_host_bytes()
    if needed > free:
        which = " and ".join(f"{number} of {name}" for name, number in rows.items() if number)
        text = f"the environments ({which}) need {byte_text(of_one[1])} each, {byte_text(needed)} together, and this "
        text += f"machine has {byte_text(free)} available. Use fewer, or more nodes"
        yield Problem("env.train.num_envs" if rows["training"] else "env.eval.num_envs", text, of_machine=True)


@rule("env", "rollout.pipeline_stage_num", PLACEMENT, "cluster.accelerator", kinds=SIMULATED)
def _own_environment_can_be_made(config: Config, plan: Plan) -> Iterator[Problem]:
    """Skipped if slots are GPUs: the simulator may use a GPU, and this process would keep part of its memory."""
    card, workers = env_card_of(config), plan.size("env")
    if card is None or not workers or slots(config.cluster)[0] == "cuda":
        return
    if registry.IMPORT_PATH.fullmatch(config.env.id):
        split = "eval" if config.runner.task_type == "eval" else "train"
        of_stage = getattr(config.env, split).num_envs // (workers * config.rollout.pipeline_stage_num)
        yield from registry.problems_of_making(card, config, split, max(of_stage, 1))


@rule("env.id", "env.task", "env.options", "model", "rollout.model_dir", "actor", "data", kinds=SIMULATED)
def _policy_card(config: Config, plan: Plan) -> Iterator[Problem]:
    card, env = policy_card_of(config), env_card_of(config)
    if card is None:
        return
    lacking = env.lacks_state(config.env.options) if env is not None and card.reads_state else None
    if lacking is not None:
        yield Problem(lacking.key, f"{lacking.text}, which is what {config.model.id} reads. Use state")
    if card.reads_state and imitates_no_state(config):
        yield Problem("data.keys.state", NO_STATE)
    start, said = start_dir(config), dict[str, Any]()
    if start is not None:
        with suppress(OSError, ValueError):  # which the card says better
            said = policy_config(start)
    if (other := said.get("policy_id", config.model.id)) != config.model.id:
        text = f"{start} holds a policy {other}, and model.id is {config.model.id}"
        yield Problem(start_key(config), f"{text}. Set that to {other}, or name another directory")
        return
    yield from card.problems(config, seen := observed(config))
    if seen is not None:
        yield from policy_misfits(start_key(config), start_dir(config), seen)


@rule("algorithm.critic_warmup_steps", "model.id", kinds=("embodied",))
def _own_policy_has_a_value_to_warm_up(config: Config, plan: Plan) -> Iterator[Problem]:
    if not config.algorithm.critic_warmup_steps or not registry.IMPORT_PATH.fullmatch(config.model.id):
        return
    try:
        part = registry.policy_part(config.model.id)
    except registry.PartError:  # reported by its own rule
        return
    base = registry.import_part(registry.POLICY, "model.id")  # imported already, by the class to compare
    if getattr(part, "value_parameters", None) is base.value_parameters:
        text = f"is {config.algorithm.critic_warmup_steps}, and {config.model.id} has no value_parameters(), "
        advice = "which would name what trains then. Set it to 0, or write that method"
        yield Problem("algorithm.critic_warmup_steps", text + advice)
