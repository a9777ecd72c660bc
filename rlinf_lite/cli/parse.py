"""Hydra's command line for the entry points: `--config-name X key=value ...`, answered without torch or ray."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from rlinf_lite.config.explain import ConfigError, yaml_text
from rlinf_lite.config.names import built_in_cards, walk
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config
from rlinf_lite.hub import on_hub
from rlinf_lite.registry import REGISTRIES

EXAMPLES = {
    "train": "embodiment/train_embodied_agent.py",
    "eval": "embodiment/eval_embodied_agent.py",
    "sft": "embodiment/train_sft.py",
    "math": "math/train_math.py",
}
"""The script that a command is."""
COMMAND_OF = {"embodied": "train", "sft": "sft", "eval": "eval", "reasoning": "math"}  # by `runner.task_type`


def parse_cli(argv: Sequence[str], default_config: str, description: str = "", task_type: str = "embodied") -> Any:
    """The config that a command line asks for, with the schema of `task_type`, which must be that of the config.

    Exits with 0 after `--help` and `--dry-run`, with 1 where that finds demonstrations that do not serve, and with 2
    after listing what is wrong with the config.
    """
    parser = argparse.ArgumentParser(description=description, add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="NAME key=value", help="a config, and overrides in Hydra's grammar")
    parser.add_argument(
        "--config-name",
        "-cn",
        metavar="NAME",
        help=f"a config, or the path of a YAML file (default: {default_config}); NAME alone is short for it",
    )
    parser.add_argument("--config-path", "-cp", metavar="DIR", help="directory of --config-name, if not ours")
    parser.add_argument("--dry-run", action="store_true", help="print config, placement, arithmetic, memory; exit")
    parser.add_argument("--resume", metavar="auto|never|PATH", help="short for runner.resume=...")
    parser.add_argument("--help", "-h", action="store_true", help="this text, and exit")
    arguments = parser.parse_intermixed_args(argv)
    from rlinf_lite.config.loading import config_names, load_config  # Hydra, which other commands do without

    if arguments.help:
        parser.print_help()
        print("\nconfigs (each also by its last part alone):")
        print("\n".join(f"  {name}" for name in config_names()))
        print("\nkeys:")
        print("\n".join(key_lines(ReasoningConfig if task_type == "reasoning" else Config)))
        sys.exit(0)
    named, overrides = config_and_overrides(arguments.words, arguments.config_name)
    if arguments.resume is not None:
        overrides.append(f"runner.resume={arguments.resume}")
    name = named or default_config
    if arguments.config_path is not None:
        name = str(Path(arguments.config_path) / f"{name.removesuffix('.yaml')}.yaml")
    try:
        config = load_config(name, overrides, elsewhere=arguments.dry_run)
        if config.runner.task_type != task_type:
            command = COMMAND_OF[config.runner.task_type]
            text = f"is {config.runner.task_type}, which `rlinf-lite {command}` runs (examples/{EXAMPLES[command]})"
            raise ConfigError(name, [f"runner.task_type: {text}. Start that one, or set it to {task_type}"])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if arguments.dry_run:
        sys.exit(_preview(config))
    return config


def _preview(config: Any) -> int:
    from rlinf_lite.preview.dry_run import describe

    if config.runner.task_type == "sft" and not on_hub(config.data.demos_dir):  # a preview downloads nothing
        from rlinf_lite.data.demonstrations import check_demonstrations
        from rlinf_lite.data.lerobot.layout import LeRobotError

        try:
            check_demonstrations(config)
        except LeRobotError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
    print(describe(config))
    return 0


def config_and_overrides(words: Sequence[str], config_name: str | None) -> tuple[str | None, list[str]]:
    """The config that a command names, by itself or by --config-name, and what changes it. Exits with 2 where there
    are several."""
    names, overrides = names_and_overrides(words)
    names = [*filter(None, [config_name]), *names]
    if len(names) > 1:
        print(f"{' '.join(names)}: {len(names)} configs. Name one; a change of it is key=value", file=sys.stderr)
        sys.exit(2)
    return (names[0] if names else None), overrides


def names_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What a command is about (a config, a run), and what changes it: `key=value`, `+key=value`, `~key`."""
    is_override = {word: "=" in word or word.startswith("~") for word in words}
    return [word for word in words if not is_override[word]], [word for word in words if is_override[word]]


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
            yield f"  {key}: {yaml_text(field.default)}{shown}\n      {help_text}"
