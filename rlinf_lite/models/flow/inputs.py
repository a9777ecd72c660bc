"""Inputs of a flow policy: pictures, prompts, states and actions, processed as in the policy's original training.

openpi resizes with PIL to whole grey levels, LeRobot with torch, to fractions and without antialiasing. The results
differ by up to 0.3 of a picture's range.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors
from torch import Tensor
from torch.nn import functional as F

from rlinf_lite.envs.observations import ObservationError as ObservationError
from rlinf_lite.models.flow.config import FlowConfig, Norm, StatisticsError

Numbers = TypeVar("Numbers", np.ndarray, Tensor)
_KNOWN_PROMPTS = 4096  # prompts whose ids are kept
_STATISTICS = {"mean_std": ("mean", "std"), "quantiles": ("q01", "q99"), "min_max": ("min", "max"), "identity": ()}


class TokenizerError(ValueError):
    """The tokenizer is missing, cannot be read, or does not fit the policy."""


class PromptTooLongError(ValueError):
    """A prompt longer than `model.options.max_prompt_length`."""


# pictures


def stored_images(images: np.ndarray, cfg: FlowConfig) -> Tensor:
    """Pictures uint8 [B, H, W, 3] as they are stored: in openpi's layout resized and padded, which gives whole grey
    levels; in LeRobot's as they are.

    Raises ObservationError for other types and shapes.
    """
    if images.dtype != np.uint8:
        raise ObservationError(f"images are {images.dtype}; uint8 from 0 to 255 is needed")
    if images.ndim != 4 or images.shape[3] != 3:
        raise ObservationError(f"images have shape {images.shape}; [rows, height, width, 3], red first, is needed")
    width, height = cfg.resize_to
    if cfg.layout == "lerobot" or images.shape[1:3] == (height, width):
        return torch.from_numpy(np.array(images, order="C"))  # a copy: messages are read-only, flips have odd strides
    new_width, new_height = cfg.fitting(images.shape[2], images.shape[1])
    left, top = (width - new_width) // 2, (height - new_height) // 2
    out = np.zeros((len(images), height, width, 3), np.uint8)
    for row, image in enumerate(images):
        resized = Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BILINEAR)
        out[row, top : top + new_height, left : left + new_width] = np.asarray(resized)
    return torch.from_numpy(out)


def pixel_values(images: Tensor, cfg: FlowConfig) -> Tensor:
    """Pixel values float32 [B, 3, H, W] in [-1, 1] of pictures from `stored_images`. Padding is -1 (black), but -3 for
    LeRobot 0.4."""
    pixels = images.permute(0, 3, 1, 2).float() / 255.0
    width, height = cfg.resize_to
    if pixels.shape[2:] != (height, width):
        new_width, new_height = cfg.fitting(pixels.shape[3], pixels.shape[2])
        pixels = F.interpolate(pixels, (new_height, new_width), mode="bilinear", align_corners=False)
        pixels = pixels if cfg.family == "smolvla" else pixels.clamp(0, 1)  # white is 1 + 1e-7 after interpolation
        across, down = width - new_width, height - new_height
        if cfg.family == "smolvla":
            pixels = F.pad(pixels, (across, 0, down, 0))  # all padding is left and on top
        else:
            sides = (across // 2, across - across // 2, down // 2, down - down // 2)
            pixels = F.pad(pixels, sides, value=-1.0 if cfg.lerobot_preprocessing == "v0.4" else 0.0)
    return pixels * 2.0 - 1.0


# states and actions


class Normalizer:
    """Converts `state` or `actions` between the robot's units and the network's, by statistics.

    openpi computes in float64 and adds 1e-6 to each divisor, in both directions. LeRobot computes in float32, adds 1e-8
    to standard deviations when it normalises, and uses 1e-8 for ranges that are 0.
    """

    def __init__(self, cfg: FlowConfig, name: str, num_dims: int) -> None:
        """Raises StatisticsError if the statistics do not fit."""
        self.kind: Norm = cfg.state_norm if name == "state" else cfg.action_norm
        self.kind = self.kind if num_dims else "identity"  # a robot without a state has no statistics of it
        self.num_dims, self._openpi, self._eps = num_dims, cfg.layout == "openpi", cfg.norm_eps
        found: list[np.ndarray] = []
        entry = cfg.statistics.get(name, {})
        for key in _STATISTICS[self.kind]:
            if key not in entry:
                raise StatisticsError(
                    f"{self.kind} needs {key} of {name}, and the statistics have {', '.join(entry) or 'none'}"
                )
            if len(entry[key]) < num_dims:  # longer ones are cut, as in openpi
                raise StatisticsError(
                    f"the statistics{f' of {cfg.asset_id}' if cfg.asset_id else ''} describe {len(entry[key])} numbers "
                    f"of {name}, and there are {num_dims}: they are for another robot"
                )
            found.append(np.array(entry[key][:num_dims], dtype=np.float64 if self._openpi else np.float32))
        self._statistics = tuple(found)
        if found:
            width = found[1] if self.kind == "mean_std" else found[1] - found[0]
            (bad,) = np.nonzero(~(np.isfinite(found[0]) & np.isfinite(width) & (width >= 0)))
            if len(bad):
                said = " and ".join(
                    f"{key} {numbers[bad[0]]}" for key, numbers in zip(_STATISTICS[self.kind], found, strict=True)
                )
                raise StatisticsError(
                    f"the statistics{f' of {cfg.asset_id}' if cfg.asset_id else ''} say {said} of {name}[{bad[0]}], "
                    "which is no range. Compute them again"
                )

    def normalize(self, x: Numbers) -> Numbers:
        """`x` [..., num_dims] in the network's units, in the type of the statistics."""
        if self.kind == "identity":
            return x
        given, one, other = self._alike(x)
        if self.kind == "mean_std":
            found = (given - one) / (other + self._eps)
        elif self._openpi:
            found = (given - one) / self._range(one, other) * 2 - 1
        else:
            found = 2 * (given - one) / self._range(one, other) - 1
        return cast(Numbers, found)

    def unnormalize(self, x: Numbers) -> Numbers:
        """`x` [..., num_dims] in the robot's units: the inverse of `normalize`."""
        if self.kind == "identity":
            return x
        given, one, other = self._alike(x)
        if self.kind == "mean_std":
            return cast(Numbers, given * (other + self._eps * self._openpi) + one)
        return cast(Numbers, (given + 1) / 2 * self._range(one, other) + one)

    @property
    def has_range(self) -> bool:
        return self.kind != "identity" and self.num_dims > 0

    def usual_range(self) -> tuple[list[float], list[float]]:
        """Low and high by dimension; by mean and standard deviation: two standard deviations to both sides."""
        one, other = (np.asarray(x, np.float64) for x in self._statistics)
        low, high = (one - 2 * other, one + 2 * other) if self.kind == "mean_std" else (one, other)
        return low.tolist(), high.tolist()

    def _alike(self, x: Any) -> tuple[Any, Any, Any]:
        """`x` in the type of the statistics, and these as arrays or tensors, as `x` is."""
        one, other = self._statistics
        if isinstance(x, Tensor):
            first, second = torch.from_numpy(one).to(x.device), torch.from_numpy(other).to(x.device)
            return x.to(first.dtype), first, second
        return np.asarray(x, dtype=one.dtype), one, other

    def _range(self, low: Any, high: Any) -> Any:
        found = high - low
        if self._openpi:
            return found + self._eps
        found[found == 0] = self._eps  # in float32, whose rounding can decide in which bin of the prompt a state is
        return found


