"""From instructions to the token ids that a VLA policy reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlinf_lite.models.vla.config import VLAConfig


class TokenizerError(ValueError):
    """There is no tokenizer, or not the one that the policy was trained with."""


class PromptTooLongError(ValueError):
    """A prompt longer than `model.options.max_prompt_length`, or that than what the language model's context leaves."""


class PromptEncoder:
    """Prompts of instructions, tokenised once per instruction and padded.

    A row is `<s>`, padding, the rest of the prompt: the first token stays where it is and the padding follows it, so
    that images can be put right behind `<s>`, and the prompt ends where the actions begin.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, cfg: VLAConfig) -> None:
        """Checks what can be known before any instruction is seen.

        Raises:
            TokenizerError: where the tokenizer does not start and end a prompt as the policy needs.
            PromptTooLongError: where a prompt of the longest length does not fit the language model's context.
        """
        self._tokenizer, self._cfg = tokenizer, cfg
        _check_context(cfg)
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}
        ids = self.token_ids("move")
        if cfg.bos_token_id is not None and ids[0] != cfg.bos_token_id:
            raise TokenizerError(f"{self._tokenised(ids)}; the policy needs it to start with id {cfg.bos_token_id}")
        if ids[-1] != cfg.empty_token_id:
            raise TokenizerError(
                f"{self._tokenised(ids)}; the policy needs it to end in id {cfg.empty_token_id}, the empty token. "
                "Take the tokenizer files that were published with the weights, or correct model.prompt"
            )

    @classmethod
    def from_directory(cls, directory: str | Path, cfg: VLAConfig) -> PromptEncoder:
        """With the `tokenizer.json` of a policy's directory. Raises TokenizerError where there is none."""
        if not (Path(directory) / "tokenizer.json").is_file():
            raise TokenizerError(
                f"{directory} has no tokenizer.json. Copy the tokenizer files of the base model there, or save them "
                "with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        return cls(PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True), cfg)

    def token_ids(self, instruction: str) -> list[int]:
        """The ids of an instruction's prompt, without padding."""
        prompt = self._cfg.prompt.replace("{instruction}", instruction.lower())
        return self._tokenizer(prompt)["input_ids"]

    def encode(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Ids int64 [B, L] and mask bool [B, L], on the CPU; L is `max_prompt_length`.

        Raises:
            PromptTooLongError: where a prompt has more than L tokens.
        """
        for instruction in instructions:
            if instruction not in self._rows:
                self._rows[instruction] = self._padded(instruction)
        rows = [self._rows[instruction] for instruction in instructions]
        return torch.stack([ids for ids, _ in rows]), torch.stack([mask for _, mask in rows])

    def _padded(self, instruction: str) -> tuple[Tensor, Tensor]:
        ids, length = self.token_ids(instruction), self._cfg.max_prompt_length
        padding = length - len(ids)
        if padding < 0:
            raise PromptTooLongError(
                f"the prompt of {instruction!r} has {len(ids)} tokens, model.options.max_prompt_length is {length}. "
                f"Raise it to {len(ids)} or more, or shorten the instruction"
            )
        mask = torch.ones(length, dtype=torch.bool)
        mask[1 : 1 + padding] = False
        return torch.tensor([ids[0], *[self._cfg.pad_token_id] * padding, *ids[1:]]), mask

    def _tokenised(self, ids: list[int]) -> str:
        pieces = self._tokenizer.convert_ids_to_tokens(ids)
        return f"the tokenizer turns a prompt into {' '.join(map(str, ids))} ({' '.join(map(repr, pieces))})"


def _check_context(cfg: VLAConfig) -> None:
    context = int(cfg.text.get("max_position_embeddings", 2048))
    others = len(cfg.cameras) * cfg.num_patches + cfg.num_action_tokens + (cfg.proprio_dim > 0) + cfg.append_stop
    if cfg.max_prompt_length + others > context:
        raise PromptTooLongError(
            f"model.options.max_prompt_length: {cfg.max_prompt_length} tokens, beside {others} of images and actions, "
            f"do not fit the language model's context of {context}. Use {context - others} or less, fewer cameras or "
            "shorter chunks"
        )
