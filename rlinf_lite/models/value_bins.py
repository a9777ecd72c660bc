"""A value network that says a distribution over bins, as RECAP's (arXiv:2511.14759)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlinf_lite.models.critics import Encoder

NUM_BINS = 201
_HIDDEN = 256


class ValueBins(nn.Module):
    """Values in [-1, 0] of observations, by 201 bins whose centres are equally far apart."""

    centres: Tensor

    def __init__(self, state_dim: int, cameras: Mapping[str, Sequence[int]], reads_words: bool) -> None:
        """`cameras`: height and width that pictures are scaled to. See `Encoder`."""
        super().__init__()
        self.encoder = Encoder(state_dim, cameras, reads_words)
        sizes = self.encoder.size, _HIDDEN, _HIDDEN
        hidden = [nn.Sequential(nn.Linear(*pair), nn.LayerNorm(_HIDDEN), nn.ReLU()) for pair in (sizes[:2], sizes[1:])]
        self.head = nn.Sequential(*hidden, nn.Linear(_HIDDEN, NUM_BINS))
        self.register_buffer("centres", torch.linspace(-1, 0, NUM_BINS), persistent=False)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Expected values [b] of inputs from `encoder.inputs`."""
        return self._logits(inputs).softmax(-1) @ self.centres

    def loss(self, inputs: Mapping[str, Tensor], returns: Tensor) -> Tensor:
        """Mean cross-entropy of `returns` [b], each as its nearest bin."""
        bins = ((returns + 1) * (NUM_BINS - 1)).round().long().clamp(0, NUM_BINS - 1)
        return F.cross_entropy(self._logits(inputs), bins)

    def _logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = self.head(self.encoder(inputs))
        return logits
