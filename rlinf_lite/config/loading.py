"""`load_config`: Hydra composes, pydantic validates, cross-checks follow, and every problem is reported at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlinf_lite.cards import Problem
from rlinf_lite.config.checks import find_problems
from rlinf_lite.config.errors import ConfigError
from rlinf_lite.config.explain import explain_validation
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config
from rlinf_lite.renamed_keys import with_new_names


def load_config(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The validated config of an experiment.

    Args:
        name_or_path: a name under `configs/` (`embodiment/x`, or `x` where that is unique), or the path of a YAML file,
            whose defaults may name our configs too.
        overrides: `key=value`, in Hydra's grammar.

    Returns:
        The config, a ReasoningConfig where `runner.task_type` is reasoning; `runner.run_name` is the config's name
        where nothing else is set.

    Raises:
        ConfigError: with every problem found.
    """
    from rlinf_lite.config.compose import compose_config  # Hydra is not needed by workers, which import Config too

    composed = compose_config(name_or_path, overrides)
    config: Config
    config, problems = validate(composed.content, composed.suspects)
    if composed.problems or problems:
        raise ConfigError(composed.name, [str(problem) for problem in (*composed.problems, *problems)])
    if config.runner.run_name is not None:
        return config
    runner = config.runner.model_copy(update={"run_name": composed.name.rsplit("/", 1)[-1]})
    return config.model_copy(update={"runner": runner})


def validate(content: dict[str, Any], suspects: Collection[str] = ()) -> tuple[Any, list[Problem]]:
    """The config of a nested dict, with defaults in place of what is not valid, and every problem.

    Its schema is that of `runner.task_type`. `suspects` are keys already known to be wrong.
    """
    runner = content.get("runner")
    is_reasoning = isinstance(runner, dict) and runner.get("task_type") == "reasoning"
    schema: Any = ReasoningConfig if is_reasoning else Config
    content = with_new_names(content)
    try:
        config = schema.model_validate(content)
        return config, find_problems(config, set(suspects))
    except ValidationError as error:
        problems, wrong, remaining = explain_validation(error, content, schema)
    config = schema.model_validate(remaining)
    return config, [*problems, *find_problems(config, wrong | set(suspects))]
