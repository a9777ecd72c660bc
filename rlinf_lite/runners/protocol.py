"""The protocol of an evaluation: settings, seeds and code versions that make two evaluations comparable."""

from __future__ import annotations

import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

from rlinf_lite.cards import EnvCard, Suite
from rlinf_lite.config import Config
from rlinf_lite.config.plan import episode_steps, kept_scenes, observed
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import start_dir
from rlinf_lite.registry import env_card, policy_card
from rlinf_lite.shipped import PACKAGE

if TYPE_CHECKING:
    from rlinf_lite.envs import EnvSpec
    from rlinf_lite.models.base import PolicyInputs

_PACKAGES = (
    "rlinf_lite", "torch", "ray", "transformers", "numpy", "gymnasium", "mani_skill", "metaworld", "hf-libero",
    "robosuite", "mujoco", "peft",
)  # fmt: skip
"""Packages that results depend on."""


def protocol_of(
    cfg: Config,
    task_ids: Iterable[str],
    played: Mapping[str, Any],
    policy: Mapping[str, Any],
    spec: EnvSpec | None = None,
    reads: PolicyInputs | None = None,
) -> dict[str, Any]:
    """The protocol of an evaluation in a simulator, as JSON. `task_ids`: the task of each episode. `played` (rules of
    the simulator) and `policy` (options of the checkpoint): values that the config may leave open. `spec` and `reads`:
    see `notes_of`."""
    card, env, model = env_card(cfg.env.id), cfg.env, cfg.model
    counts = Counter(task_ids)
    fewest, most = min(counts.values()), max(counts.values())
    return {
        "suite": suite_of(card, cfg),
        "env": env.id,
        "task": env.task,
        "tasks": sorted(counts),
        "env_options": _plain(env.options),
        "num_episodes": env.eval.num_episodes,
        "episodes_per_task": fewest if fewest == most else [fewest, most],
        "initial_states": card.initial_states,
        "seed": env.eval.seed,
        **played,
        "num_action_chunks": model.num_action_chunks,
        "mode": env.eval.mode,
        "temperature": model.temperature if env.eval.mode == "sampled" else None,
        "model": model.id,
        "model_options": {**_plain(model.options), **policy},
        "started_from": str(started_from) if (started_from := start_dir(cfg)) else None,
        "notes": notes_of(cfg, spec, reads),
        **code(),
    }


def protocol_of_problems(cfg: ReasoningConfig, num_problems: int) -> dict[str, Any]:
    """The protocol of an evaluation on problems of a language run, as JSON."""
    data, generation = cfg.data, cfg.rollout
    return {
        "problems": data.val_files,
        "arithmetic": None if data.val_files else data.arithmetic.model_dump(),
        "num_problems": num_problems,
        "seed": cfg.runner.seed,
        "max_prompt_length": data.max_prompt_length,
        "max_response_length": generation.max_response_length,
        "engine": generation.engine,
        "tokenizer": cfg.actor.tokenizer.tokenizer_model,
        "reward": cfg.reward.model_dump(),
        **code(),
    }


def notes_of(cfg: Config, spec: EnvSpec | None, reads: PolicyInputs | None) -> list[str]:
    """Notes for the user: settings of the starting policy that the run changes, settings that it leaves open, and
    inputs that the policy reads but the environment does not give. `spec`, `reads`: None if not known."""
    directory, seen = start_dir(cfg), observed(cfg)
    lines = [] if directory is None else list(policy_card(cfg.model.id).notes(directory, cfg.model, seen))
    if spec is not None and not spec.has_instruction and reads is not None and reads.has_instruction:
        lines.append(f'{cfg.model.id} reads an instruction, and {cfg.env.task} gives none: it is "" in every row')
    return lines


def notes_of_run(cfg: Config, spec: EnvSpec | None, reads: PolicyInputs | None) -> list[str]:
    """`notes_of`, and a note on training environments that build another scene in most episodes."""
    lines = notes_of(cfg, spec, reads)
    num_scenes, num_envs = env_card(cfg.env.id).num_scenes(cfg.env.task), cfg.env.train.num_envs
    if cfg.runner.task_type == "embodied" and kept_scenes(cfg) < num_scenes:
        multiple = num_scenes * cfg.algorithm.group_size
        lines.append(
            f"{num_scenes} scenes cannot be divided evenly among env.train.num_envs={num_envs}, so that most "
            f"episodes of training build another one first. Multiples of {multiple} can"
        )
    return lines


def suite_of(card: EnvCard, cfg: Config) -> str | None:
    """The name of the published evaluation whose settings this config matches; None if there is none."""
    return next((name for name, suite in card.suites.items() if _keeps(cfg, suite)), None)


def code() -> dict[str, Any]:
    """The commit, if the package is in a git clone, and the versions of packages that results depend on."""
    return {"commit": commit(), "versions": versions()}


def versions() -> dict[str, str]:
    """The versions of Python and of the installed packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):  # not every run needs all of them
            found[package] = metadata.version(package)
    return found


def gpu_names() -> list[str]:
    """The GPUs of this machine, as nvidia-smi names them; empty without nvidia-smi."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split("\n")
        counts = Counter(name.strip() for name in found if name.strip())
        return [f"{count} x {name}" for name, count in counts.items()]
    return []


def commit() -> str | None:
    """The git commit of the package, with `-dirty` at its end if files were changed; None if it is not in a git
    clone."""
    root = PACKAGE.parent
    if not (root / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    return None


def _keeps(cfg: Config, suite: Suite) -> bool:
    plain = cfg.model_dump(mode="json")
    for key, wanted in suite.settings.items():
        found: Any = plain
        for part in key.split("."):
            found = found[part]
        if key == "env.eval.max_episode_steps":  # null is the task's own
            found = episode_steps(cfg, cfg.env.eval)
        if found != wanted:
            return False
    return True


def _plain(options: Any) -> Any:
    return options.model_dump(mode="json") if hasattr(options, "model_dump") else options
