"""Hydra's command line for the entry points: `--config-name X key=value ...`, answered without torch or ray."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from rlinf_lite.config.explain import ConfigError, yaml_text
from rlinf_lite.config.names import built_in_cards, reads_demonstrations, walk
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config
from rlinf_lite.hub import on_hub
from rlinf_lite.registry import REGISTRIES
from rlinf_lite.script import shown_path
from rlinf_lite.threads import THREADS

COMMON_KEYS = (
    *("runner.max_steps", "runner.seed", "runner.val_check_interval", "runner.save_interval", "runner.logger.log_path"),
    *("env.id", "env.task", "env.train.num_envs", "env.eval.num_episodes", "data.num_prompts"),
    *("actor.checkpoint_load_path", "rollout.model_dir", "actor.optim.lr", "actor.global_batch_size"),
    *("actor.micro_batch_size", "cluster.num_gpus_per_node"),
)
"""Keys that are changed most, which `--help` shows."""
DETACH = "--detach"
WIDTH = 80
"""Width of the help, in characters."""


def parse_cli(
    argv: Sequence[str],
    default_config: str | None,
    description: str = "",
    task_type: str | None = "embodied",
    detaches: bool = False,
) -> Any:
    """The config that a command line names, or `default_config` if it names none. It must be of `task_type`, if that is
    given. `detaches`: the caller acts on the option `--detach`.

    Exits with 0 after `--help`, `--help-all` and `--dry-run`, with 1 where `--dry-run` finds unusable demonstrations or
    a wrong checkpoint, and with 2 after printing what is wrong with the config, or that none is named.
    """
    parser = _parser(description, default_config, detaches)
    arguments = parser.parse_intermixed_args(argv)
    from rlinf_lite.config.loading import as_override, load_config  # Hydra, which other commands do without

    if arguments.help or arguments.help_all:
        parser.print_help()
        print("\n".join(_help_on_keys(task_type, arguments.help_all)))
        sys.exit(0)
    named, overrides = config_and_overrides(arguments.words, arguments.config_name)
    if arguments.resume is not None:
        overrides.append(as_override("runner.resume", arguments.resume))
    if arguments.debug:
        overrides.append("cluster.runtime=local")
    name = named or default_config
    if name is None:
        print(
            "name a config (rlinf-lite configs lists them) or a run to continue; "
            "the quickstart is `rlinf-lite train tabletop_ppo_vla`",
            file=sys.stderr,
        )
        sys.exit(2)
    if not named:
        print(f"config: {name}", flush=True)
    if run_config := _config_of_run(name):
        overrides = [as_override("runner.resume", name), *overrides]
        name = str(run_config)
    overrides = [*_where_it_is(overrides), *overrides]
    if arguments.config_path is not None:
        name = str(Path(arguments.config_path) / f"{name.removesuffix('.yaml')}.yaml")
    try:
        config = load_config(name, overrides, elsewhere=arguments.dry_run)
        kind = config.runner.task_type
        if kind == "eval":
            raise ConfigError(name, [f"runner.task_type: is {kind}, which trains nothing. `rlinf-lite eval` measures"])
        if task_type not in (None, kind):
            text = f"is {kind}, and this script trains {task_type}. Use `rlinf-lite train`, which trains any kind"
            raise ConfigError(name, [f"runner.task_type: {text}"])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if arguments.dry_run:
        sys.exit(_preview(config))
    if config.cluster.runtime == "local":
        os.environ.update(THREADS)  # read by torch, which this process imports later
    return config


def _parser(description: str, default_config: str | None, detaches: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, add_help=False, allow_abbrev=False)
    about = "a config, or a run to continue; overrides in Hydra's grammar"
    default = f" (default: {default_config})" if default_config else ""
    parser.add_argument("words", nargs="*", metavar="NAME|RUN key=value", help=about)
    parser.add_argument(
        "--config-name",
        "-cn",
        metavar="NAME",
        help=f"a config, or the path of a YAML file{default}; NAME alone is short for it",
    )
    parser.add_argument("--config-path", "-cp", metavar="DIR", help="directory of --config-name, if not rlinf_lite's")
    parser.add_argument("--dry-run", action="store_true", help="print config, placement, arithmetic, memory; exit")
    parser.add_argument("--resume", metavar="auto|never|PATH", help="short for runner.resume=...")
    parser.add_argument("--debug", action="store_true", help="short for cluster.runtime=local: breakpoint() works")
    if detaches:
        parser.add_argument(DETACH, action="store_true", help="run on without this terminal; `rlinf-lite stop` ends it")
    parser.add_argument("--help", "-h", action="store_true", help="print this text; exit")
    parser.add_argument("--help-all", action="store_true", help="print this text with all keys; exit")
    return parser


def _preview(config: Any) -> int:
    from rlinf_lite.preview.dry_run import describe, policy_problems, shown, what_is_read
    from rlinf_lite.runners.checkpoints import CheckpointError, find_checkpoint, read_state
    from rlinf_lite.runners.protocol import notes_of_run
    from rlinf_lite.runners.run_config import changes_since
    from rlinf_lite.runners.run_paths import run_to_resume

    goes_on = list[str]()
    if config.runner.resume not in ("auto", "never"):
        try:
            checkpoint = find_checkpoint(Path(config.runner.resume))
            run_to_resume(config, checkpoint)
            changes_since(checkpoint, config)
            steps, limit = read_state(checkpoint)["completed_steps"], config.runner.max_steps
        except CheckpointError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
        goes_on = [f"goes on from step {steps}, {checkpoint}"]
        if 0 <= limit <= steps:
            goes_on = [f"goes on from step {steps}: nothing is left to do, raise runner.max_steps ({limit})"]
    spec, dataset = shown(config), None
    if reads_demonstrations(config) and not on_hub(config.data.demos_dir):  # a preview downloads nothing
        from rlinf_lite.data.demonstrations import check_demonstrations
        from rlinf_lite.data.lerobot.layout import LeRobotError

        try:
            dataset = check_demonstrations(config, spec)
        except LeRobotError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
    if problems := policy_problems(config, spec):
        print(ConfigError(config.runner.run_name, problems), file=sys.stderr)
        return 2
    print(describe(config))
    reads = what_is_read(config, spec)
    notes = [] if config.runner.task_type == "reasoning" else notes_of_run(config, spec, reads)
    if dataset is not None:
        from rlinf_lite.data.dataset_notes import dataset_notes

        notes += dataset_notes(config, dataset, spec, reads)
    goes_on += [f"note: {line}" for line in notes]
    print("".join(f"\n{line}\n" for line in goes_on), end="")
    return 0


def config_and_overrides(words: Sequence[str], config_name: str | None) -> tuple[str | None, list[str]]:
    """The config that a command line names, alone or by --config-name, and its overrides. Exits with 2 where it names
    several."""
    names, overrides = names_and_overrides(words)
    names = [*filter(None, [config_name]), *names]
    if len(names) > 1:
        print(f"{' '.join(names)}: {len(names)} configs. Name one; a change of it is key=value", file=sys.stderr)
        sys.exit(2)
    return (names[0] if names else None), overrides


def names_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into names (of a config, of runs) and overrides: `key=value`, `+key=value`, `~key`."""
    is_override = {word: "=" in word or word.startswith("~") for word in words}
    return [word for word in words if not is_override[word]], [word for word in words if is_override[word]]


