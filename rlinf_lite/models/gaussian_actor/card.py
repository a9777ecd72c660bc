"""The card of the tanh-Gaussian policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlinf_lite.cards import Observed, PolicyCard, PositiveInt, Problem, Section

if TYPE_CHECKING:
    from rlinf_lite.config import Config

_SMALLEST = 15  # of what the convolutions leave something


class GaussianActorOptions(Section):
    hidden_sizes: list[PositiveInt] = [256, 256]
    """Widths of the hidden layers."""


class GaussianActorCard(PolicyCard):
    """A tanh-Gaussian policy for off-policy learning, on state and on small pictures."""

    Options = GaussianActorOptions
    policy = "rlinf_lite.models.gaussian_actor.policy:GaussianActor"
    off_policy = True

    def problems(self, config: Config, seen: Observed | None) -> Iterator[Problem]:
        if config.runner.task_type == "embodied":
            text = "has no value of an observation, and PPO and its like train one. Set runner.task_type to off_policy"
            yield Problem("model.id", f"{self.name} {text}, or model.id to mlp_gaussian")
        for camera, (height, width) in ({} if seen is None else seen.cameras).items():
            if min(height, width) < _SMALLEST:
                text = f"{camera} is {height} x {width}, and pictures must have {_SMALLEST} pixels a side"
                yield Problem("env.options", f"{text}. Use larger ones")
