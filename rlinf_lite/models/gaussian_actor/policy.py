"""A tanh-Gaussian policy, whose mean and standard deviation depend on the observation: the actor of SAC."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from rlinf_lite.models.base import ActionOutput, Mode, Policy, PolicyInputs, PolicyOutput, row_noise_keys
from rlinf_lite.models.critics import Encoder
from rlinf_lite.models.gaussian_actor.card import GaussianActorCard
from rlinf_lite.models.sampling import normal_noise

if TYPE_CHECKING:
    from rlinf_lite.config.schema import ModelConfig
    from rlinf_lite.envs import EnvSpec

_LOG_STD = (-20.0, 2.0)
_EPSILON = 1e-6  # in the logarithm of tanh's slope, as Stable-Baselines3 has it


class Chosen(NamedTuple):
    """What a `TanhGaussian` chose, [b, num] each."""

    chosen: Tensor
    logprobs: Tensor
    inputs: dict[str, Tensor]
    """What the encoder read."""
    before_tanh: Tensor


class TanhGaussian(nn.Module):
    """From an observation to a Gaussian over `num` numbers before tanh; layers, initial weights and log-probabilities
    are those of Stable-Baselines3's SAC."""

    def __init__(self, encoder: Encoder, num: int, hidden_sizes: Sequence[int]) -> None:
        super().__init__()
        self.encoder = encoder
        layers, width = list[nn.Module](), encoder.size
        for size in hidden_sizes:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        self.trunk = nn.Sequential(*layers)
        self.mean, self.log_std = nn.Linear(width, num), nn.Linear(width, num)

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation [b, num]."""
        hidden = self.trunk(self.encoder(inputs))
        return self.mean(hidden).float(), self.log_std(hidden).float().clamp(*_LOG_STD)

    def squashed(self, mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """tanh(mean + std * noise) and its log-probabilities, both [b, num]."""
        chosen = torch.tanh(mean + log_std.exp() * noise)
        normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        return chosen, normal - torch.log(1 - chosen.square() + _EPSILON)

    def sampled(self, inputs: Mapping[str, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
        """What standard normal `noise` [b, num] chooses, and its log-probabilities, both [b, num]."""
        mean, log_std = self(inputs)
        return self.squashed(mean, log_std, noise)

    def act(self, obs: Mapping[str, Any], mode: Mode) -> Chosen:
        """Choose for an observation: with each row's own noise, or in mode greedy without."""
        device = self.mean.weight.device
        inputs = {name: x.to(device) for name, x in self.encoder.inputs(obs).items()}
        mean, log_std = self(inputs)
        noise = torch.zeros_like(mean)
        if mode != "greedy":
            noise = torch.from_numpy(normal_noise(row_noise_keys(obs, len(mean)), mean.shape[1])).to(device)
        chosen, logprobs = self.squashed(mean, log_std, noise)
        return Chosen(chosen, logprobs, inputs, mean + log_std.exp() * noise)


class GaussianActor(Policy):
    """Normalised actions from a `TanhGaussian`, which map onto the environment's bounds."""

    policy_id, card = "gaussian_actor", GaussianActorCard

    def __init__(
        self,
        state_dim: int,
        cameras: Mapping[str, Sequence[int]],
        action_low: list[float],
        action_high: list[float],
        num_action_chunks: int = 1,
        hidden_sizes: Sequence[int] = (256, 256),
    ) -> None:
        super().__init__()
        self._config: dict[str, Any] = {
            "state_dim": state_dim,
            "cameras": {camera: list(size) for camera, size in cameras.items()},
            "action_low": list(action_low),
            "action_high": list(action_high),
            "num_action_chunks": num_action_chunks,
            "hidden_sizes": list(hidden_sizes),
        }
        self.num_action_chunks, self.action_dim = num_action_chunks, len(action_low)
        low, high = torch.tensor(action_low), torch.tensor(action_high)
        self._offset, self._scale = (high + low) / 2, (high - low) / 2  # kept in config.json, not in the weights
        self.head = TanhGaussian(Encoder(state_dim, cameras), num_action_chunks * self.action_dim, hidden_sizes)

    @classmethod
    def from_config(cls, cfg: ModelConfig, spec: EnvSpec) -> Self:
        return cls(
            spec.state_dim or 0,
            spec.cameras,
            spec.action_low,
            spec.action_high,
            cfg.num_action_chunks,
            cfg.options.hidden_sizes,
        )

    def config_dict(self) -> dict[str, Any]:
        return dict(self._config)

    @classmethod
    def from_config_dict(cls, config: dict[str, Any]) -> Self:
        return cls(**{name: value for name, value in config.items() if name != "policy_id"})

    def check_env_spec(self, spec: EnvSpec) -> None:
        if (spec.state_dim or 0) != self._config["state_dim"]:
            raise ValueError(
                f"the policy reads {self._config['state_dim']} state numbers, and there are {spec.state_dim}"
            )
        if missing := [camera for camera in self._config["cameras"] if camera not in spec.cameras]:
            raise ValueError(f"the policy looks through {', '.join(missing)}, which the environment has not")

    def reads(self) -> PolicyInputs:
        return PolicyInputs(self.head.encoder.cameras, self._config["state_dim"])

    def predict_action_batch(self, obs: Mapping[str, Any], mode: Mode = "train") -> ActionOutput:
        acted = self.head.act(obs, mode)
        kept = {**acted.inputs, "before_tanh": acted.before_tanh} if mode == "train" else {}
        actions, logprobs = self._by_action(acted.chosen), self._by_action(acted.logprobs)
        in_bounds = self._offset + self._scale * actions.float().cpu()
        return ActionOutput(in_bounds, logprobs, logprobs.new_zeros(len(logprobs), 1), kept)

    def sample_with_logprob(self, inputs: Mapping[str, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised actions [b, C, D] with gradients, from standard normal `noise` [b, C, D], and their
        log-probabilities [b, C, D]. `inputs`: those of `sft_inputs`."""
        actions, logprobs = self.head.sampled(inputs, noise.flatten(1))
        return self._by_action(actions), self._by_action(logprobs)

    def predict_values(self, obs: Mapping[str, Any]) -> Tensor:
        raise NotImplementedError("gaussian_actor has no value of an observation")

    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        mean, log_std = self.head(forward_inputs)
        noise = (forward_inputs["before_tanh"] - mean) * (-log_std).exp()
        logprobs = self._by_action(self.head.squashed(mean, log_std, noise)[1])
        return PolicyOutput(logprobs, -logprobs, mean.new_zeros(len(mean), 1))

    def sft_inputs(self, obs: Mapping[str, Any]) -> dict[str, Tensor]:
        return self.head.encoder.inputs(obs)

    def sft_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Squared error of the most likely action, in normalised actions."""
        offset, scale = self._offset.to(self.head.mean.weight.device), self._scale.to(self.head.mean.weight.device)
        mean = self._by_action(self.head(batch)[0])
        wanted = ((batch["actions"].float() - offset) / scale).clamp(-1.0, 1.0)
        error, mask = (torch.tanh(mean) - wanted).square().mean(-1), batch["mask"]
        return (error * mask).sum() / mask.sum().clamp(min=1)

    def _by_action(self, x: Tensor) -> Tensor:
        """[b, C * D] as [b, C, D]."""
        return x.view(-1, self.num_action_chunks, self.action_dim)
