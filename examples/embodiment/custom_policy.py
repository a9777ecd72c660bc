"""A custom policy in one file: a CNN on images, an MLP on state, either or both, and a tanh-squashed Gaussian.

It implements all methods; custom_network.py has a base class, and so needs only 46 lines.

Train it on any environment by naming its class:

    python examples/embodiment/train_embodied_agent.py --config-name gym_pendulum_ppo_mlp \\
        model.id=examples.embodiment.custom_policy:SquashedGaussianPolicy model.options.hidden_size=64

Its card declares an option, `model.options.hidden_size`, with a type, a range and help. So a misspelt key gets a "did
you mean". `python examples/embodiment/custom_policy.py` checks the policy against the contract of
rlinf_lite.models.Policy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlinf_lite.cards import PolicyCard, PositiveInt, Section
from rlinf_lite.config.schema import ModelConfig
from rlinf_lite.envs import EnvSpec
from rlinf_lite.models import ActionOutput, Mode, Policy, PolicyOutput, check_policy
from rlinf_lite.models.base import row_noise_keys
from rlinf_lite.models.sampling import normal_noise


class Card(PolicyCard):
    """The policy's card, which configs, checks and docs read."""

    class Options(Section):
        hidden_size: PositiveInt = 128
        """Width of both layers of the trunk."""


class SquashedGaussianPolicy(Policy):
    """Policy whose actions are tanh(u), scaled to the environment's bounds, with u ~ N(mean(obs), std(obs)).

    Training computes the log-probability of the sample u, which cannot be recovered from a clipped or squashed action.
    """

    card = Card

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.num_action_chunks, self.action_dim = config["num_action_chunks"], len(config["action_low"])
        low, high = torch.tensor(config["action_low"]), torch.tensor(config["action_high"])
        self.offset, self.scale = (high + low) / 2, (high - low) / 2
        hidden, channels = config["hidden_size"], 3 * len(config["cameras"])

        self.cnn = None
        if channels:
            layers = [nn.Conv2d(channels, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()]
            self.cnn = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten())
        num_features = (512 if channels else 0) + config["state_dim"]
        self.trunk = nn.Sequential(nn.Linear(num_features, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.actor = nn.Linear(hidden, 2 * self.num_action_chunks * self.action_dim)
        self.critic = nn.Linear(hidden, config["num_values"])

    @classmethod
    def from_config(cls, cfg: ModelConfig, spec: EnvSpec) -> Self:
        config = {
            "state_dim": spec.state_dim or 0,
            "cameras": list(spec.cameras),
            "action_low": spec.action_low,
            "action_high": spec.action_high,
            "num_action_chunks": cfg.num_action_chunks,
            "num_values": 1 if cfg.value_type == "chunk_level" else cfg.num_action_chunks,
            "temperature": cfg.temperature,
            "hidden_size": cfg.options.hidden_size,
        }
        return cls(config)

    def config_dict(self) -> dict[str, Any]:
        return self.config

    @classmethod
    def from_config_dict(cls, config: dict[str, Any]) -> Self:
        return cls({name: value for name, value in config.items() if name != "policy_id"})

    def check_env_spec(self, spec: EnvSpec) -> None:
        wanted, given = (self.config["state_dim"], self.config["cameras"]), (spec.state_dim or 0, list(spec.cameras))
        if wanted != given:
            raise ValueError(f"the policy reads (state numbers, cameras) {wanted}, the environment gives {given}")

    def value_parameters(self) -> list[nn.Parameter]:
        return list(self.critic.parameters())

    def predict_action_batch(self, obs: Mapping[str, Any], mode: Mode = "train") -> ActionOutput:
        inputs = self._inputs(obs)
        mean, log_std, values = self._network(inputs)
        sampled = mean
        if mode != "greedy":
            noise = normal_noise(row_noise_keys(obs, len(mean)), mean[0].numel())  # noise of each row, from its key
            sampled = mean + log_std.exp() * torch.from_numpy(noise).to(mean).view_as(mean)
        actions = self.offset + self.scale * sampled.cpu().tanh()
        logprobs = _logprobs(mean, log_std, sampled)
        return ActionOutput(actions, logprobs, values, {**inputs, "sampled": sampled} if mode == "train" else {})

    def predict_values(self, obs: Mapping[str, Any]) -> Tensor:
        return self._network(self._inputs(obs))[2]

    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        sampled = forward_inputs["sampled"]
        mean, log_std, values = self._network(forward_inputs)
        entropy = log_std + 0.5 * math.log(2 * math.pi * math.e) + _log_slope(sampled)  # estimated at the sample
        return PolicyOutput(_logprobs(mean, log_std, sampled), entropy, values)

    def _inputs(self, obs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Inputs of the network, batch first. Images stay uint8, because trajectories keep them."""
        inputs = {}
        if self.cnn is not None:
            inputs["images"] = torch.from_numpy(
                np.concatenate([obs["images"][name] for name in self.config["cameras"]], 3)
            )
        if self.config["state_dim"]:
            inputs["state"] = torch.from_numpy(np.asarray(obs["state"], np.float32))
        return {name: tensor.to(self.critic.weight.device) for name, tensor in inputs.items()}

    def _network(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and log standard deviation of u, both [B, C, D], and the values."""
        features = []
        if self.cnn is not None:
            features.append(self.cnn(inputs["images"].permute(0, 3, 1, 2).float() / 255))
        if "state" in inputs:
            features.append(inputs["state"])
        hidden = self.trunk(torch.cat(features, dim=1))
        mean, log_std = self.actor(hidden).float().view(-1, 2, self.num_action_chunks, self.action_dim).unbind(1)
        return mean, log_std.clamp(-5, 2) + math.log(self.config["temperature"]), self.critic(hidden).float()


def _logprobs(mean: Tensor, log_std: Tensor, sampled: Tensor) -> Tensor:
    gaussian = -0.5 * ((sampled - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)
    return gaussian - _log_slope(sampled)


def _log_slope(u: Tensor) -> Tensor:
    """log d tanh(u) / du, stable far from 0."""
    return 2 * (math.log(2) - u - F.softplus(-2 * u))


if __name__ == "__main__":
    spec = EnvSpec(
        action_dim=2,
        state_dim=6,
        cameras={"top": (64, 64)},
        action_low=[-1.0, -1.0],
        action_high=[1.0, 1.0],
        max_episode_steps=50,
        has_instruction=False,
    )
    problems = check_policy(SquashedGaussianPolicy, spec, ModelConfig(num_action_chunks=4))
    print("\n".join(problems) or "SquashedGaussianPolicy keeps the contract")
    sys.exit(1 if problems else 0)
