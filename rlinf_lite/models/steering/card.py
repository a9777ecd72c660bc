"""The card of the policy that steers a flow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_lite.cards import Observed, PolicyCard, PositiveFloat, PositiveInt, Problem, Section
from rlinf_lite.config.resources import policy_config, policy_directory, start_dir

if TYPE_CHECKING:
    from rlinf_lite.config import Config


class SteeringOptions(Section):
    flow_dir: str | None = None
    """Directory of the flow policy, whose weights stay as they are. A checkpoint brings its own."""
    bound: PositiveFloat = 1.5
    """Largest number of the noise; the flow was trained on standard normal noise."""
    hidden_sizes: list[PositiveInt] = [128, 128, 128]
    """Widths of the hidden layers."""
    camera_size: PositiveInt = 64
    """Height and width to which pictures are scaled, for this policy and the critics."""


class Steering(PolicyCard):
    """DSRL (arXiv:2506.15799): a small tanh-Gaussian policy that chooses the noise from which a frozen flow acts."""

    Options = SteeringOptions
    policy = "rlinf_lite.models.steering.policy:SteeredFlow"
    off_policy = True

    def problems(self, config: Config, seen: Observed | None) -> Iterator[Problem]:
        flow = config.model.options.flow_dir
        if start_dir(config) is None:
            if flow is None:
                yield Problem("model.options.flow_dir", "is null, and there is no flow to steer. Name its directory")
                return
            directory = policy_directory(flow)
            if not Path(directory / "config.json").is_file():
                yield Problem("model.options.flow_dir", f"{flow} holds no policy (no config.json). Name a policy")
                return
            if (name := policy_config(directory).get("policy_id")) == self.name:
                yield Problem("model.options.flow_dir", f"{flow} is a policy {name}, and no flow. Name the flow")
        if config.runner.task_type != "off_policy":
            return
        own, shares = config.off_policy, config.replay.shares
        if own.random_steps:
            text = "is above 0, and the first noise is as good as any. Set it to 0"
            yield Problem("off_policy.random_steps", text)
        if shares.get("demonstrations"):
            text = "gives demonstrations a share, and they do not say from which noise a flow would have acted"
            yield Problem("replay.shares", f"{text}. Leave them out")
