"""Base classes for policies of which only the network is new: `GaussianPolicy`, `TokenPolicy`, `VelocityPolicy`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from rlinf_lite.envs.base import EnvSpec
from rlinf_lite.models.base import ActionOutput, Mode, Policy, PolicyInputs, PolicyOutput, row_noise_keys
from rlinf_lite.models.flow.sampler import Sampler, Velocity, head_std, velocity_error
from rlinf_lite.models.heads import CategoricalTokens, Gaussian
from rlinf_lite.models.pictures import resized
from rlinf_lite.models.sampling import START_NOISE

if TYPE_CHECKING:
    from rlinf_lite.config.schema import ModelConfig


class BuiltPolicy(Policy):
    """The parts of a policy that do not depend on its layers: sizes, options, config file, observations as tensors.
    Normalised actions are in [-1, 1], which maps onto the environment's bounds."""

    spec: EnvSpec
    """The environment: `state_dim` (None without a state), `cameras` with their height and width, ..."""
    options: SimpleNamespace
    """`model.options`, by name."""
    num_values: int
    """Columns of the values: 1, or one per action of a chunk (`model.value_type: action_level`)."""

    def __init__(
        self,
        spec: EnvSpec,
        options: Mapping[str, Any],
        num_action_chunks: int = 1,
        value_type: str = "chunk_level",
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.spec, self.options = spec, SimpleNamespace(**options)
        self.num_action_chunks, self.action_dim = num_action_chunks, spec.action_dim
        self.value_type, self.temperature = value_type, temperature
        self.num_values = 1 if value_type == "chunk_level" else num_action_chunks
        low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
        self._offset, self._scale = (high + low) / 2, (high - low) / 2
        try:
            self.build()
        except TypeError as error:
            if spec.state_dim is not None:
                raise
            cameras = ", ".join(spec.cameras)
            text = f"spec.state_dim is None, as the environment has no state (its cameras: {cameras}): build: {error}"
            raise TypeError(text) from error

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Count of numbers that the network returns per row."""

    @abstractmethod
    def build(self) -> None:
        """Make the layers, from `self.spec`, `self.options`, `self.num_outputs` and `self.num_values`."""

    def inputs(self, obs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The network's inputs: `state` float32 [B, S], and the pictures of each camera under its name, uint8
        [B, H, W, 3], scaled to the size that the policy was made for. Trajectories keep them, so pictures stay bytes.
        Override it to read more, such as instructions."""
        images = {name: torch.from_numpy(np.asarray(obs["images"][name])) for name in self.spec.cameras}
        found = {name: resized(image, self.spec.cameras[name]) for name, image in images.items()}
        if self.spec.state_dim is not None:
            found["state"] = torch.from_numpy(np.asarray(obs["state"], np.float32))
        return found

    @classmethod
    def from_config(cls, cfg: ModelConfig, spec: EnvSpec) -> Self:
        options = cfg.options if isinstance(cfg.options, Mapping) else cfg.options.model_dump()
        return cls(spec, options, cfg.num_action_chunks, cfg.value_type, cfg.temperature)

    def config_dict(self) -> dict[str, Any]:
        cameras = {name: list(size) for name, size in self.spec.cameras.items()}
        return {
            "spec": {**asdict(self.spec), "cameras": cameras},
            "options": vars(self.options),
            "num_action_chunks": self.num_action_chunks,
            "value_type": self.value_type,
            "temperature": self.temperature,
        }

    @classmethod
    def from_config_dict(cls, config: dict[str, Any]) -> Self:
        given = {name: value for name, value in config.items() if name not in ("policy_id", "spec")}
        cameras = {name: (size[0], size[1]) for name, size in config["spec"]["cameras"].items()}
        return cls(EnvSpec(**{**config["spec"], "cameras": cameras}), **given)

    def check_env_spec(self, spec: EnvSpec) -> None:
        for name in ("state_dim", "cameras", "action_dim"):
            own, given = getattr(self.spec, name), getattr(spec, name)
            if own != given:
                raise ValueError(f"the policy was made for {name} {own}, the environment has {given}")

    def reads(self) -> PolicyInputs:
        return PolicyInputs(dict(self.spec.cameras), self.spec.state_dim or 0)

    def _sized(self, found: Any, what: str, rows: int, count: str) -> Tensor:
        """`found` as float32. Raises ValueError unless it has `rows` rows and as many columns as attribute `count`."""
        columns = getattr(self, count)
        if isinstance(found, Tensor) and found.shape[:1] == (rows,) and found.numel() == rows * columns:
            return found.float()
        given = list(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(f"{what} {given}; they are [B, {count}] = [{rows}, {columns}]")

    def _on_device(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        device = next(self.parameters()).device
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    def _to_env(self, actions: Tensor) -> Tensor:
        """Normalised `actions` [B, C, D] in the environment's units, on the CPU."""
        return self._offset + self._scale * actions.cpu()

    def _to_normalised(self, actions: Tensor) -> Tensor:
        """The inverse, within [-1, 1]."""
        found = (actions.float() - self._offset.to(actions.device)) / self._scale.to(actions.device)
        return found.clamp(-1.0, 1.0)


class NetworkPolicy(BuiltPolicy):
    """A policy whose network is called once per decision. A subclass writes `build` and `network`."""

    outputs_per_action: int
    """Outputs of the network for each number of an action."""
    head: Gaussian | CategoricalTokens

    @abstractmethod
    def network(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs [B, num_outputs] for the head, and values [B, num_values], from the result of `inputs`."""

    @property
    def num_outputs(self) -> int:
        return self.num_action_chunks * self.action_dim * self.outputs_per_action

    def predict_action_batch(self, obs: Mapping[str, Any], mode: Mode = "train") -> ActionOutput:
        inputs = self._on_device(self.inputs(obs))
        outputs, values = self._passes(inputs)
        chosen = self._choose(outputs, None if mode == "greedy" else row_noise_keys(obs, len(outputs)))
        actions = self._to_env(self._normalised(chosen))
        kept = {**inputs, "chosen": chosen} if mode == "train" else {}
        return ActionOutput(actions, self.head.logprobs(outputs, chosen), values, kept)

    def predict_values(self, obs: Mapping[str, Any]) -> Tensor:
        return self._passes(self._on_device(self.inputs(obs)))[1]

    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        outputs, values = self._passes(forward_inputs)
        return PolicyOutput(self.head.logprobs(outputs, forward_inputs["chosen"]), self.head.entropy(outputs), values)

    def sft_inputs(self, obs: Mapping[str, Any]) -> dict[str, Tensor]:
        return self.inputs(obs)

    def sft_loss(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["mask"]
        losses = self._distance(self._passes(batch)[0], self._to_normalised(batch["actions"])).mean(-1)
        return (losses * mask).sum() / mask.sum().clamp(min=1)

    @abstractmethod
    def _choose(self, outputs: Tensor, noise_keys: np.ndarray | None) -> Tensor:
        """Actions [B, C, D] as the head scores them: sampled with each row's own noise; the likeliest for None."""

    @abstractmethod
    def _normalised(self, chosen: Tensor) -> Tensor:
        """The actions [B, C, D] of `chosen`, in [-1, 1]."""

    @abstractmethod
    def _distance(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        """Imitation loss of each number [B, C, D]."""

    def _passes(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        found, rows = self.network(inputs), len(next(iter(inputs.values())))
        if not isinstance(found, tuple | list) or len(found) != 2:
            given = f"{len(found)} of them" if isinstance(found, tuple | list) else f"a {type(found).__name__}"
            raise TypeError(f"network returned {given}; it returns two tensors, (outputs, values)")
        outputs = self._sized(found[0], "network returned outputs", rows, "num_outputs")
        values = self._sized(found[1], "network returned values", rows, "num_values")
        last = () if self.outputs_per_action == 1 else (self.outputs_per_action,)
        shape = (self.num_action_chunks, self.action_dim, *last)
        return outputs.reshape(-1, *shape), values.reshape(-1, self.num_values)


class GaussianPolicy(NetworkPolicy):
    """The network's outputs are means of normalised actions; the standard deviations are parameters, the same in every
    state. Samples are not squashed: actions outside the bounds are clipped. Imitation: squared error of the means."""

    outputs_per_action = 1
    log_std_init = -0.5

    head: Gaussian

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head = Gaussian(self.num_action_chunks, self.action_dim, self.log_std_init, self.temperature)

    def _choose(self, outputs: Tensor, noise_keys: np.ndarray | None) -> Tensor:
        return outputs if noise_keys is None else self.head.sample(outputs, noise_keys)

    def _normalised(self, chosen: Tensor) -> Tensor:
        return chosen.clamp(-1.0, 1.0)

    def _distance(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        return (outputs - wanted).square()


class TokenPolicy(NetworkPolicy):
    """The network's outputs are logits of `outputs_per_action` equal bins of [-1, 1], for each number of an action.
    Imitation: cross-entropy of the bin that a number lies in."""

    outputs_per_action = 256

    head: CategoricalTokens

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head = CategoricalTokens(self.temperature)

    def _choose(self, outputs: Tensor, noise_keys: np.ndarray | None) -> Tensor:
        if noise_keys is None:
            return outputs.argmax(-1)
        noise = self.head.noise(noise_keys, self.num_action_chunks * self.action_dim, outputs.device)
        return self.head.sample(outputs, noise.view(outputs.shape[:-1]))

    def _normalised(self, chosen: Tensor) -> Tensor:
        return (chosen + 0.5) * (2 / self.outputs_per_action) - 1

    def _distance(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        bins = ((wanted + 1) / 2 * self.outputs_per_action).long().clamp(max=self.outputs_per_action - 1)
        return -self.head.logprobs(outputs, bins)


class VelocityPolicy(BuiltPolicy):
    """The network is a velocity, which turns noise into a chunk of normalised actions in `num_steps` steps
    (`flow/sampler.py` has the formulas). A subclass writes `build`, `prefix` and `velocity`; `build` may set the
    attributes below. Imitation: squared error of the velocity."""

    num_steps: int = 4
    method: Literal["flow_sde", "flow_noise", "flow_cps"] = "flow_sde"
    noise_level: float = 0.5
    noise_range: tuple[float, float] = (0.08, 0.16)
    ignore_last: bool = False
    joint: Literal["sum", "mean"] = "sum"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.temperature != 1:
            raise ValueError(f"model.temperature: is {self.temperature}, and a flow has none. Set it to 1")
        self.sampler = Sampler(self.num_steps, "lerobot", self.method, self.noise_level, self.ignore_last, self.joint)

    @abstractmethod
    def prefix(self, inputs: dict[str, Tensor]) -> tuple[Any, Tensor]:
        """The features that `velocity` reads, computed once per decision, and values [B, num_values]."""

    @abstractmethod
    def velocity(self, prefix: Any, x: Tensor, t: Tensor) -> Tensor:
        """Velocities [B, num_outputs] at noisy actions `x` [B, C, D] and times `t` [B], from 1 (noise) to 0 (actions).
        With flow_noise, the D velocities of each action are followed by D more numbers, from which standard deviations
        within `noise_range` are computed."""

    @property
    def num_outputs(self) -> int:
        return self.num_action_chunks * self.action_dim * (2 if self.method == "flow_noise" else 1)

    def predict_action_batch(self, obs: Mapping[str, Any], mode: Mode = "train") -> ActionOutput:
        inputs = self._on_device(self.inputs(obs))
        prefix, values = self._prefix(inputs)
        keys, shape = row_noise_keys(obs, len(values)), (self.num_action_chunks, self.action_dim)
        chain = self.sampler.act(self._velocity(prefix), keys, shape, mode, values.device, obs.get(START_NOISE))
        kept = {**inputs, "visited": chain.visited, "step": chain.step} if mode == "train" else {}
        return ActionOutput(self._to_env(chain.actions.clamp(-1.0, 1.0)), chain.logprobs, values, kept)

    def predict_values(self, obs: Mapping[str, Any]) -> Tensor:
        return self._prefix(self._on_device(self.inputs(obs)))[1]

    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        prefix, values = self._prefix(forward_inputs)
        velocity = self._velocity(prefix)
        logprobs, entropy = self.sampler.score(velocity, forward_inputs["visited"], forward_inputs["step"])
        return PolicyOutput(logprobs, entropy, values)

    def sft_inputs(self, obs: Mapping[str, Any]) -> dict[str, Tensor]:
        inputs = self.inputs(obs)
        keys = row_noise_keys(obs, len(next(iter(inputs.values()))))
        return inputs | self.sampler.draw_imitation(keys, (self.num_action_chunks, self.action_dim))

    def sft_loss(self, batch: dict[str, Tensor]) -> Tensor:
        velocity, mask = self._velocity(self.prefix(batch)[0]), batch["mask"]
        actions = self._to_normalised(batch["actions"])
        losses = velocity_error(velocity, actions, batch["noise"], batch["time"]).mean(-1)
        return (losses * mask).sum() / mask.sum().clamp(min=1)

    def _prefix(self, inputs: dict[str, Tensor]) -> tuple[Any, Tensor]:
        prefix, values = self.prefix(inputs)
        rows = len(next(iter(inputs.values())))
        return prefix, self._sized(values, "prefix returned values", rows, "num_values").reshape(-1, self.num_values)

    def _velocity(self, prefix: Any) -> Velocity:
        def velocity(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
            found = self._sized(self.velocity(prefix, x, t), "velocity returned", len(x), "num_outputs")
            found = found.reshape(len(x), self.num_action_chunks, -1)
            if self.method != "flow_noise":
                return found, None
            v, raw = found.chunk(2, dim=-1)
            return v, head_std(raw, *self.noise_range)

        return velocity
