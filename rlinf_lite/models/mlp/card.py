"""The MLP policy's card."""

from __future__ import annotations

from typing import Literal

from rlinf_lite.cards import Float, PolicyCard, PositiveInt, Section


class MLPOptions(Section):
    hidden_sizes: list[PositiveInt] = [256, 256, 256]
    """Widths of the hidden layers of actor and critic, each its own network."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """Nonlinearity."""
    log_std_init: Float = -0.5
    """Initial log standard deviation, in normalised action units."""


class MLP(PolicyCard):
    """A Gaussian policy of multi-layer perceptrons, for state observations."""

    Options = MLPOptions
    policy = "rlinf_lite.models.mlp.policy:MLPGaussianPolicy"
    reads_state = True