def padded(x: Tensor, num_dims: int) -> Tensor:
    """`x` [..., n] followed by zeros, float32 [..., num_dims]."""
    return F.pad(x.float(), (0, num_dims - x.shape[-1]))


def read_state(obs: Mapping[str, Any], cfg: FlowConfig, num_rows: int) -> np.ndarray:
    """The states [B, state_dim] of an observation; no columns for a policy without a state. Raises ObservationError."""
    if cfg.state_dim == 0:
        return np.zeros((num_rows, 0), np.float32)
    if "state" not in obs:
        raise ObservationError(f"the policy reads {cfg.state_dim} state numbers, and the observation has none")
    state = np.asarray(obs["state"])
    if state.ndim != 2 or len(state) != num_rows:
        raise ObservationError(f"states have shape {state.shape}; [{num_rows}, {cfg.state_dim}] is needed")
    if state.shape[1] != cfg.state_dim:
        raise ObservationError(
            f"the policy reads {cfg.state_dim} state numbers, and the observation has {state.shape[1]}: it is from "
            "another robot"
        )
    if not np.isfinite(state).all():
        row, column = np.argwhere(~np.isfinite(state))[0]
        raise ObservationError(f"state[{column}] of row {row} is {state[row, column]}; a finite number is needed")
    return state


