"""Gaussian MLP actor-critic over flat state observations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_lite.models.base import ActionOutput, Mode, Policy, PolicyInputs, PolicyOutput, row_noise_keys
from rlinf_lite.models.heads import Gaussian
from rlinf_lite.models.mlp.card import MLP

if TYPE_CHECKING:
    from rlinf_lite.config.schema import ModelConfig
    from rlinf_lite.envs import EnvSpec

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}


class MLPGaussianPolicy(Policy):
    """Actor and critic are two MLPs that share nothing; orthogonal initialisation as in CleanRL's PPO.

    Normalised actions are in [-1, 1], which maps onto the environment's bounds. Samples are not squashed: actions
    outside the bounds are clipped, and log-probabilities are those of the unclipped sample. States are not normalised,
    unless the policy got statistics of demonstrations.
    """

    policy_id, card = "mlp_gaussian", MLP

    def __init__(
        self,
        state_dim: int,
        action_low: list[float],
        action_high: list[float],
        num_action_chunks: int = 1,
        value_type: str = "chunk_level",
        hidden_sizes: tuple[int, ...] = (256, 256, 256),
        activation: str = "tanh",
        log_std_init: float = -0.5,
        temperature: float = 1.0,
        state_mean: list[float] | None = None,
        state_std: list[float] | None = None,
    ) -> None:
        super().__init__()
        self._config: dict[str, Any] = {
            "state_dim": state_dim,
            "action_low": list(action_low),
            "action_high": list(action_high),
            "num_action_chunks": num_action_chunks,
            "value_type": value_type,
            "hidden_sizes": list(hidden_sizes),
            "activation": activation,
            "log_std_init": log_std_init,
            "temperature": temperature,
            "state_mean": state_mean,
            "state_std": state_std,
        }
        self.num_action_chunks, self.action_dim, self.state_dim = num_action_chunks, len(action_low), state_dim
        low, high = torch.tensor(action_low), torch.tensor(action_high)
        self._offset, self._scale = (high + low) / 2, (high - low) / 2  # kept in config.json, not in the weights

        num_values = 1 if value_type == "chunk_level" else num_action_chunks
        widths = [state_dim, *hidden_sizes]
        self.actor = _mlp(widths, num_action_chunks * self.action_dim, activation, output_gain=0.01 * math.sqrt(2))
        self.critic = _mlp(widths, num_values, activation, output_gain=1.0)
        self.head = Gaussian(num_action_chunks, self.action_dim, log_std_init, temperature)

    @classmethod
    def from_config(cls, cfg: ModelConfig, spec: EnvSpec) -> Self:
        if spec.state_dim is None:
            raise ValueError("model.id: mlp_gaussian acts on state, and this environment gives images only")
        return cls(
            spec.state_dim,
            spec.action_low,
            spec.action_high,
            cfg.num_action_chunks,
            cfg.value_type,
            tuple(cfg.options.hidden_sizes),
            cfg.options.activation,
            cfg.options.log_std_init,
            cfg.temperature,
        )

    def config_dict(self) -> dict[str, Any]:
        return dict(self._config)

    @classmethod
    def from_config_dict(cls, config: dict[str, Any]) -> Self:
        arguments = {name: value for name, value in config.items() if name != "policy_id"}
        return cls(**{**arguments, "hidden_sizes": tuple(arguments["hidden_sizes"])})

    def check_env_spec(self, spec: EnvSpec) -> None:
        if spec.state_dim != self.state_dim:
            raise ValueError(f"the policy reads {self.state_dim} state numbers, the environment gives {spec.state_dim}")

    def reads(self) -> PolicyInputs:
        return PolicyInputs({}, self.state_dim)

    def value_parameters(self) -> list[nn.Parameter]:
        return list(self.critic.parameters())

    def predict_action_batch(self, obs: Mapping[str, Any], mode: Mode = "train") -> ActionOutput:
        state = self._state(obs)
        mean = self._mean(state)
        sampled = mean if mode == "greedy" else self.head.sample(mean, row_noise_keys(obs, len(state)))
        actions = self._offset + self._scale * sampled.cpu().clamp(-1.0, 1.0)
        inputs = {"state": state, "sampled_actions": sampled} if mode == "train" else {}
        values = self.critic(state).float() if mode == "train" else state.new_zeros(len(state), 1)
        return ActionOutput(actions, self.head.logprobs(mean, sampled), values, inputs)

    def predict_values(self, obs: Mapping[str, Any]) -> Tensor:
        return self.critic(self._state(obs)).float()

    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        state, sampled = forward_inputs["state"], forward_inputs["sampled_actions"]
        mean = self._mean(state)
        return PolicyOutput(self.head.logprobs(mean, sampled), self.head.entropy(mean), self.critic(state).float())

    def take_statistics(self, statistics: Mapping[str, Mapping[str, list[float]]]) -> None:
        """Normalise the state by mean and standard deviation. Actions keep the environment's bounds, so that standard
        deviations of exploration keep their meaning."""
        if "state" in statistics:
            self._config |= {f"state_{name}": list(statistics["state"][name]) for name in ("mean", "std")}

    def usual_ranges(self) -> dict[str, tuple[list[float], list[float]]]:
        if self._config["state_mean"] is None:
            return {}
        mean, std = np.array(self._config["state_mean"]), np.array(self._config["state_std"])
        return {"state": ((mean - 2 * std).tolist(), (mean + 2 * std).tolist())}

    def sft_inputs(self, obs: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"state": self._normalized(obs)}

    def sft_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Squared error of the mean in normalised actions; standard deviations keep their values for exploration."""
        actions = batch["actions"].float()
        offset, scale = self._offset.to(actions.device), self._scale.to(actions.device)
        error = self._mean(batch["state"]) - ((actions - offset) / scale).clamp(-1.0, 1.0)
        mask = batch["mask"]
        return (error.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)

    def _mean(self, state: Tensor) -> Tensor:
        return self.actor(state).float().view(-1, self.num_action_chunks, self.action_dim)

    def _state(self, obs: Mapping[str, Any]) -> Tensor:
        return self._normalized(obs).to(self.head.log_std.device)

    def _normalized(self, obs: Mapping[str, Any]) -> Tensor:
        state = np.asarray(obs["state"], dtype=np.float32)
        if self._config["state_mean"] is not None:
            mean, std = np.array(self._config["state_mean"]), np.array(self._config["state_std"])
            state = ((state - mean) / std).astype(np.float32)
        return torch.from_numpy(state)


def _mlp(widths: list[int], num_outputs: int, activation: str, output_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    sizes = list(itertools.pairwise([*widths, num_outputs]))
    for number, (num_in, num_out) in enumerate(sizes, 1):
        linear = nn.Linear(num_in, num_out)
        nn.init.orthogonal_(linear.weight, output_gain if number == len(sizes) else math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers += [linear, _ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])
