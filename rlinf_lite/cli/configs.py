"""`rlinf-lite configs`: the configs that come with rlinf_lite, read from their files. Imports neither torch nor ray."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rlinf_lite.cli.tables import text_width
from rlinf_lite.registry import env_card
from rlinf_lite.shipped import shipped

TAKES = re.compile(r"\bTakes ([\d.]+ min) on (.+?)\.(?= |$)")
WRITTEN_FOR = re.compile(r"\bWritten for (.+?); it has not been run by us\.")


@dataclass(frozen=True)
class Listed:
    """What a config's file says about it."""

    name: str
    command: str
    """The command that runs it: train or eval."""
    kind: str
    """`runner.task_type`."""
    task: str
    about: str
    """The first sentence of its comment."""
    time: str
    """Measured time, `3.3 min`; empty where it was not measured."""
    hardware: str
    """The hardware on which that was measured, or for which the config is written."""

    @property
    def takes(self) -> str:
        """`3.3 min on 2 CPU cores`, `not run; for eight GPUs of 80 GB`, or `time not measured`."""
        if self.time:
            return f"{self.time} on {self.hardware}"
        return f"not run; for {self.hardware}" if self.hardware else "time not measured"


def configs(arguments: Sequence[str]) -> int:
    """Print the list. Returns the exit code: 1 where no config has all words."""
    parser = argparse.ArgumentParser(
        prog="rlinf-lite configs", description="List the configs, with their subject, task, time and hardware."
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="list only configs whose entry has all these words")
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    options = parser.parse_intermixed_args(arguments)
    found = [one for one in every_config() if _has(one, options.words)]
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return 0
    if not found:
        print(f"no config has {' and '.join(options.words)}. rlinf-lite configs lists all", file=sys.stderr)
        return 1
    name_width, command_width = (max(len(getattr(one, key)) for one in found) for key in ("name", "command"))
    width = text_width(in_pipe=120)
    for one in found:
        print(f"{one.name:<{name_width}}  {one.command:<{command_width}}  {one.takes}")
        print(textwrap.fill(f"{one.task}: {one.about}.", width, initial_indent="    ", subsequent_indent="    "))
    return 0


def every_config() -> list[Listed]:
    """The configs under `configs/`, in the order of their paths."""
    files = [path for path in sorted(shipped("configs").rglob("*.yaml")) if path.parent.name != "base"]
    return [_read(path) for path in files]


def _read(path: Path) -> Listed:
    header = path.read_text(encoding="utf-8").partition("\ndefaults:")[0].splitlines()
    lines = [line.removeprefix("#") for line in header if "@package" not in line]
    text = " ".join(line.strip() for line in lines)
    prose = " ".join(line.strip() for line in itertools.takewhile(lambda line: not line.startswith("   "), lines))
    takes, written, content = TAKES.search(text), WRITTEN_FOR.search(text), _composed(path)
    task_type, env = content["runner"].get("task_type", "embodied"), content.get("env", {})
    if task_type == "reasoning":
        files = content.get("data", {}).get("train_files")
        task = Path(files[0]).parent.name if files else "arithmetic"
    else:
        task = f"{env['id']} {env.get('task') or next(iter(env_card(env['id']).tasks))}"
    return Listed(
        name=path.stem,
        command="eval" if task_type == "eval" else "train",
        kind=task_type,
        task=task,
        about=re.split(r"(?<=\.) ", prose, maxsplit=1)[0].rstrip(":."),
        time=takes[1] if takes else "",
        hardware=takes[2] if takes else written[1] if written else "",
    )


def _composed(path: Path) -> dict[str, Any]:
    """The content of a config's file, merged with its defaults. Hydra would take seconds for all configs, which use no
    more of its composition than this."""
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    merged: dict[str, Any] = {}
    for name in content.pop("defaults", ["_self_"]):
        _merge(merged, content if name == "_self_" else _composed(path.parent / f"{name}.yaml"))
    return merged


def _merge(into: dict[str, Any], content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _has(one: Listed, words: Sequence[str]) -> bool:
    text = " ".join([one.name, one.command, one.takes, one.task, one.about]).lower()
    return all(word.lower() in text for word in words)
