"""The MLP policy's card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from rlinf_lite.cards import Float, Observed, PolicyCard, PositiveInt, Problem, Section
from rlinf_lite.config.resources import policy_config, start_dir
from rlinf_lite.config.rules.cards import misfits

if TYPE_CHECKING:
    from rlinf_lite.config import Config


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

    def problems(self, config: Config, seen: Observed | None) -> Iterator[Problem]:
        directory = start_dir(config)
        if seen is None or directory is None or not (directory / "config.json").is_file():
            return
        saved = policy_config(directory)
        if saved.get("policy_id") == self.name:
            yield from misfits(config, saved.get("state_dim", 0), len(saved.get("action_low", [])), seen)
