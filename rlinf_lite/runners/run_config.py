"""The config of a resumed run: it is compared with the earlier config, which is kept beside the new one."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlinf_lite.config.explain import yaml_text
from rlinf_lite.config.names import cards_of, schema_keys
from rlinf_lite.config.schema import BaseConfig, Config
from rlinf_lite.file_modes import write_whole
from rlinf_lite.runners.checkpoints import CheckpointError

CONFIG = "config.yaml"

_FIXED = (
    *("runner.seed", "env", "model", "data", "reward", "sft"),
    *("rollout.num_chunks", "rollout.model_dir", "algorithm.group_size"),
    *("off_policy.num_critics", "off_policy.hidden_sizes", "off_policy.layer_norm"),
    *("actor.checkpoint_load_path", "actor.tokenizer", "critic.model_dir"),
)
"""Sections and keys that identify a run: seed, environment or data, model, sizes. Changing one needs
`runner.allow_changes`."""
_FREE = (
    *("env.eval", "env.num_threads", "model.temperature"),
    *("data.demos_dir", "data.fps", "data.val_files", "data.max_val_prompts", "data.arithmetic.num_val"),
    "reward.timeout_s",
)
"""Keys inside `_FIXED` that may change freely, besides the `free_options` of environment and policy cards."""
_FINAL = ("runner.seed", "data.num_prompts", "data.arithmetic.num_train")
"""Keys that a language run can never change: the order of its prompts could not continue."""
_ADAPTERS = ("model.lora", "model.options.lora")
"""Keys that no run can ever change: they decide which weights exist and which of them train."""
_EPISODES = ("runner.seed", "env", "algorithm.group_size")
"""Keys that the saved state of an unfinished episode depends on."""
_PLACES = (
    *("cluster.component_placement", "cluster.fuse", "rollout.pipeline_stage_num"),
    *("runner.logger.log_path", "actor.checkpoint_save_path"),
)
"""Keys that decide where the run works and where its files go. They change no result."""
_OF_RESUMING = ("runner.resume", "runner.allow_changes")
_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A key whose value has changed."""

    key: str
    was: Any
    now: Any
    is_fixed: bool
    """Whether the key identifies the run (`_FIXED`)."""

    def __str__(self) -> str:
        return f"{self.key}: {yaml_text(self.was)} -> {yaml_text(self.now)}"

    def within(self, names: tuple[str, ...] | list[str]) -> bool:
        return _is_within(self.key, names)


def read_config(file: Path) -> dict[str, Any] | None:
    """The content of a config.yaml; None if there is no such file or it is no config."""
    try:
        content = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return content if isinstance(content, dict) else None


def find_changes(saved: Mapping[str, Any], cfg: BaseConfig) -> list[Change]:
    """The keys with different values, among the keys that both configs have: `saved` may come from another version."""
    content = cfg.model_dump(mode="json")
    cards = cards_of(content, type(cfg))
    free = [f"{key}.{name}" for key, found in cards.items() for card in found for name in card.free_options]
    keys = schema_keys(type(cfg), cards)
    sections = {key.rpartition(".")[0] for key in keys}
    changes = []
    for key in (key for key in keys if key not in sections and not _is_within(key, _OF_RESUMING)):
        was, now = (_value(one, key.split(".")) for one in (saved, content))
        if was is not _ABSENT and was != now:
            is_fixed = _is_within(key, _FIXED) and not _is_within(key, (*_FREE, *free))
            changes.append(Change(key, was, now, is_fixed))
    return changes


def changes_episodes(saved: Mapping[str, Any], cfg: BaseConfig) -> list[Change]:
    """The changes after which unfinished episodes cannot go on. The number of environments is not one of them: the
    environments that remain go on."""
    changes = [change for change in find_changes(saved, cfg) if change.is_fixed and change.within(_EPISODES)]
    return [change for change in changes if change.key != "env.train.num_envs"]


def changes_since(checkpoint: Path, cfg: BaseConfig) -> list[Change] | None:
    """The changes between the config saved in `checkpoint` and `cfg`; None if the checkpoint has no config. Raises as
    `check_changes` does."""
    saved = read_config(checkpoint / "training_state" / CONFIG)
    changes = None if saved is None else find_changes(saved, cfg)
    changes = changes and [change for change in changes if change.key != "runner.logger.log_path"]
    check_changes(changes or [], cfg, checkpoint)
    return changes