def read_instructions(obs: Mapping[str, Any]) -> Sequence[str]:
    """The instructions of an observation, a text per row. Raises ObservationError."""
    found: Sequence[Any] | None = obs.get("instruction")
    if found is None:
        raise ObservationError("the policy reads an instruction, and the observation has none")
    for row, text in enumerate(found):
        if not isinstance(text, str):
            raise ObservationError(f"the instruction of row {row} is {text!r}; a text is needed")
    return found


# prompts


def prompt_text(instruction: str, state: np.ndarray, cfg: FlowConfig) -> tuple[str, str]:
    """The text of a prompt, and a second text that is tokenised separately and appended.

    `state` [state_dim], normalised and not padded, is part of the text if `state_in_prompt`: as numbers of 256 bins on
    [-1, 1]; -1 is below, and 255 is also above. LeRobot 0.4 writes the padding of the state too.
    """
    if cfg.layout == "lerobot" and not cfg.state_in_prompt:  # pi0's and SmolVLA's
        return instruction if instruction.endswith("\n") else f"{instruction}\n", ""
    cleaned = instruction.strip().replace("_", " ").replace("\n", " ")
    if cfg.state_in_prompt:
        if cfg.lerobot_preprocessing == "v0.4":
            state = np.pad(state, (0, cfg.max_state_dim - len(state)))
        bins = np.digitize(state, np.linspace(-1, 1, 257)[:-1]) - 1
        return f"Task: {cleaned}, State: {' '.join(map(str, bins))};\nAction: ", ""
    return cleaned, "\n"


