"""The tokenizer of a reasoning run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import policy_directory, start_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS = "assets/char_tokenizer"
"""The tokenizer of models that are built here."""


class TokenizerError(ValueError):
    """A directory that holds no tokenizer, or one that cannot end a response."""


def tokenizer_dir(cfg: ReasoningConfig) -> Path:
    """The tokenizer that the config names, else the model's, else characters."""
    return policy_directory(cfg.actor.tokenizer.tokenizer_model or start_dir(cfg) or CHARACTERS)


def load_tokenizer(cfg: ReasoningConfig) -> PreTrainedTokenizerBase:
    """Raises TokenizerError."""
    directory = tokenizer_dir(cfg)
    tokenizer = read_tokenizer(directory, "Set actor.tokenizer.tokenizer_model")
    if tokenizer.eos_token_id is None:
        raise TokenizerError(f"the tokenizer in {directory} has no eos_token, so that no response would ever end")
    return tokenizer


def read_tokenizer(directory: Path, hint: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory. Raises TokenizerError, whose text ends in `hint`."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{directory} holds no tokenizer ({error}). {hint}") from error
    return tokenizer


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model: Any) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's, and those that config.json and generation_config.json list, of which
    chat models have the end of a turn in the latter alone. `model`: transformers'."""
    found = {int(tokenizer.eos_token_id)}
    for config in (model.config, getattr(model, "generation_config", None)):
        listed = getattr(config, "eos_token_id", None)
        found |= set() if listed is None else {listed} if isinstance(listed, int) else set(listed)
    return tuple(sorted(found))
