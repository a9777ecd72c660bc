"""Loading a config: Hydra composes a named file and overrides into one nested dict, which `explain.py` validates.

Hydra merges files and config groups. Overrides of values are parsed by Hydra's grammar but merged here: Hydra refuses
keys that no file mentions, and our files mention only the keys that they change.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlinf_lite.cards import Problem
from rlinf_lite.config.explain import ConfigError, schema_of, validate
from rlinf_lite.config.names import built_in_cards, walk
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config
from rlinf_lite.registry import card_in, did_you_mean
from rlinf_lite.shipped import shipped


def config_dir() -> Path:
    """The directory of the configs that come with rlinf_lite."""
    return shipped("configs")


def config_names() -> list[str]:
    """The names of all experiments under `configs/`, such as `embodiment/gym_pendulum_ppo_mlp`."""
    return sorted(name for name in _all_files() if "base" not in name.split("/"))


def load_config(
    name_or_path: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    elsewhere: bool = False,
    unused: Sequence[str] = (),
) -> Config:
    """Load and validate the config of an experiment.

    Args:
        name_or_path: a name under `configs/` (`embodiment/x`, or `x` if that is unique), or the path of a YAML file,
            whose defaults may name our configs too.
        overrides: a list of `key=value`, in Hydra's grammar, or values by key.
        elsewhere: the config is for another machine: packages, files and memory for simulators may be missing here.
        unused: keys that have no effect on this run; rules that read them are skipped.

    Returns:
        The config, a ReasoningConfig if `runner.task_type` is reasoning. `runner.run_name` defaults to the config's
        name.

    Raises:
        ConfigError: lists every problem.
        TypeError: if `overrides` is a single text.
    """
    if isinstance(overrides, str):
        raise TypeError(f"load_config: overrides is the text {overrides!r}. Give a list, [{overrides!r}]")
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={as_hydra_writes(value)}" for key, value in overrides.items()]
    parsed, sweeps, problems, suspects = _parse_overrides(overrides)
    name = str(name_or_path)
    try:
        directory, name = _find(name)
        arguments = [_for_hydra(item) for item in parsed if _is_for_hydra(item)]
        if directory != config_dir():
            arguments.append(f"hydra.searchpath={as_hydra_writes([f'file://{config_dir()}'])}")
        with initialize_config_dir(str(directory), version_base="1.3"):
            composed = compose(name, overrides=arguments)
        OmegaConf.set_struct(composed, False)
    except (_NotFoundError, HydraException, OmegaConfBaseException, yaml.MarkedYAMLError) as error:
        advice = [str(_swept(item, (Config, ReasoningConfig))) for item in sweeps]
        raise ConfigError(name, [*map(str, problems), *advice, _explain(error, name)]) from error
    values = [item for item in parsed if not _is_for_hydra(item)]
    composed = _without_options_of_replaced_parts(composed, values)
    for item in values:
        problems += _apply(composed, item)
    schema = schema_of(composed)
    for item in sweeps:
        if _fields(item.key_or_group, (schema,)):
            problems.append(_swept(item, (schema,)))
        else:  # an unknown key: that is the problem to report
            OmegaConf.update(composed, item.key_or_group, _values(item))
    try:
        content = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        reason = f"{error.full_key or name}: {str(error).splitlines()[0]}. Set it, or correct the reference"
        raise ConfigError(name, [*map(str, problems), reason]) from error
    assert isinstance(content, dict)

    runner = content.setdefault("runner", {})
    if isinstance(runner, dict) and runner.get("run_name") is None:
        runner["run_name"] = name.rsplit("/", 1)[-1]
    config: Config
    config, found = validate({str(key): value for key, value in content.items()}, {*suspects, *unused})
    if elsewhere:
        found = [problem for problem in found if not problem.of_machine]
    if problems or found:
        raise ConfigError(name, [str(problem) for problem in (*problems, *found)])
    return config


def parse_override(text: str) -> Override:
    """Parse `key=value` with Hydra's parser. It accepts only ASCII in unquoted words, so other letters are replaced
    before parsing and restored after it. Raises HydraException."""
    mark = next(mark for count in itertools.count(1) if (mark := "Q" * count) not in text)
    in_ascii = re.sub(r"[^\x00-\x7f]", lambda found: mark + f"{ord(found[0]):06x}".translate(_HEX_AS_LETTERS), text)

    def put_back(value: Any) -> Any:
        if isinstance(value, str):
            return re.sub(f"{mark}([a-p]{{6}})", lambda found: chr(int(found[1].translate(_LETTERS_AS_HEX), 16)), value)
        if isinstance(value, dict):
            return {put_back(key): put_back(one) for key, one in value.items()}
        if isinstance(value, list):
            return [put_back(one) for one in value]
        if is_dataclass(value) and not isinstance(value, type):  # a quoted string, several values, the override itself
            return replace(value, **{field.name: put_back(getattr(value, field.name)) for field in fields(value)})
        return value

    try:
        item: Override = OverridesParser.create().parse_override(in_ascii)
    except HydraException as error:
        raise HydraException(put_back(str(error))) from error
    return item if in_ascii == text else put_back(item)


_HEX_AS_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_LETTERS_AS_HEX = {new: old for old, new in _HEX_AS_LETTERS.items()}


def as_override(key: str, value: str) -> str:
    """`key=value`, with Hydra's quotes around the value if it would otherwise not be read as this text."""
    with suppress(HydraException):
        item = parse_override(f"{key}={value}")
        if not item.is_sweep_override() and item.value() == value:
            return f"{key}={value}"
    return f"{key}={as_hydra_writes(value)}"


