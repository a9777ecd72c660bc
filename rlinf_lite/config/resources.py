"""The directories of policies and tokenizers, and the content of their `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlinf_lite.checksums import newest_checkpoint
from rlinf_lite.shipped import shipped

OWN_CONFIG = "rlinf_lite.json"
"""Our own file beside a published `config.json`. That one is not changed, since other readers refuse unknown fields."""


def policy_directory(path: str | Path) -> Path:
    """The directory with `config.json` and weights that `path` means: `path` itself, or `policy/` in a checkpoint. For
    a run, that of its last checkpoint, or else of its newest complete one.

    A path `assets/...` that is not in the working directory stands for a file that comes with the package.
    """
    directory = Path(path)
    if directory.parts[:1] == ("assets",) and not directory.exists():
        directory = shipped("assets").joinpath(*directory.parts[1:])
    if (directory / "config.json").is_file():  # a policy, even if checkpoints are beside it
        return directory
    checkpoints = (directory, directory / "last", *(root / "last" for root in checkpoint_roots(directory)))
    within = (checkpoint / "policy" for checkpoint in checkpoints)
    found = next((policy for policy in within if policy.is_dir()), None)
    if found is None:  # `last` is missing, or a broken link
        newest = next(filter(None, map(newest_checkpoint, (directory, *checkpoint_roots(directory)))), None)
        found = directory if newest is None else newest / "policy"
    return found


def why_no_policy(directory: Path) -> str | None:
    """A text that follows the directory's name and says why it holds no policy; None if it holds one."""
    if not directory.exists():
        return f": no such directory (looked for {directory.absolute()})"
    if (directory / "config.json").is_file():
        return None
    text = f"is no policy, nor a checkpoint or run that has one: {directory} has no config.json"
    return f" {text}. A run writes a checkpoint every runner.save_interval steps, and after its last"


def checkpoint_roots(run: Path) -> list[Path]:
    """The directories that may hold a run's checkpoints: the one in the run's directory, and the one that its
    config.yaml names."""
    roots = [run / "checkpoints"]
    try:
        content = yaml.load((run / "config.yaml").read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        roots.append(Path(content["actor"]["checkpoint_save_path"], run.absolute().name, "checkpoints"))
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        pass  # not the directory of a run, or a run that keeps its checkpoints itself
    return roots


def policy_config(directory: Path) -> dict[str, Any]:
    """The content of a policy's `config.json`, updated by that of `rlinf_lite.json` if there is one.

    Raises OSError and ValueError if they cannot be read.
    """
    own = directory / OWN_CONFIG
    said: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return said | (json.loads(own.read_text()) if own.is_file() else {})


def chunk_of(said: Mapping[str, Any]) -> int | None:
    """The number of actions per decision of a policy, from its `policy_config`; None if that does not say."""
    settings = said.get("rlinf_lite", {}).get("settings", said)
    found: int | None = settings.get("num_action_chunks")
    return found


def labels_of(said: Mapping[str, Any]) -> list[str]:
    """The labels of a classifier in transformers' layout, from its `config.json`. Two if that names none."""
    named = said.get("id2label")
    if isinstance(named, dict):
        return [str(named[number]) for number in sorted(named, key=int)]
    return [f"LABEL_{number}" for number in range(said.get("num_labels", 2))]


def tokenizer_dirs(config: Any) -> list[Path]:
    """The directories that may hold the tokenizer of a policy; the first that has one is used."""
    start, given = start_dir(config), config.actor.tokenizer.tokenizer_model
    if start is None:
        return [shipped("assets") / "tiny_tokenizer"]
    return [start, *([] if given is None else [policy_directory(given)])]


def start_key(config: Any) -> str:
    """The key that names the policy or model that a run starts from."""
    return "actor.checkpoint_load_path" if config.actor.checkpoint_load_path else "rollout.model_dir"


def start_dir(config: Any) -> Path | None:
    """The directory of the policy or model that a run starts from; None: random weights."""
    named = config.actor.checkpoint_load_path or config.rollout.model_dir
    return None if named is None else policy_directory(named)


def classifier_config(path: str | Path) -> dict[str, Any]:
    """The content of `config.json` of a success classifier, which `rlinf-lite reward` wrote. Raises ValueError if there
    is none."""
    file = policy_directory(path) / "config.json"
    if not file.is_file():
        text = f"no success classifier in {str(path)!r} (looked for {file.absolute()})"
        raise ValueError(f"{text}. Name the folder that rlinf-lite reward has written")
    content = json.loads(file.read_text())
    is_one = isinstance(content, dict) and content.get("classifier") == "success" and "vocabulary" in content
    cameras = content.get("cameras") if is_one else None
    if not isinstance(cameras, dict) or not cameras or not all(isinstance(x, list) for x in cameras.values()):
        raise ValueError(f"{str(path)!r} is no success classifier. Name a folder that rlinf-lite reward has written")
    found: dict[str, Any] = content
    return found


def classifier_misfit(trained: Mapping[str, Sequence[int]], given: Mapping[str, Sequence[int]]) -> str | None:
    """A text if a success classifier was `trained` on cameras that are not among the `given` ones, or on other sizes;
    None if it fits. Both are height and width of pictures, by camera."""
    if all(tuple(size) == tuple(given.get(camera, ())) for camera, size in trained.items()):
        return None
    mine, there = (
        ", ".join(f"{camera} ({size[0]} x {size[1]})" for camera, size in cameras.items()) or "no pictures"
        for cameras in (trained, given)
    )
    return f"the classifier judges {mine}, and the environment shows {there}. Train one on episodes of this environment"