def check_changes(changes: list[Change], cfg: BaseConfig, checkpoint: Path) -> None:
    """Raise CheckpointError if a key that identifies the run has changed and `runner.allow_changes` does not name
    it."""
    allowed = cfg.runner.allow_changes
    final = (*_ADAPTERS, *(_FINAL if cfg.runner.task_type == "reasoning" else ()))
    kinds = [change for change in changes if change.key == "runner.task_type"]
    refused = [change for change in changes if change.is_fixed and (change.within(final) or not change.within(allowed))]
    if kinds:
        from rlinf_lite.config.loading import as_override  # loads Hydra

        weights = shlex.quote(as_override("actor.checkpoint_load_path", str(checkpoint)))
        text = f"{checkpoint} is of another kind of run ({kinds[0]})"
        raise CheckpointError(f"{text}. To start from its weights: runner.resume=never {weights}")
    if not refused:
        return
    lines = [f"{checkpoint} cannot be resumed: it is of a run with other settings", *(f"  - {one}" for one in refused)]
    advice = "Put them back, or start a new run with runner.resume=never"
    if any(change.within(_ADAPTERS) for change in refused):
        advice += (
            ": adapters cannot change within a run. That one can start from these weights "
            f"(actor.checkpoint_load_path), adapters merged by `rlinf-lite export {checkpoint} --to hf DIR ...`"
        )
    elif any(change.within(final) for change in refused):
        advice += "; the order of prompts could not be continued"
    else:
        keys = ",".join([*allowed, *(change.key for change in refused)])
        advice += f". To go on with them changed: 'runner.allow_changes=[{keys}]'"
        if any(change.within(["env", "model"]) for change in refused):
            advice += ", if the policy keeps its shapes"
    raise CheckpointError("\n".join([*lines, advice]))


def check_options(saved: Mapping[str, Any], cfg: BaseConfig, checkpoint: Path) -> None:
    """Raise CheckpointError if an evaluation changes options of the policy in `checkpoint` that its weights determine.

    Those are all options except `free_options` and those whose default is null, which means the checkpoint's value. For
    a policy without an Options class they are all options.
    """
    options = cfg.model.options if isinstance(cfg, Config) else None
    fields = getattr(type(options), "model_fields", {})
    settled = [f"model.options.{name}" for name, field in fields.items() if field.default is not None]
    if isinstance(options, dict):
        settled = ["model.options"]
    refused = [change for change in find_changes(saved, cfg) if change.is_fixed and change.within(settled)]
    if refused:
        lines = [f"{checkpoint} cannot be measured with other options than it has", *(f"  - {one}" for one in refused)]
        raise CheckpointError("\n".join([*lines, "Leave them out"]))


def write_config(cfg: BaseConfig, directory: Path) -> None:
    """Write config.yaml, completely or not at all."""
    write_whole(directory / CONFIG, yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))


def write_run_config(cfg: BaseConfig, run_dir: Path, completed_steps: int) -> Path | None:
    """Write a run's config.yaml. An earlier config that gave other results is kept as config.1.yaml, config.2.yaml and
    so on; returns its path, or None."""
    file, kept = run_dir / CONFIG, None
    if file.exists():
        saved = read_config(file)
        changes = None if saved is None else find_changes(saved, cfg)
        if changes == []:
            return None
        if changes is not None and all(change.within(_PLACES) for change in changes):
            write_config(cfg, run_dir)
            return None
        number = next(number for number in range(1, 10**6) if not (run_dir / f"config.{number}.yaml").exists())
        kept = run_dir / f"config.{number}.yaml"
        kept.write_text(
            f"# until the run was resumed with other settings, after step {completed_steps}\n" + file.read_text()
        )
    write_config(cfg, run_dir)
    return kept


def _value(content: Any, path: list[str]) -> Any:
    """The value at `path` in a nested dict; _ABSENT if there is none."""
    for name in path:
        if not isinstance(content, Mapping) or name not in content:
            return _ABSENT
        content = content[name]
    return content


def _is_within(key: str, names: Iterable[str]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)
