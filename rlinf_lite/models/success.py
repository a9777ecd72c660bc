"""A success classifier: how likely it is that an observation, by its pictures and its instruction, shows success."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from rlinf_lite.config.resources import classifier_config, classifier_misfit, policy_directory
from rlinf_lite.envs.errors import StepRewardError
from rlinf_lite.models.base import read_weights_of
from rlinf_lite.models.tensor_files import write_tensors

if TYPE_CHECKING:
    from rlinf_lite.config.schema import StepRewardConfig
    from rlinf_lite.envs import Obs

_WIDTH = 32  # channels, and numbers of a word's embedding
_SMALLEST = 16  # pixels: pictures are halved until a side is no longer than this
_WORDS = re.compile(r"\w+")


class SuccessClassifier(nn.Module):
    """Pictures uint8 [B, H, W, 3] of every camera and an instruction as one number per row, the logit of success.

    Each camera has convolutions that halve its picture until a side has 16 pixels, then two more whose channels the
    mean embedding of the words scales and shifts (FiLM, arXiv:1709.07871), so that the same picture may be a success
    for one instruction and none for another. What they find at its strongest place and on average goes into a linear
    layer. The state is not read.
    """

    calibration: Tensor
    """float64 [2]: the factor and the shift of logits with which probabilities fit held-out episodes."""

    def __init__(self, cameras: Mapping[str, Sequence[int]], vocabulary: Sequence[str]) -> None:
        """`cameras`: height and width of pictures. `vocabulary`: the words that are known; others are ignored."""
        super().__init__()
        self.cameras = {camera: (size[0], size[1]) for camera, size in cameras.items()}
        self.vocabulary = list(vocabulary)
        self._numbers = {word: 1 + number for number, word in enumerate(vocabulary)}
        self.words = nn.EmbeddingBag(len(self.vocabulary) + 1, _WIDTH, mode="mean", padding_idx=0)
        self.eyes = nn.ModuleList(_Eye(*size) for size in self.cameras.values())
        self.head = nn.Linear(2 * _WIDTH * len(self.cameras), 1)
        self.register_buffer("calibration", torch.tensor([1.0, 0.0], dtype=torch.float64))

    def forward(self, images: Mapping[str, Tensor], words: Tensor) -> Tensor:
        """Logits [B], not calibrated. `words`: those of `word_numbers`."""
        meaning = self.words(words)
        seen = [eye(images[camera], meaning) for camera, eye in zip(self.cameras, self.eyes, strict=True)]
        logits: Tensor = self.head(torch.cat(seen, dim=1))
        return logits.squeeze(1)

    def word_numbers(self, sentences: Sequence[str]) -> Tensor:
        """Numbers of the known words of each sentence, int64 [B, the longest]; 0 after the last one."""
        known = [[self._numbers[x] for x in words_of(text) if x in self._numbers] for text in sentences]
        longest = max(1, *map(len, known))
        return torch.tensor([numbers + [0] * (longest - len(numbers)) for numbers in known])

    @torch.no_grad()
    def probabilities(self, obs: Obs) -> NDArray[np.float32]:
        """Calibrated probabilities of success [B].

        Raises:
            StepRewardError: if a camera is missing, or its pictures have another size than those of training.
        """
        given = {camera: images.shape[1:3] for camera, images in obs.get("images", {}).items()}
        if problem := classifier_misfit(self.cameras, given):
            raise StepRewardError(problem)
        images = {camera: torch.from_numpy(np.ascontiguousarray(obs["images"][camera])) for camera in self.cameras}
        num_rows = len(next(iter(images.values())))
        logits = self(images, self.word_numbers(obs.get("instruction", [""] * num_rows))).double()
        found: NDArray[np.float32] = torch.sigmoid(calibrated(logits, self.calibration)).float().numpy()
        return found

    def save_pretrained(self, directory: Path, facts: Mapping[str, Any]) -> None:
        """Write `config.json`, with `facts` about training among its entries, and `model.safetensors`."""
        directory.mkdir(parents=True, exist_ok=True)
        sizes = {camera: list(size) for camera, size in self.cameras.items()}
        config = {"classifier": "success", "cameras": sizes, "vocabulary": self.vocabulary, **facts}
        (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        write_tensors(self.state_dict(), directory / "model.safetensors")

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Load what `save_pretrained` wrote.

        Raises:
            StepRewardError: if there is no classifier.
            CheckpointFormatError: if its weights are missing or do not fit its config.json.
        """
        try:
            config = classifier_config(directory)
        except ValueError as error:
            raise StepRewardError(str(error)) from error
        found = cls(config["cameras"], config["vocabulary"])
        found.load_state_dict(read_weights_of(found, policy_directory(directory)))
        return found.eval().requires_grad_(False)


class SuccessReward:
    """The reward `success_classifier`: 1 where a `SuccessClassifier` is sure enough that an observation shows success,
    else 0."""

    def __init__(self, settings: StepRewardConfig) -> None:
        """Raises as `SuccessClassifier.from_pretrained`."""
        assert settings.model_dir is not None  # a rule of the config
        self._classifier = SuccessClassifier.from_pretrained(settings.model_dir)
        self._known, self._threshold = frozenset(self._classifier.vocabulary), settings.threshold

    def __call__(self, obs: Obs) -> NDArray[np.float32]:
        """The reward [B]. Raises StepRewardError if an instruction has words that no episode of training had."""
        for sentence in {*obs.get("instruction", [])}:
            if unknown := [word for word in words_of(sentence) if word not in self._known]:
                text = f"the classifier does not know {', '.join(map(repr, unknown))} of the instruction {sentence!r}"
                raise StepRewardError(f"env.train.reward: {text}. Train one on episodes of this task")
        return (self._classifier.probabilities(obs) >= self._threshold).astype(np.float32)


def words_of(sentence: str) -> list[str]:
    """The words of a sentence in lower case, without punctuation."""
    return _WORDS.findall(sentence.lower())


def calibrated(logits: Tensor, calibration: Tensor) -> Tensor:
    """Logits [B] times the factor plus the shift in `calibration` [2]."""
    return logits * calibration[0] + calibration[1]


class _Eye(nn.Module):
    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        halvings = max(1, (min(height, width) - 1).bit_length() - (_SMALLEST - 1).bit_length())
        channels = [3, *[_WIDTH] * halvings]
        self.halving = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(channels))
        self.asked = nn.ModuleList(nn.Conv2d(_WIDTH, _WIDTH, 3, 1, 1) for _ in range(2))
        self.meanings = nn.ModuleList(nn.Linear(_WIDTH, 2 * _WIDTH) for _ in range(2))

    def forward(self, images: Tensor, meaning: Tensor) -> Tensor:
        """Features [B, 64] of pictures uint8 [B, H, W, 3], for the meaning [B, 32] of an instruction."""
        x = images.permute(0, 3, 1, 2).float() / 255 - 0.5
        for layer in self.halving:
            x = F.relu(layer(x))
        for layer, of_words in zip(self.asked, self.meanings, strict=True):
            factor, shift = of_words(meaning)[:, :, None, None].chunk(2, dim=1)
            x = F.relu(layer(x) * (1 + factor) + shift)
        return torch.cat([x.amax((2, 3)), x.mean((2, 3))], dim=1)
