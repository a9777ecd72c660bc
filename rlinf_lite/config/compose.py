"""From a config's name and overrides to one nested dict, by Hydra.

Hydra merges files and config groups. Values given as overrides are parsed by Hydra's grammar and merged here, because
Hydra refuses a key that no file mentions, and files mention only what they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_lite.cards import Problem
from rlinf_lite.config.errors import ConfigError
from rlinf_lite.registry import did_you_mean
from rlinf_lite.renamed_keys import card_kind, new_name, new_names, say_renamed, with_new_names
from rlinf_lite.shipped import shipped


@dataclass(frozen=True)
class Composed:
    """A config before validation; `problems` and the keys they concern are those of overrides that were left out."""

    name: str
    content: dict[str, Any]
    problems: list[Problem]
    suspects: set[str]


def config_dir() -> Path:
    """The directory of the configs that come with rlinf_lite."""
    return shipped("configs")


def config_names() -> list[str]:
    """Names of all experiments under `configs/`, such as `embodiment/gym_pendulum_ppo_mlp`."""
    root = config_dir()
    paths = (path.relative_to(root).with_suffix("") for path in root.rglob("*.yaml"))
    return sorted(path.as_posix() for path in paths if "base" not in path.parts)


def compose_config(name_or_path: str | Path, overrides: Sequence[str]) -> Composed:
    """Find a config, merge what its defaults name, and apply the overrides.

    Raises:
        ConfigError: where nothing can be composed: no such config, or a file that is not valid YAML.
    """
    parsed, problems, suspects = _parse_overrides(overrides)
    name = str(name_or_path)
    try:
        directory, name = _find(name)
        composed = _compose(directory, name, [item for item in parsed if _is_for_hydra(item)])
    except (_NotFoundError, HydraException, OmegaConfBaseException, yaml.MarkedYAMLError) as error:
        raise ConfigError(name, [*map(str, problems), _explain(error, name)]) from error
    values = [item for item in parsed if not _is_for_hydra(item)]
    composed, names = _of_the_parts_that_are_named(composed, values)
    say_renamed({item.key_or_group: new_name(item.key_or_group, names) for item in values if _is_old(item, names)})
    problems += [problem for item in values if (problem := _apply(composed, item, names))]
    suspects = {new_name(key, names) or key for key in suspects}
    try:
        content = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        reason = f"{error.full_key or name}: {str(error).splitlines()[0]}. Set it, or correct the reference"
        raise ConfigError(name, [*map(str, problems), reason]) from error
    assert isinstance(content, dict)
    return Composed(name, {str(key): value for key, value in content.items()}, problems, suspects)


def _of_the_parts_that_are_named(
    composed: DictConfig, values: list[Override]
) -> tuple[DictConfig, dict[str, str | None]]:
    """What the files say, by the keys' new names, and those names. Options that files give one environment or policy
    are not another's, which an override puts in its place."""
    content: Any = OmegaConf.to_container(composed, resolve=False)
    for section in ("env", "model"):
        ids = [item.value() for item in values if item.key_or_group == f"{section}.id" and not item.is_delete()]
        there = content.setdefault(section, {}) if ids else None
        if isinstance(there, dict):
            before = card_kind(section, content)
            there["id"] = ids[-1]
            if not issubclass(card_kind(section, content), before):
                there.pop("options", None)
    return OmegaConf.create(with_new_names(content)), new_names(content)


def _is_old(item: Override, names: dict[str, str | None]) -> bool:
    return new_name(item.key_or_group, names) != item.key_or_group


class _NotFoundError(Exception):
    """No config has this name; the message says which have."""


def _find(name: str) -> tuple[Path, str]:
    """Hydra's search directory and the name within it."""
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise _NotFoundError(
                f"{name}: no such file (looked for {path.absolute()}). Give a path, or a name: "
                + ", ".join(config_names())
            )
        if path.suffix == ".yml":
            raise _NotFoundError(f"{name}: Hydra reads .yaml files only. Rename it to {path.with_suffix('.yaml').name}")
        root = config_dir()
        if path.resolve().is_relative_to(root):
            return root, path.resolve().relative_to(root).with_suffix("").as_posix()
        return path.resolve().parent, path.stem
    if (config_dir() / f"{name}.yaml").is_file():
        return config_dir(), name
    short = [known for known in config_names() if known.rsplit("/", 1)[-1] == name]
    if len(short) == 1:
        return config_dir(), short[0]
    names = [*config_names(), *(known.rsplit("/", 1)[-1] for known in config_names())]
    raise _NotFoundError(f"{name}: no config has this name in {config_dir()}. {did_you_mean(name, names)}")


def _compose(directory: Path, name: str, overrides: list[Override]) -> DictConfig:
    arguments = [item.input_line for item in overrides if item.input_line is not None]
    if directory != config_dir():
        arguments.append(f"hydra.searchpath=[file://{config_dir()}]")
    with initialize_config_dir(str(directory), version_base="1.3"):
        composed = compose(name, overrides=arguments)
    OmegaConf.set_struct(composed, False)
    return composed


def _explain(error: Exception, name: str) -> str:
    match error:
        case _NotFoundError():
            return str(error)
        case yaml.MarkedYAMLError(problem_mark=mark):
            where = f"{mark.name}:{mark.line + 1}" if mark else name
            return f"{where}: not valid YAML ({error.problem}). Correct that line"
        case MissingConfigException(missing_cfg_file=str(missing)):
            return f"{name}: its defaults name {missing!r}, which does not exist. {did_you_mean(missing, _all_files())}"
    return f"{name}: {' '.join(str(error).split())}"


def _all_files() -> list[str]:
    root = config_dir()
    return [path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")]


def _parse_overrides(overrides: Sequence[str]) -> tuple[list[Override], list[Problem], set[str]]:
    parsed: list[Override] = []
    problems: list[Problem] = []
    suspects: set[str] = set()
    for text in overrides:
        try:
            item = OverridesParser.create().parse_override(text)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            advice = f"cannot be read as an override ({reason}). Write key=value, in quotes for the shell"
            problems.append(Problem(text, advice))
            suspects.add(text.partition("=")[0].lstrip("+~"))
            continue
        if not item.is_sweep_override():
            parsed.append(item)
            continue
        key, values = item.key_or_group, text.partition("=")[2]
        advice = f"sweeps over values ({values}) are not supported. Give one; a list is '{key}=[a,b]'"
        problems.append(Problem(key, advice))
        suspects.add(key)
    return parsed, problems, suspects


def _is_for_hydra(item: Override) -> bool:
    """Choices of config groups and Hydra's own settings, as opposed to values."""
    return "/" in item.key_or_group or item.package is not None or item.key_or_group.split(".")[0] == "hydra"


def _apply(composed: DictConfig, item: Override, names: dict[str, str | None]) -> Problem | None:
    """Merge one override; returns a problem, if any. Dicts replace what was there, as every other value does."""
    key = new_name(item.key_or_group, names)
    if key is None:
        return None
    try:
        if item.is_delete():
            parent, _, last = key.rpartition(".")
            node = OmegaConf.select(composed, parent) if parent else composed
            if not isinstance(node, DictConfig) or last not in node:
                return Problem(f"~{key}", f"nothing to delete, the config does not set {key}. Leave the override out")
            del node[last]
        else:
            OmegaConf.update(composed, key, item.value(), merge=False, force_add=True)
    except OmegaConfBaseException as error:
        return Problem(key, f"cannot be set ({str(error).splitlines()[0]}). Check the section's name")
    return None
