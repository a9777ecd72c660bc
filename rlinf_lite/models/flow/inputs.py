"""What a flow policy reads: pictures resized as where it was trained, prompts as they were written there, states and
actions in the units of its statistics.

openpi resizes whole grey levels with PIL, LeRobot fractions with torch and without antialiasing; the same picture
differs by up to 0.3 of its range between the two.
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
_KNOWN_PROMPTS = 4096  # that are kept as ids
_STATISTICS = {"mean_std": ("mean", "std"), "quantiles": ("q01", "q99"), "min_max": ("min", "max"), "identity": ()}


class TokenizerError(ValueError):
    """There is no tokenizer, or none that can be read."""


class PromptTooLongError(ValueError):
    """A prompt longer than `model.options.max_prompt_length`."""


# pictures


def stored_images(images: np.ndarray, cfg: FlowConfig) -> Tensor:
    """What is kept of pictures uint8 [B, H, W, 3]: resized where that ends in whole grey levels, else as they are.

    Raises ObservationError for other types and shapes.
    """
    if images.dtype != np.uint8:
        raise ObservationError(f"images are {images.dtype}; uint8 from 0 to 255 is needed")
    if images.ndim != 4 or images.shape[3] != 3:
        raise ObservationError(f"images have shape {images.shape}; [rows, height, width, 3], red first, is needed")
    width, height = cfg.resize_to
    if cfg.layout == "lerobot" or images.shape[1:3] == (height, width):
        return torch.from_numpy(np.array(images, order="C"))  # a copy: messages are read-only, turned ones have strides
    new_width, new_height = cfg.fitting(images.shape[2], images.shape[1])
    left, top = (width - new_width) // 2, (height - new_height) // 2
    out = np.zeros((len(images), height, width, 3), np.uint8)
    for row, image in enumerate(images):
        resized = Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BILINEAR)
        out[row, top : top + new_height, left : left + new_width] = np.asarray(resized)
    return torch.from_numpy(out)


def pixel_values(images: Tensor, cfg: FlowConfig) -> Tensor:
    """Float32 [B, 3, H, W] in [-1, 1] of what `stored_images` kept; padding is black, and -3 in LeRobot 0.4."""
    pixels = images.permute(0, 3, 1, 2).float() / 255.0
    width, height = cfg.resize_to
    if pixels.shape[2:] != (height, width):
        new_width, new_height = cfg.fitting(pixels.shape[3], pixels.shape[2])
        pixels = F.interpolate(pixels, (new_height, new_width), mode="bilinear", align_corners=False)
        pixels = pixels if cfg.family == "smolvla" else pixels.clamp(0, 1)  # white is 1 + 1e-7 behind interpolation
        across, down = width - new_width, height - new_height
        if cfg.family == "smolvla":
            pixels = F.pad(pixels, (across, 0, down, 0))  # all of it on the left and the top
        else:
            sides = (across // 2, across - across // 2, down // 2, down - down // 2)
            pixels = F.pad(pixels, sides, value=-1.0 if cfg.lerobot_preprocessing == "v0.4" else 0.0)
    return pixels * 2.0 - 1.0


# states and actions


class Normalizer:
    """Between the units of a robot and those of the network, as the statistics of `state` or `actions` say.

    openpi computes in float64 and adds 1e-6 to each range on both ways; LeRobot in float32, 1e-8 and on one way only,
    to ranges other than of standard deviations where they are 0.
    """

    def __init__(self, cfg: FlowConfig, name: str, num_dims: int) -> None:
        """Raises StatisticsError where the statistics do not fit."""
        self.kind: Norm = cfg.state_norm if name == "state" else cfg.action_norm
        self.kind = self.kind if num_dims else "identity"  # of a robot without a state nobody has statistics
        self.num_dims, self._openpi, self._eps = num_dims, cfg.layout == "openpi", cfg.norm_eps
        found: list[np.ndarray] = []
        entry = cfg.statistics.get(name, {})
        for key in _STATISTICS[self.kind]:
            if key not in entry:
                raise StatisticsError(
                    f"{self.kind} needs {key} of {name}, and the statistics have {', '.join(entry) or 'none'}"
                )
            if len(entry[key]) < num_dims:  # longer ones are cut, as where they are published
                raise StatisticsError(
                    f"the statistics{f' of {cfg.asset_id}' if cfg.asset_id else ''} describe {len(entry[key])} numbers "
                    f"of {name}, and there are {num_dims}: they are of another robot"
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
        """`x` [..., num_dims], in the type of the statistics."""
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
        """The inverse, of [..., num_dims]."""
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
        """Low and high by dimension: of standard deviations two on either side."""
        one, other = (np.asarray(x, np.float64) for x in self._statistics)
        low, high = (one - 2 * other, one + 2 * other) if self.kind == "mean_std" else (one, other)
        return low.tolist(), high.tolist()

    def _alike(self, x: Any) -> tuple[Any, Any, Any]:
        """`x` in the type of the statistics, which are arrays or tensors as it is."""
        one, other = self._statistics
        if isinstance(x, Tensor):
            first, second = torch.from_numpy(one).to(x.device), torch.from_numpy(other).to(x.device)
            return x.to(first.dtype), first, second
        return np.asarray(x, dtype=one.dtype), one, other

    def _range(self, low: Any, high: Any) -> Any:
        found = high - low
        if self._openpi:
            return found + self._eps
        found[found == 0] = self._eps  # in float32: a bin of the prompt is as wide as the rounding of another type
        return found


def padded(x: Tensor, num_dims: int) -> Tensor:
    """Zeros behind `x` [..., n], float32 [..., num_dims]."""
    return F.pad(x.float(), (0, num_dims - x.shape[-1]))


def read_state(obs: Mapping[str, Any], cfg: FlowConfig, num_rows: int) -> np.ndarray:
    """Of an observation, [B, state_dim]; zeros where the policy knows none. Raises ObservationError."""
    if cfg.state_dim == 0:
        return np.zeros((num_rows, 0), np.float32)
    if "state" not in obs:
        raise ObservationError(f"the policy reads {cfg.state_dim} state numbers, and the observation has none")
    state = np.asarray(obs["state"])
    if state.ndim != 2 or len(state) != num_rows:
        raise ObservationError(f"states have shape {state.shape}; [{num_rows}, {cfg.state_dim}] is needed")
    if state.shape[1] != cfg.state_dim:
        raise ObservationError(
            f"the policy reads {cfg.state_dim} state numbers, and the observation has {state.shape[1]}: it is of "
            "another robot"
        )
    if not np.isfinite(state).all():
        row, column = np.argwhere(~np.isfinite(state))[0]
        raise ObservationError(f"state[{column}] of row {row} is {state[row, column]}; a finite number is needed")
    return state


def read_instructions(obs: Mapping[str, Any]) -> Sequence[str]:
    """Of an observation, a text per row. Raises ObservationError."""
    found: Sequence[Any] | None = obs.get("instruction")
    if found is None:
        raise ObservationError("the policy reads an instruction, and the observation has none")
    for row, text in enumerate(found):
        if not isinstance(text, str):
            raise ObservationError(f"the instruction of row {row} is {text!r}; a text is needed")
    return found


# prompts


def prompt_text(instruction: str, state: np.ndarray, cfg: FlowConfig) -> tuple[str, str]:
    """What is tokenised behind the first token of a prompt, and what is tokenised by itself after that.

    `state` [state_dim], normalised and not padded, is read where `state_in_prompt`: 256 bins on [-1, 1], whose numbers
    are -1 below and 255 above. LeRobot 0.4 writes padding too.
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
        """With the `tokenizer.json` of a policy's directory or of its `tokenizer/`, or the SentencePiece
        `tokenizer.model` there, which openpi reads: to it names of special tokens in a text, <eos>, are words.

        Raises:
            TokenizerError: where there is none, or one that cannot be read.
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
        """Of the two texts that `prompt_text` gives, without padding."""
        tokens: list[int] = self._tokenizer.encode(text).ids
        return tokens + (self._tokenizer.encode(last, add_special_tokens=False).ids if last else [])

    def encode(self, instructions: Sequence[str], states: np.ndarray) -> tuple[Tensor, Tensor]:
        """Ids int64 [B, L] and mask bool [B, L], on the CPU; L is `max_prompt_length`. `states` as in `prompt_text`.

        Raises:
            PromptTooLongError: where a prompt has more than L tokens.
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
                f"to {len(ids)} or more, or set model.options.long_prompts to cut, and the end is lost"
            )
        ids = ids[:length]
        padding = length - len(ids)
        mask = torch.tensor([True] * len(ids) + [False] * padding)
        return torch.tensor([*ids, *[self._pad_id] * padding]), mask