def as_hydra_writes(value: Any) -> str:
    """A value in Hydra's grammar. Keys have no quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_hydra_writes(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_hydra_writes, value))}]"
    if isinstance(value, bool | int | float | None):
        return json.dumps(value)
    return QuotedString(str(value), Quote.double).with_quotes()


def _for_hydra(item: Override) -> str:
    """An override as an ASCII text for Hydra's own parser."""
    line = item.input_line or ""
    return line if line.isascii() else f"{item.get_key_element()}={as_hydra_writes(item.value())}"


def _without_options_of_replaced_parts(composed: DictConfig, values: list[Override]) -> DictConfig:
    """The composed files, without the options of an environment or policy that an override of its id replaces."""
    content: Any = OmegaConf.to_container(composed, resolve=False)
    for section in ("env", "model"):
        ids = [item.value() for item in values if item.key_or_group == f"{section}.id" and not item.is_delete()]
        there = content.setdefault(section, {}) if ids else None
        if isinstance(there, dict):
            before = card_in(section, content)
            there["id"] = ids[-1]
            if before is not None and not isinstance(card_in(section, content), type(before)):
                there.pop("options", None)
    return OmegaConf.create(content)


_LIST = "rlinf-lite configs lists them"


class _NotFoundError(Exception):
    """No config has this name; the message suggests names."""


def _find(name: str) -> tuple[Path, str]:
    """Hydra's search directory for a config, and the config's name in it."""
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise _NotFoundError(f"no such file (looked for {path.absolute()}). Give a path, or a name: {_LIST}")
        if path.suffix == ".yml":
            raise _NotFoundError(f"Hydra reads .yaml files only. Rename it to {path.with_suffix('.yaml').name}")
        root = config_dir()
        if path.resolve().is_relative_to(root):
            return root, path.resolve().relative_to(root).with_suffix("").as_posix()
        return path.resolve().parent, path.stem
    if (config_dir() / f"{name}.yaml").is_file():
        return config_dir(), name
    short = [known for known in config_names() if known.rsplit("/", 1)[-1] == name]
    if len(short) == 1:
        return config_dir(), short[0]
    if "/" in name and path.parts[0] not in {known.partition("/")[0] for known in config_names()}:
        if path.is_dir():
            raise _NotFoundError("not a run's directory, which has a config.yaml. rlinf-lite runs lists runs")
        raise _NotFoundError(f"no such directory (looked for {path.absolute()}). rlinf-lite runs lists runs")
    names = config_names() if "/" in name else [known.rsplit("/", 1)[-1] for known in config_names()]
    raise _NotFoundError(f"no config has this name in {config_dir()}. {did_you_mean(name, names, _LIST)}")


