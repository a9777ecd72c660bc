"""Turns a nested dict into a config: pydantic validates single values, then the checks between keys follow. All
problems are reported at once, with keys and values as in the config file."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlinf_lite.cards import Problem
from rlinf_lite.config.checks import find_problems
from rlinf_lite.config.names import cards_of, schema_keys
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import start_dir
from rlinf_lite.config.schema import Config, NodeGroup, PlacementSpec
from rlinf_lite.registry import nearest

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text (in quotes)",
    "list_type": "a list, such as [a, b]",
    "tuple_type": "a list, such as [a, b]",
    "dict_type": "a section of keys",
    "model_type": "a section of keys",
}
Location = tuple[str | int, ...]
"""The place of a value in nested dicts and lists, as pydantic gives it."""
_NESTED: dict[str, type[BaseModel]] = {
    "cluster.node_groups": NodeGroup,
    "cluster.component_placement": PlacementSpec,
}


_COUNTERPARTS = (
    ("actor.micro_batch_size", "actor.max_tokens_per_micro_batch"),
    ("env.train.num_envs", "data.num_prompts"),
)
"""Pairs of keys with the same purpose, in runs in simulators and in runs of language models."""


class ConfigError(ValueError):
    """The configuration has problems, which are found before anything starts.

    `problems` has one line for each: `where.in.yaml: what is wrong (the value, the arithmetic). how to fix it`.
    """

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__(source, problems)
        self.source = source
        self.problems = problems

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        return "\n".join([f"{self.source}: {count}", *(f"  - {problem}" for problem in self.problems)])


def schema_of(content: Mapping[Any, Any]) -> type[BaseModel]:
    """The schema of the content's `runner.task_type`."""
    runner = content.get("runner")
    is_reasoning = isinstance(runner, Mapping) and runner.get("task_type") == "reasoning"
    return ReasoningConfig if is_reasoning else Config


def validate(content: dict[str, Any], suspects: Collection[str] = ()) -> tuple[Any, list[Problem]]:
    """The config of a nested dict, with defaults in place of invalid values, and all problems.

    `runner.task_type` decides the schema. `suspects`: keys already known to be wrong.
    """
    schema: Any = schema_of(content)
    try:
        config = schema.model_validate(content)
        return config, find_problems(config, set(suspects))
    except ValidationError as error:
        problems, wrong, remaining = _explained(error, content, schema)
    config = schema.model_validate(remaining)
    return config, [*problems, *find_problems(config, wrong | set(suspects))]


def check_measurable(config: Config | ReasoningConfig, name: str) -> None:
    """Raise ConfigError if the config called `name` has nothing to evaluate: no policy, or in a language run files of
    training problems without files of evaluation problems."""
    if isinstance(config, ReasoningConfig) and config.data.train_files and not config.data.val_files:
        raise ConfigError(name, ["data.val_files: names no problems to measure on. Set it to files that hold some"])
    if start_dir(config) is None:
        text = "is null, so there is no policy to measure. Set it to a run, a checkpoint, or a policy's directory"
        raise ConfigError(name, [f"rollout.model_dir: {text}"])


