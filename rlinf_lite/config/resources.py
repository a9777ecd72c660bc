"""Checks against what is outside the config: names, installed packages, files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from rlinf_lite.config.explain import schema_keys
from rlinf_lite.config.names import IMPORT_PATH, did_you_mean, known_names
from rlinf_lite.config.schema import BaseConfig, Config, RunnerConfig
from rlinf_lite.shipped import shipped


def find_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Keys and what is wrong with them."""
    yield from _names(config)
    if config.env.id == "maniskill" and find_spec("mani_skill") is None:
        yield "env.id", f"env.id: maniskill is not installed (no module mani_skill). {install_command('maniskill')}"
    for key, path in (
        ("rollout.model_dir", config.rollout.model_dir),
        ("actor.checkpoint_load_path", config.actor.checkpoint_load_path),
    ):
        yield from ((key, text) for text in missing_directory(key, path))
    key = "data.teacher_dir"  # what is in it is checked elsewhere
    yield from ((key, text) for text in missing_directory(key, config.data.teacher_dir, is_policy=False))
    for text in (
        *package_problems(config.runner.logger.backends, config.model.attn_implementation),
        *resume_problems(config.runner),
        *unknown_changes(config),
    ):
        yield text.partition(":")[0], text


def policy_directory(path: str | Path) -> Path:
    """Where `config.json` and weights are: `path`, or the `policy/` of a checkpoint, of a run's its last one.

    `assets/...` that is not in the working directory is what comes with the package.
    """
    directory = Path(path)
    if directory.parts[:1] == ("assets",) and not directory.exists():
        directory = shipped("assets").joinpath(*directory.parts[1:])
    within = (directory / "policy", directory / "last" / "policy", directory / "checkpoints" / "last" / "policy")
    return next((found for found in within if found.is_dir()), directory)


def _names(config: Config) -> Iterator[tuple[str, str]]:
    used = {
        "algorithm.adv_type": (config.algorithm.adv_type, " Your own: pkg.module:function"),
        "algorithm.loss_type": (config.algorithm.loss_type, " Your own: pkg.module:function"),
        "env.id": (config.env.id, " Your own: pkg.module:make_env"),
        "model.id": (config.model.id, " Your own: pkg.module:Class"),
        "actor.strategy": (config.actor.strategy, " Your own: pkg.module:Class"),
    }
    for key, (name, own) in used.items():
        known = known_names(key)
        if name in known or IMPORT_PATH.fullmatch(name):
            continue
        yield key, f"{key}: nothing is registered as {name!r}. {did_you_mean(name, known)}{own}"


def package_problems(backends: Sequence[str], attn_implementation: str) -> Iterator[str]:
    """Packages that these need and that are not installed."""
    if "wandb" in backends and find_spec("wandb") is None:
        yield f"runner.logger.backends: wandb is not installed. {install_command('wandb')}, or leave it out"
    if attn_implementation == "flash_attention_2" and find_spec("flash_attn") is None:
        yield (
            "model.attn_implementation: flash_attention_2 is not installed (no module flash_attn). "
            f"{install_command('gpu')}, or use sdpa"
        )


def install_command(extra: str) -> str:
    """How to install an extra of rlinf_lite, for the end of an error message."""
    return f"pip install 'rlinf_lite[{extra}]' (in a clone: pip install -e '.[{extra}]')"


def missing_directory(key: str, path: str | None, is_policy: bool = True) -> Iterator[str]:
    """Where a policy, or something else in a directory, should be and is not."""
    if path is not None and not policy_directory(path).is_dir():
        yield f"{key}: no directory {path!r} (looked for {Path(path).absolute()}). Correct it, or set it to null"
    elif path is not None and is_policy and not (policy_directory(path) / "config.json").is_file():
        yield (
            f"{key}: {path!r} is no policy, nor a checkpoint or run that has one: {policy_directory(path)} has no "
            "config.json. Correct it, or set it to null"
        )


def unknown_changes(config: BaseConfig) -> Iterator[str]:
    """Names that `runner.allow_changes` has in vain."""
    known = set(schema_keys(type(config)))
    for name in config.runner.allow_changes:
        if name not in known:
            yield f"runner.allow_changes: there is no key {name!r}. {did_you_mean(name, known)}"


def resume_problems(runner: RunnerConfig) -> Iterator[str]:
    resume = runner.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        yield (
            f"runner.resume: no directory {resume!r} (looked for {Path(resume).absolute()}). "
            "Use auto, never, or the path of a run or checkpoint"
        )