def find_tokenizer(directory: Path, cfg: FlowConfig) -> Path | None:
    """The file that `PromptEncoder.from_directory` reads; None: there is none."""
    names, openpi = ("tokenizer.json", "tokenizer.model", "paligemma_tokenizer.model"), cfg.layout == "openpi"
    folders = (directory, directory / "tokenizer", directory / "vlm")
    files = (folder / name for name in ((*names[1:], names[0]) if openpi else names) for folder in folders)
    return next((file for file in files if file.is_file()), None)


def _from_json(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the class that tokenizers raises
        raise TokenizerError(f"{file} cannot be read: {error}. Download it again") from error


def _padding_id(tokenizer: Tokenizer, folder: Path) -> int:
    """What `tokenizer_config.json` calls the padding token; 0."""
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
        "Put PaliGemma's tokenizer.model or tokenizer.json into it. It is behind a licence: accept it at "
        "https://huggingface.co/google/paligemma-3b-pt-224, then: hf auth login; hf download "
        "google/paligemma-3b-pt-224 tokenizer.json --local-dir DIR. Without an account: "
        "https://storage.googleapis.com/big_vision/paligemma_tokenizer.model is the same, saved as DIR/tokenizer.model"
    )


def from_sentencepiece(file: Path) -> Tokenizer:
    """The tokenizer of a SentencePiece model of PaliGemma's kind: BPE, bytes for what it does not know, no dummy space,
    all spaces kept.

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
            f"{file} is no SentencePiece model of PaliGemma's kind. Put its tokenizer.json in the place of it"
        )
    vocab = {piece.piece: number for number, piece in enumerate(model.pieces)}
    scores = {piece.piece: piece.score for piece in model.pieces}
    normal = messages.ModelProto.SentencePiece.NORMAL
    # a merge is every way to put a piece together; the better its score, the earlier
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
    # control pieces stand for themselves and are never found in a text, so they are not added
    tokenizer.add_tokens([AddedToken(piece.piece, normalized=True) for piece in model.pieces if piece.type == user])
    first = model.pieces[trainer.bos_id]
    if first.type == control:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first.piece} $A", special_tokens=[(first.piece, trainer.bos_id)]
        )
    return tokenizer
