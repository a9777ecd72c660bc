"""A reward model: a sequence classifier of transformers that maps a prompt with a response to a number.

Its input as text: for a chat, the messages with the response as the assistant's, joined by the reward model's own chat
template if it has one, else their contents, one line each; for a plain text, the text with the response right after it.
Special tokens are those of its template, else those that its tokenizer adds to text. The score is the logit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
)

from rlinf_lite.config.reasoning import RewardConfig
from rlinf_lite.config.resources import labels_of, policy_config, policy_directory
from rlinf_lite.data.tokenizers import read_tokenizer
from rlinf_lite.models.text.causal_lm import UnsupportedModelError, read_pretrained
from rlinf_lite.rewards.registry import RewardError
from rlinf_lite.rewards.scorer import RewardResult
from rlinf_lite.scheduler.heartbeat import report_progress

log = logging.getLogger(__name__)

Prompt = str | Sequence[Mapping[str, str]]
"""Text, or the messages of a chat."""
_PROBES = ("1 2 3 4 5 6 7 8 9 a b c", "c 3")
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative difference of scores that counts as rounding."""


def check_reward_model(cfg: RewardConfig) -> None:
    """Raise RewardError if transformers has no classifier for the model type of `cfg.model`, TokenizerError if that has
    no tokenizer. Reads no weights."""
    directory = policy_directory(str(cfg.model))
    _tokenizer(cfg)
    try:
        found = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RewardError(f"{directory} is no model of transformers: {error}", "reward.model") from error
    if type(found) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        text = f"transformers has no sequence classifier of type {found.model_type!r} ({directory}). Name another model"
        raise RewardError(text, "reward.model")