def _explain(error: Exception, name: str) -> str:
    match error:
        case yaml.MarkedYAMLError(problem_mark=mark):
            where = f"{mark.name}:{mark.line + 1}" if mark else name
            return f"{where}: not valid YAML ({error.problem}). Correct that line"
        case MissingConfigException(missing_cfg_file=str(missing)):
            return f"{name}: its defaults name {missing!r}, which does not exist. {did_you_mean(missing, _all_files())}"
    return f"{name}: {' '.join(str(error).split())}"


def _all_files() -> list[str]:
    root = config_dir()
    return [path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")]


def _parse_overrides(
    overrides: Sequence[str],
) -> tuple[list[Override], list[Override], list[Problem], set[str]]:
    """Parse overrides. Returns those with one value, those with several, problems of those that cannot be read, and the
    keys of the last two kinds."""
    parsed, sweeps = list[Override](), list[Override]()
    problems: list[Problem] = []
    suspects: set[str] = set()
    for text in overrides:
        try:
            item = parse_override(text)
        except HydraException as error:
            reason, (key, is_pair, value) = str(error).splitlines()[0], text.partition("=")
            quoted = shlex.quote(f"{key}={as_hydra_writes(value)}")
            advice = f"A text with such signs has quotes within those of the shell: {quoted}" if is_pair else ""
            problems.append(Problem(text, f"cannot be read as an override ({reason}). {advice or 'Write key=value'}"))
            suspects.add(key.lstrip("+~"))
            continue
        if not item.is_sweep_override():
            parsed.append(item)
            continue
        sweeps.append(item)
        suspects.add(item.key_or_group)
    return parsed, sweeps, problems, suspects


def _swept(item: Override, schemas: Sequence[type[BaseModel]]) -> Problem:
    """The problem that an override has several values, with the quoted override that the user may have meant."""
    key, values = item.key_or_group, _values(item)
    kinds = " ".join(str(field.annotation) for field in _fields(key, schemas))
    quoted = f"{key}='{values}'"
    meant = f'. A text is "{quoted}"' if "str" in kinds else ""
    if "list" in kinds or "tuple" in kinds:
        meant = f". A list is '{key}=[{values}]'"
    return Problem(key, f"a run has one value of it, here are several ({values}). `rlinf-lite sweep` runs each{meant}")


def _values(item: Override) -> str:
    return (item.input_line or "").partition("=")[2]


def _fields(key: str, schemas: Sequence[type[BaseModel]]) -> list[FieldInfo]:
    return [field for schema in schemas for name, field, _ in walk(schema, built_in_cards(schema)) if name == key]


def _is_for_hydra(item: Override) -> bool:
    """Whether an override chooses a config group or sets Hydra itself, instead of a value of a key."""
    return "/" in item.key_or_group or item.package is not None or item.key_or_group.split(".")[0] == "hydra"


def _apply(composed: DictConfig, item: Override) -> Iterator[Problem]:
    """Merge one override. A dict replaces the old value, like any other value."""
    key = item.key_or_group
    try:
        if not item.is_delete():
            OmegaConf.update(composed, key, item.value(), merge=False, force_add=True)
            return
        parent, _, last = key.rpartition(".")
        node = OmegaConf.select(composed, parent) if parent else composed
        if isinstance(node, DictConfig) and last in node:
            del node[last]
        else:
            yield Problem(f"~{key}", f"nothing to delete, the config does not set {key}. Leave the override out")
    except OmegaConfBaseException as error:
        yield Problem(key, f"cannot be set ({str(error).splitlines()[0]}). Check the section's name")