def _explained(
    error: ValidationError, content: dict[str, Any], schema: type[BaseModel]
) -> tuple[list[Problem], set[str], dict[str, Any]]:
    """The problems, the keys that cannot be judged because of them, and `content` without those values.

    What remains is valid, so that the checks between keys still run on the rest.
    """
    grouped: dict[Location, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        grouped.setdefault(_existing_part(details["loc"], content), []).append(details)
    problems, suspects, remaining = list[Problem](), set[str](), copy.deepcopy(content)
    known = schema_keys(schema, cards_of(content, schema))
    for location, found in grouped.items():
        if any(other != location and other[: len(location)] == location for other in grouped):
            continue  # one member of a union fits except for a key inside it: errors of the other members do not matter
        key = _dotted(location)
        if found[0]["type"] == "extra_forbidden":
            meant, advice = _in_other_runs(key, known) or _nearest_key(location, known, found[0]["input"])
            problems.append(Problem(key, f"there is no such key. {advice}"))
            suspects |= {meant} if meant else set()
        else:
            problems.append(Problem(key, _wrong_value(found)))
            suspects.add(key)
        _remove(remaining, location)
    return problems, suspects, remaining


def _existing_part(location: Location, content: Any) -> Location:
    """`location` without the parts that pydantic adds for members of unions."""
    kept: list[str | int] = []
    for part in location:
        try:
            content = content[part]
            kept.append(part)
        except (KeyError, IndexError, TypeError):
            if part not in ("str", "int", "PlacementSpec"):  # members of unions
                break
    return tuple(kept) or location[:1]


def yaml_text(value: object) -> str:
    """A value in YAML, in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")


def _dotted(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _wrong_value(found: list[ErrorDetails]) -> str:
    details = found[0]
    value = f"is {details['input']!r}"
    if details["type"] == "missing":
        return f"a key is missing ({details['loc'][-1]}). Add it"
    if len(found) > 1:  # no member of a union fits
        wanted = ", or ".join(dict.fromkeys(_expected(item) or item["msg"] for item in found))
        return f"{value}. It must be {wanted}"
    if (expected := _expected(details)) is not None:
        return f"{value}. It must be {expected}"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input should ")
    return f"{value}. It {message if message.startswith('must') else f'must {message}'}"


def _expected(details: ErrorDetails) -> str | None:
    """A text on what the value must be, if the error is about its type or a list of choices; else None."""
    if details["type"] != "literal_error":
        return _EXPECTED.get(details["type"])
    choices = details["ctx"]["expected"]
    return choices if " or " not in choices else f"one of {choices.replace(' or ', ', ')}"


def _in_other_runs(key: str, known: list[str]) -> tuple[str, str] | None:
    """The key with the same purpose in this kind of run, and advice that names it; None if there is none."""
    pair = next((pair for pair in _COUNTERPARTS if key in pair), ())
    meant = next((other for other in pair if other in known), None)
    return None if meant is None else (meant, f"In runs of this runner.task_type it is {meant}")


def _nearest_key(location: Location, keys: list[str], value: object) -> tuple[str | None, str]:
    """The key that an unknown one probably stands for, and the advice that says so."""
    *parents, name = (str(part) for part in location)
    section = _dotted(location[:-1])
    siblings = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]
    if not siblings:  # within a list or a dict of sections
        nested = _NESTED.get(".".join(parents[:2]))
        siblings = [] if nested is None else list(nested.model_fields)
    elsewhere = [key for key in keys if key.rpartition(".")[2] == name and key.rpartition(".")[0] != section]
    near = nearest(name, siblings, count=1, cutoff=0.75)
    if near:
        meant = f"{section}.{near[0]}" if section else near[0]
        return meant, f"Did you mean {meant}?"
    if elsewhere:
        return elsewhere[0], f"{name} belongs in {' or '.join(elsewhere)}"
    anywhere = nearest(name, {key.rpartition(".")[2] for key in keys}, count=1, cutoff=0.75)
    if anywhere:
        meant = next(key for key in keys if key.rpartition(".")[2] == anywhere[0])
        return meant, f"Did you mean {meant}?"
    within = [key for key in keys if isinstance(value, Mapping) and key.rpartition(".")[2] in value]
    if within:  # an unknown section that contains known keys
        return within[0], f"{within[0].rpartition('.')[2]} belongs in {within[0]}"
    return None, f"Known in {section or 'a config'}: {', '.join(siblings) or 'nothing'}"


def _remove(content: Any, location: Location) -> None:
    """Delete the value at `location`, or the list or placement that cannot be valid without it."""
    *parents, last = location
    lists = [index for index, part in enumerate(location) if isinstance(part, int)]
    if lists:
        *parents, last = location[: lists[0]]
    for part in parents:
        if part not in content:
            return  # deleted already, together with its list
        content = content[part]
    content.pop(last, None)
