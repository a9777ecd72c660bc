"""Checks against what is outside the config: names, installed packages, files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rlinf_lite.config.names import did_you_mean, known_names
from rlinf_lite.config.schema import Config
from rlinf_lite.shipped import shipped

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def find_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Keys and what is wrong with them."""
    yield from _names(config)
    yield from _packages(config)
    yield from _paths(config)


def policy_directory(path: str | Path) -> Path:
    """Where `config.json` and weights are: `path`, or for a checkpoint step directory its `policy/`.

    `assets/...` that is not in the working directory is what comes with the package.
    """
    directory = Path(path)
    if directory.parts[:1] == ("assets",) and not directory.exists():
        directory = shipped("assets").joinpath(*directory.parts[1:])
    return directory / "policy" if (directory / "policy").is_dir() else directory


def _names(config: Config) -> Iterator[tuple[str, str]]:
    used = {
        "algorithm.adv_type": (config.algorithm.adv_type, " Your own: pkg.module:function"),
        "algorithm.loss_type": (config.algorithm.loss_type, " Your own: pkg.module:function"),
        "env.id": (config.env.id, " Your own: pkg.module:make_env"),
        "model.id": (config.model.id, " Your own: pkg.module:Class"),
    }
    for key, (name, own) in used.items():
        known = known_names(key)
        if name in known or _IMPORT_PATH.fullmatch(name):
            continue
        yield key, f"{key}: nothing is registered as {name!r}. {did_you_mean(name, known)}{own}"


def _packages(config: Config) -> Iterator[tuple[str, str]]:
    if config.env.id == "maniskill" and find_spec("mani_skill") is None:
        yield "env.id", f"env.id: maniskill is not installed (no module mani_skill). {install_command('maniskill')}"
    if "wandb" in config.runner.logger.backends and find_spec("wandb") is None:
        key = "runner.logger.backends"
        yield key, f"{key}: wandb is not installed. {install_command('wandb')}, or leave it out"
    if config.model.attn_implementation == "flash_attention_2" and find_spec("flash_attn") is None:
        key = "model.attn_implementation"
        yield (
            key,
            f"{key}: flash_attention_2 is not installed (no module flash_attn). {install_command('gpu')}, or use sdpa",
        )


def install_command(extra: str) -> str:
    """How to install an extra of rlinf_lite, for the end of an error message."""
    return f"pip install 'rlinf_lite[{extra}]' (in a clone: pip install -e '.[{extra}]')"


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    for key, path in (
        ("rollout.model_dir", config.rollout.model_dir),
        ("actor.checkpoint_load_path", config.actor.checkpoint_load_path),
        ("data.teacher_dir", config.data.teacher_dir),
    ):
        if path is not None and not policy_directory(path).is_dir():
            yield (
                key,
                f"{key}: no directory {path!r} (looked for {Path(path).absolute()}). Correct it, or set it to null",
            )
    resume = config.runner.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        yield (
            "runner.resume",
            f"runner.resume: no directory {resume!r} (looked for {Path(resume).absolute()}). "
            "Use auto, never, or the path of a run or checkpoint",
        )
