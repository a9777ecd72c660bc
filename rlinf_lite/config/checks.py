"""Finds every problem of a config, and the placements that it may run on."""

from __future__ import annotations

from typing import TypeVar

from rlinf_lite.cards import Problem
from rlinf_lite.config.names import touches
from rlinf_lite.config.plan import PLACEMENT, SLOTS, plan_and_problems, slots
from rlinf_lite.config.proposals import is_auto, proposals
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.rules import (
    RULES,
    algorithm,
    cluster,
    correction,
    files,
    imitation,
    language,
    off_policy,
    parts,
    rewards,
    sizes,
)
from rlinf_lite.config.schema import BaseConfig, Config
from rlinf_lite.scheduler.errors import PlacementError

C = TypeVar("C", bound=Config | ReasoningConfig)

SUBJECTS = (algorithm, cluster, correction, files, imitation, language, off_policy, parts, rewards, sizes)
"""The modules of rules. Importing one adds its rules to `RULES`."""

_ONE_WORKS = {"sft": "imitation", "eval": "an evaluation", "off_policy": "an off-policy run"}


def find_problems(config: BaseConfig, suspects: set[str]) -> list[Problem]:
    """All problems of a config. `suspects`: keys whose values were replaced, so that rules on them do not apply. If the
    run chooses its placement, the problems of the placement with the fewest."""
    unknown: list[Problem] = []  # the problem that the number of slots is not known
    try:
        slots(config.cluster)
    except PlacementError as error:
        if not touches(SLOTS, suspects):
            unknown = [Problem(error.about, error.text)]
        if is_auto(config.cluster):
            return unknown
        suspects = {*suspects, error.about}
    if is_auto(config.cluster):
        assert isinstance(config, Config | ReasoningConfig)
        if one_works := {"sft": "imitation", "eval": "an evaluation", "off_policy": "an off-policy run"}.get(
            config.runner.task_type
        ):
            text = f"is auto, and in {one_works} there is nothing to choose by. Write 'actor,rollout,env: all'"
            return [Problem(PLACEMENT, text)]
        fewest: list[Problem] | None = None
        for placed in proposals(config):
            problems = find_problems(placed, suspects)
            if fewest is None or len(problems) < len(fewest):
                fewest = problems
            if not problems:
                break
        return fewest or []
    plan, problems = plan_and_problems(config, suspects)
    for keys, kinds, rule in RULES:
        if config.runner.task_type in kinds and not touches(keys, suspects):
            problems += rule(config, plan)
    return unknown + problems


def possible(config: C) -> list[C]:
    """The config with every placement that it may run on: the one that it names, or the proposals with the fewest
    problems."""
    if not is_auto(config.cluster):
        return [config]
    found = [(len(find_problems(placed, set())), placed) for placed in proposals(config)]
    return [placed for count, placed in found if count == min(count for count, _ in found)]
