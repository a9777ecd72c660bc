"""DSRL: a small policy chooses the noise from which a frozen flow policy acts (Wagenmaker et al. 2025,
arXiv:2506.15799). What off-policy learning trains, and its critics see, is the noise, not the action."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from torch import Tensor

from rlinf_lite.models.base import ActionOutput, Mode, Policy, PolicyInputs, PolicyOutput
from rlinf_lite.models.critics import Encoder
from rlinf_lite.models.gaussian_actor.policy import TanhGaussian
from rlinf_lite.models.registry import load_policy
from rlinf_lite.models.sampling import START_NOISE
from rlinf_lite.models.steering.card import Steering

if TYPE_CHECKING:
    from rlinf_lite.config.schema import ModelConfig
    from rlinf_lite.envs import EnvSpec

_FLOW = "flow"


class SteeredFlow(Policy):
    """A tanh-Gaussian over the flow's starting noise, `bound` times -1 to 1 in each number.

    The flow is no part of the weights: it is neither trained nor sent to rollout workers, who load the same files. A
    checkpoint has it in `flow/`.
    """

    policy_id, card = "steered", Steering

    def __init__(
        self,
        flow: Policy,
        state_dim: int,
        cameras: Mapping[str, Sequence[int]],
        noise_shape: Sequence[int],
        bound: float = 1.5,
        hidden_sizes: Sequence[int] = (128, 128, 128),
    ) -> None:
        super().__init__()
        self._config: dict[str, Any] = {
            "state_dim": state_dim,
            "cameras": {camera: list(size) for camera, size in cameras.items()},
            "noise_shape": list(noise_shape),
            "bound": bound,
            "hidden_sizes": list(hidden_sizes),
            "num_action_chunks": flow.num_action_chunks,
            "action_dim": flow.action_dim,
        }
        self._frozen = [flow.eval().requires_grad_(False)]  # in a list: no module of this one
        self.num_action_chunks, self.action_dim = flow.num_action_chunks, flow.action_dim
        self.chosen_dim = int(np.prod(noise_shape))
        self.head = TanhGaussian(Encoder(state_dim, cameras, reads_words=True), self.chosen_dim, hidden_sizes)

    @property
    def flow(self) -> Policy:
        """The frozen policy."""
        return self._frozen[0]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As of any module; the flow goes too."""
        self.flow.to(*args, **kwargs)
        return super().to(*args, **kwargs)

    @classmethod
    def from_config(cls, cfg: ModelConfig, spec: EnvSpec, read_weights: bool = True) -> Self:
        flow, options = load_policy(cfg.options.flow_dir, read_weights=read_weights), cfg.options
        if flow.num_action_chunks != cfg.num_action_chunks:
            text = f"is {cfg.num_action_chunks}, and the flow has {flow.num_action_chunks}. Set it to that"
            raise ValueError(f"model.num_action_chunks: {text}")
        flow.check_env_spec(spec)
        cameras = dict.fromkeys(spec.cameras, (options.camera_size, options.camera_size))
        return cls(flow, spec.state_dim or 0, cameras, _noise_shape(flow), options.bound, options.hidden_sizes)

    def config_dict(self) -> dict[str, Any]:
        return dict(self._config)

    @classmethod
    def from_config_dict(cls, config: dict[str, Any]) -> Self:
        raise NotImplementedError("a steered flow is loaded from a directory, which has the flow")

    def check_env_spec(self, spec: EnvSpec) -> None:
        self.flow.check_env_spec(spec)
        if (spec.state_dim or 0) != self._config["state_dim"]:
            raise ValueError(f"it reads {self._config['state_dim']} state numbers, and there are {spec.state_dim}")

    def reads(self) -> PolicyInputs:
        """What the flow reads. The pictures of both may have different sizes."""
        return PolicyInputs(self.head.encoder.cameras, self._config["state_dim"], has_instruction=True)

    def predict_action_batch(self, obs: Mapping[str, Any], mode: Mode = "train") -> ActionOutput:
        acted = self.head.act(obs, mode)
        start = self._config["bound"] * acted.chosen.view(-1, *self._config["noise_shape"])
        actions = self.flow.predict_action_batch({**obs, START_NOISE: start}, "sampled").actions
        kept = {"chosen": acted.chosen[:, None]} if mode == "train" else {}
        return ActionOutput(actions, acted.logprobs[:, None], start.new_zeros(len(start), 1), kept)

    def sample_with_logprob(self, inputs: Mapping[str, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
        """The noise to act from, over `bound`: [B, 1, `chosen_dim`] in -1 to 1, and its log-probabilities."""
        chosen, logprobs = self.head.sampled(inputs, noise[:, 0])
        return chosen[:, None], logprobs[:, None]

    def predict_values(self, obs: Mapping[str, Any]) -> Tensor:
        raise NotImplementedError("steered has no value of an observation")

    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        raise NotImplementedError("steered is trained off-policy, by its critics")

    def sft_inputs(self, obs: Mapping[str, Any]) -> dict[str, Tensor]:
        return self.head.encoder.inputs(obs)

    def save_pretrained(self, directory: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        super().save_pretrained(directory, state_dict)
        self.flow.save_pretrained(Path(directory) / _FLOW)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        model: ModelConfig | None = None,
        read_weights: bool = True,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> Self:
        directory = Path(directory)
        found = dict(json.loads((directory / "config.json").read_text()) if config is None else config)
        for name in ("policy_id", "num_action_chunks", "action_dim"):
            found.pop(name, None)
        policy = cls(load_policy(directory / _FLOW, read_weights=read_weights), **found)
        if read_weights:
            policy.load_state_dict(policy.read_state(directory))
        return policy


def _noise_shape(flow: Any) -> tuple[int, int]:
    """H and D of the noise that a flow starts from. Raises ValueError if the policy is no flow."""
    if not hasattr(flow, "sampler"):
        raise ValueError(f"model.options.flow_dir: {flow.policy_id} is no flow, and acts from no noise. Name a flow")
    if hasattr(flow, "cfg"):
        return flow.cfg.horizon, flow.cfg.max_action_dim
    return flow.num_action_chunks, flow.action_dim
