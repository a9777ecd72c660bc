"""The tokenizer of a language run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.resources import policy_directory, start_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS = "assets/char_tokenizer"
"""The tokenizer of models that are built with random weights."""


class TokenizerError(ValueError):
    """A directory holds no tokenizer, or the tokenizer has no token that ends a response."""


def tokenizer_dir(cfg: ReasoningConfig) -> Path:
    """The directory of the tokenizer that the config names, else of the model's, else of characters."""
    return policy_directory(cfg.actor.tokenizer.tokenizer_model or start_dir(cfg) or CHARACTERS)


def load_tokenizer(cfg: ReasoningConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a run. Raises TokenizerError."""
    directory = tokenizer_dir(cfg)
    tokenizer = read_tokenizer(directory, "Set actor.tokenizer.tokenizer_model")
    if tokenizer.eos_token_id is None:
        raise TokenizerError(f"the tokenizer in {directory} has no eos_token, so that no response would ever end")
    return tokenizer


def read_tokenizer(directory: Path, hint: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a directory. Raises TokenizerError, whose message ends with `hint`."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{directory} holds no tokenizer ({error}). {hint}") from error
    return tokenizer


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, directory: Path, key: str) -> None:
    """Raise TokenizerError, which names `key`, if the model in `directory` numbers tokens otherwise than the run."""
    own, other = tokenizer.get_vocab(), read_tokenizer(directory, f"{key} needs the run's tokenizer").get_vocab()
    differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    if differing:
        text = f"{key}: {directory} numbers {len(differing)} tokens otherwise than the run's tokenizer"
        raise TokenizerError(f"{text} ({', '.join(map(repr, differing[:5]))}). Name a model with the same tokenizer")


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model: Any) -> tuple[int, ...]:
    """The tokens that end a response: those of the tokenizer, of config.json and of generation_config.json (chat models
    often list the end of a turn only there). `model`: a model of transformers."""
    found = {int(tokenizer.eos_token_id)}
    for config in (model.config, getattr(model, "generation_config", None)):
        listed = getattr(config, "eos_token_id", None)
        found |= set() if listed is None else {listed} if isinstance(listed, int) else set(listed)
    return tuple(sorted(found))