def _config_of_run(name: str) -> Path | None:
    """File with the config of the run in a directory; None if there is no run."""
    path = Path(name) / "config.yaml"
    return path if path.is_file() else None


def _where_it_is(overrides: Sequence[str]) -> list[str]:
    """Overrides that make a resumed run continue in its own directory, even if its config names another one. [] unless
    `overrides` resume a run by its directory, or by a checkpoint in it."""
    from hydra.errors import HydraException

    from rlinf_lite.config.loading import as_override, parse_override

    said = [text for text in overrides if text.startswith("runner.resume=")]
    if not said:
        return []
    from rlinf_lite.runners.checkpoints import CheckpointError, find_checkpoint, run_of
    from rlinf_lite.runners.run_config import CONFIG, read_config

    try:
        resumed = Path(str(parse_override(said[-1]).value()))
        checkpoint = find_checkpoint(resumed)
    except (CheckpointError, HydraException):  # reported where the value is used
        return []
    holders = (resumed.resolve(), run_of(checkpoint))
    run = next((path for path in holders if path is not None and (path / CONFIG).is_file()), None)
    if run is None:
        return []
    saved = read_config(checkpoint / "training_state" / CONFIG) or {}
    log_path = saved.get("runner", {}).get("logger", {}).get("log_path")
    overrides = [as_override("runner.logger.log_path", shown_path(run.parent))]
    if log_path == saved.get("actor", {}).get("checkpoint_save_path"):
        overrides.append("actor.checkpoint_save_path=null")
    return overrides


def _help_on_keys(task_type: str | None, every: bool) -> Iterator[str]:
    """Help on all keys, or on the common ones, for the kinds of run that a command may start."""
    kinds: dict[str, type[BaseModel]] = {"in a simulator": Config, "of language models": ReasoningConfig}
    wanted = [
        kind
        for kind, schema in kinds.items()
        if task_type is None or (task_type == "reasoning") == (schema is ReasoningConfig)
    ]
    if not every:
        yield "\ncommon keys:"
        lines = {key: line for kind in reversed(wanted) for key, line in key_lines(kinds[kind])}
        yield from (lines[key] for key in COMMON_KEYS if key in lines)
        yield "\n--help-all: every key. rlinf-lite configs: every config"
        return
    for kind in wanted:
        yield f"\nkeys of runs {kind}:"
        yield from (line for _, line in key_lines(kinds[kind]))


def key_lines(schema: type[BaseModel] = Config) -> Iterator[tuple[str, str]]:
    """Every key with its help: name, default, meaning. Options are those of all built-in parts."""
    entries = list(walk(schema, built_in_cards(schema)))
    sections = {key.rpartition(".")[0] for key, _, _ in entries}
    for key, field, part in entries:
        if key not in sections:
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            choices = tuple(REGISTRIES[key].names()) if key in REGISTRIES else choices
            shown = f" ({' | '.join(choices)})" if choices else ""
            help_text = " ".join(f"{part + ': ' if part else ''}{field.description or ''}".split())
            title = _filled(f"{key}: {yaml_text(field.default)}{shown}", "  ", "    ")
            yield key, f"{title}\n{_filled(help_text, '      ', '      ')}"


def positive(text: str) -> int:
    """The value of an option of argparse that is a number of things, 1 or more."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; give 1 or more")
    return number


def _filled(text: str, first: str, others: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
