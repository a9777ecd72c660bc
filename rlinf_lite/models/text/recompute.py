"""Layers that are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(layers: Iterable[nn.Module]) -> None:
    """Keep the inputs of these layers, which have no dropout, instead of their activations; hooks stay outside.

    Transformers' own way would do so in training mode alone, where dropout and the like are on, and drop caches there.
    """
    for layer in layers:
        recomputed = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = recomputed