class PromptEncoder:
    """Prompts as token ids, padded on the right."""

    def __init__(self, tokenizer: Tokenizer, cfg: FlowConfig, pad_id: int = 0) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer, self._cfg, self._pad_id = tokenizer, cfg, pad_id
        self._known: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        plain: list[int] = tokenizer.encode("move", add_special_tokens=False).ids
        if cfg.family != "smolvla" and self.ids("move", "")[1 : 1 + len(plain)] != plain:
            raise TokenizerError("the tokenizer puts no first token (BOS) before a prompt, which the policy needs")

    @classmethod
    def from_directory(cls, directory: Path, cfg: FlowConfig) -> PromptEncoder:
        """An encoder with the tokenizer of a policy's directory (see `find_tokenizer`): a tokenizer.json, or a
        SentencePiece model. In openpi's layout, special tokens written in a text (<eos>) are plain words.

        Raises:
            TokenizerError: if the tokenizer is missing or cannot be read.
        """
        file = find_tokenizer(directory, cfg)
        if file is None:
            other = "Or set actor.tokenizer.tokenizer_model to a directory that has it."
            raise TokenizerError(f"{directory} has no tokenizer. {_how_to_get(cfg)}. {other}")
        if file.suffix == ".model":
            return cls(from_sentencepiece(file), cfg)
        tokenizer = _from_json(file)
        tokenizer.encode_special_tokens = cfg.layout == "openpi"
        return cls(tokenizer, cfg, _padding_id(tokenizer, file.parent))

    def ids(self, text: str, last: str) -> list[int]:
        """Ids of the two texts from `prompt_text`, without padding."""
        tokens: list[int] = self._tokenizer.encode(text).ids
        return tokens + (self._tokenizer.encode(last, add_special_tokens=False).ids if last else [])

    def encode(self, instructions: Sequence[str], states: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids int64 [B, L] and mask bool [B, L], on the CPU; L is `max_prompt_length`. `states` as in `prompt_text`.

        Raises:
            PromptTooLongError: if a prompt has more than L tokens.
        """
        texts = [prompt_text(one, state, self._cfg) for one, state in zip(instructions, states, strict=True)]
        if len(self._known) > _KNOWN_PROMPTS:
            self._known.clear()
        self._known |= {text: self._encode_one(*text) for text in dict.fromkeys(texts) if text not in self._known}
        rows = [self._known[text] for text in texts]
        return torch.stack([ids for ids, _ in rows]), torch.stack([mask for _, mask in rows])

    def _encode_one(self, text: str, last: str) -> tuple[Tensor, Tensor]:
        ids, length = self.ids(text, last), self._cfg.max_prompt_length
        if len(ids) > length and self._cfg.long_prompts == "error":
            raise PromptTooLongError(
                f"the prompt {text!r} has {len(ids)} tokens, and model.options.max_prompt_length is {length}. Raise it "
                f"to {len(ids)} or more, or set model.options.long_prompts to cut, which drops the end"
            )
        ids = ids[:length]
        padding = length - len(ids)
        mask = torch.tensor([True] * len(ids) + [False] * padding)
        return torch.tensor([*ids, *[self._pad_id] * padding]), mask


def find_tokenizer(directory: Path, cfg: FlowConfig) -> Path | None:
    """The tokenizer's file, in the directory or in its `tokenizer/` or `vlm/`: openpi's layout prefers a SentencePiece
    model, LeRobot's a tokenizer.json. None: there is none."""
    names, openpi = ("tokenizer.json", "tokenizer.model", "paligemma_tokenizer.model"), cfg.layout == "openpi"
    folders = (directory, directory / "tokenizer", directory / "vlm")
    files = (folder / name for name in ((*names[1:], names[0]) if openpi else names) for folder in folders)
    return next((file for file in files if file.is_file()), None)


def _from_json(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no class of its own
        raise TokenizerError(f"{file} cannot be read: {error}. Download it again") from error


def _padding_id(tokenizer: Tokenizer, folder: Path) -> int:
    """Id of the padding token that `tokenizer_config.json` names; 0 if there is none."""
    file = folder / "tokenizer_config.json"
    name = json.loads(file.read_text()).get("pad_token") if file.is_file() else None
    found = tokenizer.token_to_id(name["content"] if isinstance(name, dict) else name) if name else None
    return found or 0


def _how_to_get(cfg: FlowConfig) -> str:
    if cfg.family == "smolvla":
        return (
            "Put the tokenizer.json and tokenizer_config.json of HuggingFaceTB/SmolVLM2-500M-Video-Instruct into "
            "it: hf download HuggingFaceTB/SmolVLM2-500M-Video-Instruct tokenizer.json tokenizer_config.json "
            "--local-dir DIR"
        )
    return (
        "Put PaliGemma's tokenizer.model or tokenizer.json into it. It needs a licence, which you accept at "
        "https://huggingface.co/google/paligemma-3b-pt-224; then: hf auth login; hf download "
        "google/paligemma-3b-pt-224 tokenizer.json --local-dir DIR. Without an account: "
        "https://storage.googleapis.com/big_vision/paligemma_tokenizer.model is the same, saved as DIR/tokenizer.model"
    )


def from_sentencepiece(file: Path) -> Tokenizer:
    """Convert a SentencePiece model of PaliGemma's kind: BPE, bytes for unknown text, no added space, all spaces kept.

    Raises TokenizerError for other kinds.
    """
    from google.protobuf.message import DecodeError
    from transformers.utils import sentencepiece_model_pb2_new  # needs protobuf, which ray brings

    messages: Any = sentencepiece_model_pb2_new
    model = messages.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise TokenizerError(f"{file} is no SentencePiece model: {error}. Download it again") from error
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    changes = normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces or normalizer.precompiled_charsmap
    if trainer.model_type != trainer.BPE or changes:
        raise TokenizerError(
            f"{file} is no SentencePiece model of PaliGemma's kind. Replace it by PaliGemma's tokenizer.json"
        )
    vocab = {piece.piece: number for number, piece in enumerate(model.pieces)}
    scores = {piece.piece: piece.score for piece in model.pieces}
    normal = messages.ModelProto.SentencePiece.NORMAL
    # each way to join two pieces into a third is a merge; a better score of the third comes earlier
    merges = [
        (-piece.score, cut, (piece.piece[:cut], piece.piece[cut:]))
        for piece in model.pieces
        if piece.type == normal
        for cut in range(1, len(piece.piece))
        if piece.piece[:cut] in scores and piece.piece[cut:] in scores
    ]
    pairs = [pair for _, _, pair in sorted(merges)]
    unknown = model.pieces[trainer.unk_id].piece
    tokenizer = Tokenizer(
        models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=trainer.byte_fallback)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    control, user = messages.ModelProto.SentencePiece.CONTROL, messages.ModelProto.SentencePiece.USER_DEFINED
    # control pieces are never found in a text, so they are not added
    tokenizer.add_tokens([AddedToken(piece.piece, normalized=True) for piece in model.pieces if piece.type == user])
    first = model.pieces[trainer.bos_id]
    if first.type == control:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first.piece} $A", special_tokens=[(first.piece, trainer.bos_id)]
        )
    return tokenizer