class RewardModel:
    """The classifier in `cfg.model`, as a whole on `device`."""

    def __init__(self, cfg: RewardConfig, max_tokens: int, device: str) -> None:
        """`max_tokens`: most tokens of a forward pass, with padding; a longer text gets a pass of its own.

        Raises CheckpointFormatError, TokenizerError, and UnsupportedModelError if its forward pass fails.
        """
        directory = policy_directory(str(cfg.model))
        self.dtype = torch.bfloat16 if cfg.precision == "bf16" else torch.float32
        self.max_tokens, self.device = max_tokens, device
        self.tokenizer = _tokenizer(cfg)
        ignored = ("",)  # any part of the checkpoint that a classifier does not have
        read: Any = read_pretrained(AutoModelForSequenceClassification, directory, self.dtype, may_ignore=ignored)
        self.model = read.to(device).eval().requires_grad_(False)
        self.label = 0 if cfg.label is None else labels_of(policy_config(directory)).index(cfg.label)
        self.config = self.model.config.get_text_config()
        positions = getattr(self.config, "max_position_embeddings", None)
        for module in self.model.modules():  # families such as RoBERTa count positions from padding_idx + 1 on
            if isinstance(module, nn.Embedding) and module.num_embeddings == positions and module.padding_idx:
                positions -= module.padding_idx + 1
        rooms = (cfg.max_length, positions, self.tokenizer.model_max_length)
        self.max_length = min(room for room in rooms if room is not None and room > 0)  # -1: no limit (XLNet)
        self.max_rows = 1 if self._is_changed_by_padding() else None

    def score_batch(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> RewardResult:
        """Score B prompts with B responses. A row scores 0, and is reported as a problem, if it has no tokens or no
        finite score, or if the chat template or the model refuses it."""
        scores, problems = np.zeros(len(prompts), np.float32), dict[int, str]()
        rows: dict[int, list[int]] = {}
        num_cut = 0
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            try:
                rows[row], is_cut = self._encode(prompt, response)
                num_cut += is_cut
            except TemplateError as error:
                problems[row] = f"the reward model's chat template refuses {prompt!r:.200}: {error}"
        empty = [row for row, ids in rows.items() if not ids]
        problems |= {row: f"the reward model's tokenizer makes no tokens of {prompts[row]!r:.200}" for row in empty}
        order = sorted((row for row in rows if rows[row]), key=lambda row: -len(rows[row]))  # similar lengths together
        parts = []
        while order:
            size = self.max_rows or max(self.max_tokens // len(rows[order[0]]), 1)
            parts.append(order[:size])
            order = order[size:]
        while parts:
            some = parts.pop(0)
            report_progress()
            try:
                found = self._forward([rows[row] for row in some]).tolist()
            except torch.OutOfMemoryError:
                raise
            except (ValueError, RuntimeError, IndexError) as error:  # a text that this model family cannot process
                if len(some) > 1:
                    parts = [[row] for row in some] + parts
                else:
                    problems[some[0]] = f"the reward model fails at {responses[some[0]]!r:.200}: {error}"
                continue
            for row, score in zip(some, found, strict=True):
                if math.isfinite(score):
                    scores[row] = score
                else:
                    problems[row] = f"the reward model gives {score} to {responses[row]!r:.200}"
        return RewardResult(scores, dict(sorted(problems.items())), num_cut=num_cut)

    def _encode(self, prompt: Prompt, response: str) -> tuple[list[int], bool]:
        """The token ids, cut from the left to `max_length` (special tokens are kept), and whether they were cut."""
        is_chat = not isinstance(prompt, str) and self.tokenizer.chat_template is not None
        if isinstance(prompt, str):
            text = prompt + response
        elif is_chat:
            text = str(self.tokenizer.apply_chat_template(_answered(prompt, response), tokenize=False))
        else:
            text = "\n".join(message["content"] for message in _answered(prompt, response))
        ids: list[int] = self.tokenizer(text, add_special_tokens=not is_chat)["input_ids"]
        if len(ids) <= self.max_length:
            return ids, False
        cut = self.tokenizer(text, add_special_tokens=not is_chat, truncation=True, max_length=self.max_length)
        return cut["input_ids"], True

    @torch.no_grad()
    def _forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Logits float32 [b] of rows of tokens, together in one pass."""
        if len(rows) > 1 and self.config.pad_token_id is None:
            # such a model reads the score at the last token that is not padding: any token that is in no row can pad
            seen = {token for row in rows for token in row}
            padding = next(token for token in count() if token not in seen)
            if padding >= self.config.vocab_size:
                return torch.cat([self._forward([row]) for row in rows])
            self.config.pad_token_id = padding
            try:
                return self._forward(rows)
            finally:
                self.config.pad_token_id = None
        longest, padding = max(map(len, rows)), self.config.pad_token_id or 0
        ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        logits: Tensor = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
        return logits[:, self.label].float().cpu()

    def _is_changed_by_padding(self) -> bool:
        """Whether padding changes the scores, so that texts must be scored one by one. Tested, since not all model
        families ignore padding."""
        rows = [self._encode(text, "")[0] for text in _PROBES]
        if not all(rows):
            return False
        try:
            alone = torch.cat([self._forward([row]) for row in rows])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model's own forward pass may raise anything
            kind = self.config.model_type
            raise UnsupportedModelError(
                f"the reward model, of type {kind!r}, fails here with {type(error).__name__}: {error}. Use another one"
            ) from error
        try:
            gap = (self._forward(rows) - alone).abs() / (1 + alone.abs())
            problem = f"padding changes its scores by {gap.max():.2g}" if gap.max() > _TOLERANCE[self.dtype] else None
        except (ValueError, RuntimeError, IndexError) as error:
            problem = f"it takes no padding ({error})"
        if problem is not None:
            log.warning("the reward model scores one text at a time, which takes longer: %s", problem)
        return problem is not None


def _answered(prompt: Sequence[Mapping[str, str]], response: str) -> list[dict[str, str]]:
    """The chat with the response as the assistant's message, or as the rest of the message that the assistant began."""
    messages = [*map(dict, prompt)]
    begun = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else ""
    return [*messages, {"role": "assistant", "content": begun + response}]


def _tokenizer(cfg: RewardConfig) -> PreTrainedTokenizerBase:
    tokenizer = read_tokenizer(policy_directory(str(cfg.model)), "reward.model needs its own beside the weights")
    tokenizer.truncation_side = "left"  # keep the end: the response is there
    return tokenizer
