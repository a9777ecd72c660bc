"""Networks of off-policy learning: an encoder of observations, and an ensemble of critics with its targets."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from rlinf_lite.models.base import read_weights_of
from rlinf_lite.models.pictures import resized
from rlinf_lite.models.tensor_files import write_tensors

if TYPE_CHECKING:
    from rlinf_lite.config.off_policy import OffPolicyConfig
    from rlinf_lite.models.base import Policy

PICTURE = "image."
"""Prefix of the name of a camera's pictures among the inputs."""
WORDS = "words"
"""The name of the instruction's words among the inputs."""
_VOCABULARY, _MOST_WORDS, _WORD = 4096, 24, 32  # numbers of words, the most of a sentence, numbers of an embedding
_LATENT = 50  # numbers of a camera, as in DrQ and verl-vla


class Encoder(nn.Module):
    """State [b, S] and pictures uint8 [b, H, W, 3] by camera as one vector [b, size]: pictures through four 3 x 3
    convolutions of 32 channels, a linear layer, LayerNorm and tanh (DrQ, arXiv:2004.13649); the state as it is."""

    def __init__(self, state_dim: int, cameras: Mapping[str, Sequence[int]], reads_words: bool = False) -> None:
        """`reads_words`: whether the inputs have `words` (`word_numbers`), whose embeddings are averaged."""
        super().__init__()
        self.state_dim = state_dim
        self.cameras = {camera: (size[0], size[1]) for camera, size in cameras.items()}
        self.words = nn.EmbeddingBag(_VOCABULARY, _WORD, mode="mean", padding_idx=0) if reads_words else None
        self.eyes = nn.ModuleList(_eye(*size) for size in cameras.values())
        self.size = state_dim + _LATENT * len(self.cameras) + _WORD * reads_words

    def inputs(self, obs: Mapping[str, Any]) -> dict[str, Tensor]:
        """What `forward` reads of an observation (`envs.Obs`), on the CPU, with pictures scaled to their size."""
        found: dict[str, Tensor] = {}
        if self.state_dim:
            found["state"] = torch.from_numpy(np.asarray(obs["state"], np.float32))
        for camera, size in self.cameras.items():
            found[PICTURE + camera] = resized(torch.from_numpy(np.ascontiguousarray(obs["images"][camera])), size)
        if self.words is not None:
            found[WORDS] = torch.from_numpy(word_numbers(obs["instruction"]))
        return found

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        parts = [inputs["state"].float()] if self.state_dim else []
        for camera, eye in zip(self.cameras, self.eyes, strict=True):
            parts.append(eye(inputs[PICTURE + camera].permute(0, 3, 1, 2).float() / 255 - 0.5))
        if self.words is not None:
            parts.append(self.words(inputs[WORDS]))
        return torch.cat(parts, dim=-1)


def word_numbers(sentences: Sequence[str]) -> NDArray[np.int64]:
    """Numbers of the words of each sentence, int64 [B, 24], the same in every process; 0 behind the last one."""
    found = np.zeros((len(sentences), _MOST_WORDS), np.int64)
    for row, sentence in enumerate(sentences):
        words = sentence.lower().split()[:_MOST_WORDS]
        found[row, : len(words)] = [1 + zlib.crc32(word.encode()) % (_VOCABULARY - 1) for word in words]
    return found


def _eye(height: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, stride in enumerate((2, 1, 1, 1)):
        layers += [nn.Conv2d(32 if number else 3, 32, 3, stride), nn.ReLU()]
        height, width = (height - 3) // stride + 1, (width - 3) // stride + 1
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(32 * height * width, _LATENT), nn.LayerNorm(_LATENT), nn.Tanh()
    )


