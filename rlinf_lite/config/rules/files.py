"""Rules for the run's name, directories to read and to write, the run to resume, and loggers."""

from __future__ import annotations

import netrc
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from rlinf_lite import registry
from rlinf_lite.cards import Problem
from rlinf_lite.config.names import MAX_FILE_NAME, cards_of, schema_keys
from rlinf_lite.config.resources import policy_directory, start_dir, why_no_policy
from rlinf_lite.config.rules import ALL, SIMULATED, Kind, rule
from rlinf_lite.config.schema import BaseConfig

MIN_FREE_BYTES = 50 * 2**20
"""Least free space on a disk that a run writes to: logs, films and a checkpoint of a tiny policy."""
_HUB_NAME = re.compile(r"(?:hf://(?:models/)?)?([\w-][\w.-]*/[\w.-]+)")


def _first_true(reasons: Mapping[str, bool]) -> str | None:
    return next((reason for reason, is_so in reasons.items() if is_so), None)


@rule("runner.run_name")
def _run_name_is_a_file_name(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    name = str(config.runner.run_name)
    reasons = {
        "is empty": not name.strip(),
        "has / or \\, which paths are made of": "/" in name or "\\" in name,
        "begins with a dot or a dash": name.startswith((".", "-")),
        "begins or ends with a space": name != name.strip(),
        "has signs that cannot be printed": not name.isprintable(),
        f"is longer than a file's name may be, {MAX_FILE_NAME} bytes": len(os.fsencode(name)) > MAX_FILE_NAME,
    }
    if reason := _first_true(reasons):
        yield Problem("runner.run_name", f"{name!r} {reason}. Choose another, of letters and digits")


def _written_rule(key: str) -> None:
    @rule(key)
    def directories_can_be_written(config: Any, plan: Any) -> Iterator[Problem]:
        """Check that directories can be written. Nothing is created before the run begins, so this checks the nearest
        existing parent directory."""
        written = attrgetter(key)(config)
        if written is None:
            return
        longest = max((len(os.fsencode(part)) for part in Path(written).parts), default=0)
        reasons = {
            "is empty": not written.strip(),
            "has control characters": re.search(r"[\x00-\x1f\x7f]", written) is not None,
            "begins with ~, which only shells read as a home directory": written.startswith("~"),
            f"has a name of more than {MAX_FILE_NAME} bytes": longest > MAX_FILE_NAME,
        }
        if reason := _first_true(reasons):
            yield Problem(key, f"{written!r} {reason}. Name a directory")
            return
        path = Path(written).absolute()
        above = next(one for one in (path, *path.parents) if one.exists())
        if not above.is_dir():
            yield Problem(key, f"{path} cannot be made: {above} is a file. Name another directory")
        elif not os.access(above, os.W_OK | os.X_OK) or os.statvfs(above).f_flag & os.ST_RDONLY:
            text = f"{path} cannot be written: {above} does not allow it. Name another directory"
            yield Problem(key, text, of_machine=True)
        elif (free := shutil.disk_usage(above).free) < MIN_FREE_BYTES:
            text = f"{free / 2**20:.0f} MiB are free in {above}, and a run writes {MIN_FREE_BYTES / 2**20:.0f} MiB"
            yield Problem(key, f"{text} or more. Free some, or name another directory", of_machine=True)


_written_rule("runner.logger.log_path")
_written_rule("actor.checkpoint_save_path")


def _directory_rule(key: str, is_policy: bool, kinds: tuple[Kind, ...]) -> None:
    @rule(key, kinds=kinds)
    def directories_are_there(config: Any, plan: Any) -> Iterator[Problem]:
        path = attrgetter(key)(config)
        if path is None:
            return
        where = policy_directory(path)
        if not where.is_dir():
            advice = "Correct it, or set it to null"
            if key == "rollout.model_dir":
                advice += ": random weights"
            if (on_hub := _HUB_NAME.fullmatch(path)) and not Path(path).parent.exists():
                advice = f"Models are not downloaded. First `hf download {on_hub[1]} --local-dir DIR`, then name DIR"
            yield Problem(key, f"no directory {path!r} (looked for {Path(path).absolute()}). {advice}")
        elif is_policy and (lacks := why_no_policy(where)) is not None:
            yield Problem(key, f"{path!r}{lacks}. Correct it, or set it to null")


_directory_rule("rollout.model_dir", True, ALL)
_directory_rule("actor.checkpoint_load_path", True, ALL)
_directory_rule("critic.model_dir", True, ("reasoning",))
_directory_rule("reward.model", True, ("reasoning",))
_directory_rule("actor.tokenizer.tokenizer_model", False, ALL)
_directory_rule("data.teacher_dir", False, SIMULATED)


@rule("actor.tokenizer.tokenizer_model", "rollout.model_dir", "actor.checkpoint_load_path", kinds=SIMULATED)
def _random_weights_have_a_tokenizer(config: Any, plan: Any) -> Iterator[Problem]:
    if config.actor.tokenizer.tokenizer_model is not None and start_dir(config) is None:
        text = "a policy of random weights brings its tokenizer. Set it to null, or rollout.model_dir to a policy"
        yield Problem("actor.tokenizer.tokenizer_model", text)


@rule("runner.resume")
def _run_to_resume(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    resume = config.runner.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        text = f"no directory {resume!r} (looked for {Path(resume).absolute()})"
        yield Problem("runner.resume", f"{text}. Use auto, never, or the path of a run or checkpoint")


@rule("runner.allow_changes")
def _changes_to_allow(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    known = schema_keys(type(config), cards_of(config.model_dump(), type(config)))
    for name in config.runner.allow_changes:
        if name not in known:
            yield Problem("runner.allow_changes", f"there is no key {name!r}. {registry.did_you_mean(name, known)}")


@rule("runner.logger.backends")
def _loggers_are_installed(config: BaseConfig, plan: Any) -> Iterator[Problem]:
    if "wandb" not in config.runner.logger.backends:
        return
    if not registry.is_installed("wandb"):
        text = f"wandb is not installed. {registry.install_command('wandb')}, or leave it out"
        yield Problem("runner.logger.backends", text)
    elif not _knows_wandb_key():
        text = "wandb has no key on this machine. `wandb login` stores one; WANDB_MODE=offline does without"
        yield Problem("runner.logger.backends", text, of_machine=True)


def _knows_wandb_key() -> bool:
    """Whether Weights & Biases would log in without a prompt, or needs no login."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = (Path("wandb/settings"), Path.home() / ".config/wandb/settings")  # where `wandb offline` writes
    if any("offline" in file.read_text() for file in settings if file.is_file()):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
