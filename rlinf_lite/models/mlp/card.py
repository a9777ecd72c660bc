"""The MLP policy's card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rlinf_lite.cards import Float, PolicyCard, PositiveInt, Section

if TYPE_CHECKING:
    from rlinf_lite.models.base import Policy


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
    reads_state = True

    def policy_class(self) -> type[Policy]:
        from rlinf_lite.models.mlp.policy import MLPGaussianPolicy

        return self.part or MLPGaussianPolicy
