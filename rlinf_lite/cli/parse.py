"""Hydra's command line for the entry points: `--config-name X key=value ...`, answered without torch or ray."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml
from pydantic import BaseModel

from rlinf_lite.config.errors import ConfigError
from rlinf_lite.config.loading import load_config
from rlinf_lite.config.names import built_in_cards, walk
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config
from rlinf_lite.registry import REGISTRIES


def parse_cli(argv: Sequence[str], default_config: str, description: str = "", task_type: str = "embodied") -> Any:
    """The config that a command line asks for, with the schema of `task_type`, which must be that of the config.

    Exits with 0 after `--help` and `--dry-run`, and with 2 after listing what is wrong with the config.
    """
    parser = _parser(default_config, description)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.help:
        _print_help(parser, ReasoningConfig if task_type == "reasoning" else Config)
    overrides = list(arguments.overrides)
    if arguments.resume is not None:
        overrides.append(f"runner.resume={arguments.resume}")
    name = arguments.config_name
    if arguments.config_path is not None:
        name = str(Path(arguments.config_path) / f"{name.removesuffix('.yaml')}.yaml")
    try:
        config = load_config(name, overrides)
        if config.runner.task_type != task_type:
            raise ConfigError(name, [_other_entry_point(config.runner.task_type, task_type)])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if arguments.dry_run:
        from rlinf_lite.preview.dry_run import describe

        print(describe(config))
        sys.exit(0)
    return config


def _other_entry_point(wanted: str, task_type: str) -> str:
    command, script = {
        "embodied": ("train", "embodiment/train_embodied_agent.py"),
        "sft": ("sft", "embodiment/train_sft.py"),
        "reasoning": ("math", "math/train_math.py"),
    }[wanted]
    return (
        f"runner.task_type: is {wanted}, which `rlinf-lite {command}` runs (examples/{script}). "
        f"Start that one, or set it to {task_type}"
    )


def _parser(default_config: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, in Hydra's grammar")
    parser.add_argument(
        "--config-name",
        "-cn",
        default=default_config,
        metavar="NAME",
        help=f"a config, or the path of a YAML file (default: {default_config})",
    )
    parser.add_argument("--config-path", "-cp", metavar="DIR", help="directory of --config-name, if not ours")
    parser.add_argument("--dry-run", action="store_true", help="print config, placement, arithmetic, memory; exit")
    parser.add_argument("--resume", metavar="auto|never|PATH", help="short for runner.resume=...")
    parser.add_argument("--help", "-h", action="store_true", help="this text, and exit")
    return parser


def _print_help(parser: argparse.ArgumentParser, schema: type[BaseModel]) -> NoReturn:
    from rlinf_lite.config.compose import config_names

    parser.print_help()
    print("\nconfigs (each also by its last part alone):")
    print("\n".join(f"  {name}" for name in config_names()))
    print("\nkeys:")
    print("\n".join(key_lines(schema)))
    sys.exit(0)


def key_lines(schema: type[BaseModel] = Config) -> Iterator[str]:
    """One entry per key: its name, its default, its help. Options are those of all built-in parts."""
    entries = list(walk(schema, built_in_cards(schema)))
    sections = {key.rpartition(".")[0] for key, _, _ in entries}
    for key, field, part in entries:
        if key not in sections:
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            choices = tuple(REGISTRIES[key].names()) if key in REGISTRIES else choices
            shown = f" ({' | '.join(choices)})" if choices else ""
            help_text = " ".join(f"{part + ': ' if part else ''}{field.description or ''}".split())
            yield f"  {key}: {_yaml(field.default)}{shown}\n      {help_text}"


def _yaml(value: object) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")
