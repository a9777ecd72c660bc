"""Inputs of an OpenVLA policy: camera images as pixel values, as published image processors compute them, and
instructions as token ids.

Resizing and cropping give whole grey levels, as in PIL and in the evaluation code of the published policies. So they
are done once per image, and stored images stay uint8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlinf_lite.models.pictures import kept, resized
from rlinf_lite.models.vla.config import VLAConfig

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation in DINOv2's training
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # those in SigLIP's
_CROP_SIDE = math.sqrt(0.9)  # a crop of nine tenths of the area


def resize_images(images: Tensor, cfg: VLAConfig) -> Tensor:
    """Images uint8 [..., H, W, 3] resized to [..., S, S, 3], then cropped to the centre if the policy does so.

    The aspect ratio is not kept ("resize-naive"). Without a crop, images of the right size are returned as they are.
    """
    size = cfg.image_size
    images = resized(images, (size, size))
    if not cfg.center_crop:
        return images
    x = images.reshape(-1, size, size, 3).permute(0, 3, 1, 2).double()
    weights = _bilinear_crop(size, images.device)
    x = (weights @ x @ weights.T * (255.5 / 255)).floor().clamp(0, 255)  # as TensorFlow converts to uint8
    return x.to(torch.uint8).permute(0, 2, 3, 1).reshape(images.shape)


def normalize_images(images: Tensor, cfg: VLAConfig) -> Tensor:
    """Pixel values float32 [B, cameras * towers * 3, S, S] of images [B, cameras, S, S, 3] from `resize_images`.

    Each camera has three channels normalised for DINOv2, then three for SigLIP; only one of them for a single tower.
    """
    towers = [moments for moments, tower in ((_IMAGENET, cfg.dino), (_HALF, cfg.siglip)) if tower is not None]
    mean, std = _moments(tuple(towers), images.device)
    batch, cameras, size, _, _ = images.shape
    channels_first = images.permute(0, 1, 4, 2, 3)
    pixels = torch.cat([channels_first] * len(towers), dim=2).float()  # [B, cameras, towers * 3, S, S]
    pixels.mul_((1 / (255 * std))[:, None, None]).sub_((mean / std)[:, None, None])
    return pixels.view(batch, cameras * len(towers) * 3, size, size)


@partial(kept, most=None)
def _moments(towers: tuple[tuple[tuple[float, ...], ...], ...], device: torch.device) -> Tensor:
    """Means and standard deviations, [2, channels], of the channels of all towers."""
    return torch.tensor(towers, device=device).transpose(0, 1).flatten(1)


@kept
def _bilinear_crop(size: int, device: torch.device) -> Tensor:
    """Weights [out, in] that stretch the middle of a row over the whole row, with corner pixels aligned.

    `tf.image.crop_and_resize`, which published policies are trained and evaluated with, does the same.
    """
    first = (1 - _CROP_SIDE) / 2
    at = (first + torch.linspace(0, 1, size, dtype=torch.float64) * _CROP_SIDE) * (size - 1)
    distance = (at[:, None] - torch.arange(size, dtype=torch.float64)).abs()
    return (1 - distance).clamp(min=0).to(device)


class TokenizerError(ValueError):
    """The tokenizer is missing, or is not the one that the policy was trained with."""


class PromptTooLongError(ValueError):
    """A prompt longer than `model.options.max_prompt_length`, or a value of that option for which the language model's
    context has no room."""


class PromptEncoder:
    """Prompts of instructions as padded token ids; each instruction is tokenised once.

    A row is `<s>`, padding, then the rest of the prompt. So images can be inserted directly after `<s>`, and the prompt
    ends where the actions begin.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, cfg: VLAConfig) -> None:
        """Checks tokenizer and lengths before any instruction is seen.

        Raises:
            TokenizerError: if the tokenizer does not start and end a prompt as the policy needs.
            PromptTooLongError: if a prompt of `max_prompt_length` does not fit the language model's context.
        """
        self._tokenizer, self._cfg = tokenizer, cfg
        context = int(cfg.text.get("max_position_embeddings", 2048))
        others = len(cfg.cameras) * cfg.num_patches + cfg.num_action_tokens + (cfg.proprio_dim > 0) + cfg.append_stop
        if cfg.max_prompt_length + others > context:
            raise PromptTooLongError(
                f"model.options.max_prompt_length: {cfg.max_prompt_length} tokens and {others} of images and actions "
                f"do not fit the language model's context of {context}. Use {context - others} or less, fewer cameras "
                "or shorter chunks"
            )
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
        """An encoder with the `tokenizer.json` of a policy's directory. Raises TokenizerError if there is none."""
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
            PromptTooLongError: if a prompt has more than L tokens.
        """
        length = self._cfg.max_prompt_length
        for instruction in [one for one in dict.fromkeys(instructions) if one not in self._rows]:
            ids = self.token_ids(instruction)
            padding = length - len(ids)
            if padding < 0:
                raise PromptTooLongError(
                    f"the prompt of {instruction!r} has {len(ids)} tokens, model.options.max_prompt_length is "
                    f"{length}. Raise it to {len(ids)} or more, or shorten the instruction"
                )
            mask = torch.ones(length, dtype=torch.bool)
            mask[1 : 1 + padding] = False
            self._rows[instruction] = torch.tensor([ids[0], *[self._cfg.pad_token_id] * padding, *ids[1:]]), mask
        rows = [self._rows[instruction] for instruction in instructions]
        return torch.stack([ids for ids, _ in rows]), torch.stack([mask for _, mask in rows])

    def _tokenised(self, ids: list[int]) -> str:
        pieces = self._tokenizer.convert_ids_to_tokens(ids)
        return f"the tokenizer turns a prompt into {' '.join(map(str, ids))} ({' '.join(map(repr, pieces))})"