class _Linear(nn.Module):
    """M linear layers at once: [M, b, in] to [M, b, out], each with torch's usual initial weights."""

    def __init__(self, num: int, num_in: int, num_out: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(num_in)
        self.weight = nn.Parameter(torch.empty(num, num_in, num_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num, 1, num_out).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class _Norm(nn.Module):
    """M LayerNorms at once."""

    def __init__(self, num: int, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(num, 1, width)), nn.Parameter(torch.zeros(num, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * self.weight + self.bias


class _Values(nn.Module):
    """M critics behind one encoder: inputs and actions [b, A] to values [M, b]."""

    def __init__(self, encoder: Encoder, num: int, num_actions: int, hidden: Sequence[int], layer_norm: bool) -> None:
        super().__init__()
        self.encoder, self.num = encoder, num
        layers, width = list[nn.Module](), encoder.size + num_actions
        for size in hidden:
            layers += [_Linear(num, width, size), *([_Norm(num, size)] if layer_norm else []), nn.ReLU()]
            width = size
        self.layers = nn.Sequential(*layers, _Linear(num, width, 1))

    def forward(self, inputs: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        x = torch.cat([self.encoder(inputs), actions], dim=-1)
        values: Tensor = self.layers(x.expand(self.num, *x.shape))
        return values.squeeze(-1)


def chosen_shape(policy: Policy) -> tuple[int, int]:
    """C and D of what a decision chooses: the actions of a chunk, or `Policy.chosen_dim` numbers."""
    chosen = policy.chosen_dim
    return (policy.num_action_chunks, policy.action_dim) if chosen is None else (1, chosen)


class Critics(nn.Module):
    """M critics, their targets, and the temperature of the entropy: all that off-policy training has besides the
    policy.

    A critic sees the observation and a chunk of normalised actions. Actions that were not executed are zeros, and where
    a chunk has several, their mask is an input too.
    """

    def __init__(
        self,
        state_dim: int,
        cameras: Mapping[str, Sequence[int]],
        chunk: int,
        action_dim: int,
        num_critics: int = 2,
        hidden_sizes: Sequence[int] = (256, 256),
        layer_norm: bool = False,
        temperature: float = 1.0,
        reads_words: bool = False,
    ) -> None:
        super().__init__()
        num_actions = chunk * (action_dim + (chunk > 1))
        self.online, self.target = (
            _Values(Encoder(state_dim, cameras, reads_words), num_critics, num_actions, hidden_sizes, layer_norm)
            for _ in range(2)
        )
        self.target.requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))

    @classmethod
    def of(cls, policy: Policy, cfg: OffPolicyConfig) -> Self:
        """The critics of a run: they see what the policy reads and what it chooses."""
        reads = policy.reads()
        return cls(
            0 if reads is None else reads.state_dim,
            {} if reads is None else reads.cameras,
            *chosen_shape(policy),
            cfg.num_critics,
            cfg.hidden_sizes,
            cfg.layer_norm,
            cfg.temperature,
            reads_words=policy.chosen_dim is not None,
        )

    def forward(self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor) -> Tensor:
        """Values [M, b] of normalised actions [b, C, D], of which those in `mask` [b, C] count."""
        values: Tensor = self.online(inputs, self._seen(actions, mask))
        return values

    def target_values(self, inputs: Mapping[str, Tensor], actions: Tensor, subset: Sequence[int]) -> Tensor:
        """Values [len(subset), b] of whole chunks of normalised actions, by some of the target critics."""
        mask = torch.ones(actions.shape[:2], dtype=torch.bool, device=actions.device)
        values: Tensor = self.target(inputs, self._seen(actions, mask))
        return values[list(subset)]

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """Move the targets by `tau` towards the critics."""
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            target.lerp_(online, tau)

    def _seen(self, actions: Tensor, mask: Tensor) -> Tensor:
        kept = torch.where(mask[..., None], actions, 0.0)
        if actions.shape[1] > 1:
            kept = torch.cat([kept, mask[..., None].to(kept.dtype)], dim=-1)
        return kept.flatten(1)

    def save_pretrained(self, directory: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write `model.safetensors`; the sizes are those of the run's config."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        write_tensors(self.state_dict() if state_dict is None else state_dict, Path(directory) / "model.safetensors")

    def read_state(self, directory: str | Path) -> dict[str, Tensor]:
        """The state that `save_pretrained` wrote. Raises CheckpointFormatError if it is of other critics."""
        return read_weights_of(self, Path(directory))
