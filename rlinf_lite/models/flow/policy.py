"""pi0, pi0.5 and SmolVLA as policies: acting by the ODE, exploring around it, and scoring the explored actions.

A step's Gaussian is over normalised actions of the policy's horizon and padded width. Only executed actions and the
robot's own dimensions are scored: `logprobs` [B, num_action_chunks, action_dim].
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from rlinf_lite.cards import Observed
from rlinf_lite.models.base import (
    ActionOutput,
    CheckpointFormatError,
    Mode,
    Policy,
    PolicyInputs,
    PolicyOutput,
    read_policy_config,
    row_noise_keys,
    tokenizer_files,
)
from rlinf_lite.models.conditions import CONDITION, conditioned
from rlinf_lite.models.flow import formats
from rlinf_lite.models.flow.card import Pi0, Pi05, SmolVLA
from rlinf_lite.models.flow.config import (
    FlowConfig,
    fresh_config,
    present_slots,
    unseen_cameras,
    with_run_settings,
)
from rlinf_lite.models.flow.formats import Origin
from rlinf_lite.models.flow.inputs import (
    Normalizer,
    ObservationError,
    PromptEncoder,
    TokenizerError,
    find_tokenizer,
    padded,
    pixel_values,
    read_instructions,
    read_state,
    stored_images,
)
from rlinf_lite.models.flow.layers import ExactLinear
from rlinf_lite.models.flow.networks import Prefix, build_network, init_weights
from rlinf_lite.models.flow.published import read_config
from rlinf_lite.models.flow.sampler import Sampler, Velocity, head_std, velocity_error
from rlinf_lite.models.graphs import Calls
from rlinf_lite.models.layers import prepare_layers
from rlinf_lite.models.lora import add_adapters, lacks_adapters, merge_adapters
from rlinf_lite.models.sampling import START_NOISE
from rlinf_lite.shipped import shipped

if TYPE_CHECKING:
    from rlinf_lite.config.schema import ModelConfig
    from rlinf_lite.envs import EnvSpec

_VLM = ("vision", "connector", "language")  # modules of the network that `trainable: expert` freezes


class ValueHead(nn.Module):
    """An MLP whose outputs start near 0; tensors are named as in RLinf's checkpoints."""

    def __init__(self, num_in: int, cfg: FlowConfig) -> None:
        super().__init__()
        num_values = 1 if cfg.value_type == "chunk_level" else cfg.num_action_chunks
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise([num_in, *cfg.value_hidden_sizes]):
            layers += [ExactLinear(before, after), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, ExactLinear([num_in, *cfg.value_hidden_sizes][-1], num_values))
        self.init_weights()

    def init_weights(self) -> None:
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
        nn.init.normal_(cast(nn.Linear, self.mlp[-1]).weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x)
        return out


class NoiseHead(nn.Module):
    """Standard deviations of flow_noise from the expert's states; tensors are named as in RLinf's checkpoints."""

    def __init__(self, cfg: FlowConfig) -> None:
        super().__init__()
        self.range = cfg.noise_range
        sizes = itertools.pairwise([cfg.expert.width, *cfg.noise_hidden_sizes, cfg.max_action_dim])
        layers = [nn.ModuleDict({"linear_1": ExactLinear(before, after)}) for before, after in sizes]
        self.mlp_logvar = nn.ModuleDict({"moduleList": nn.ModuleList(layers)})

    def init_weights(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., max_action_dim]."""
        layers = cast(nn.ModuleList, self.mlp_logvar["moduleList"])
        for number, layer in enumerate(layers, 1):
            x = cast(nn.ModuleDict, layer)["linear_1"](x)
            x = torch.tanh(x) if number < len(layers) else x
        return head_std(x, *self.range)


class FlowPolicy(Policy):
    """A policy of one of the three families (`cfg.family`). Each family has a subclass, which `model.id` names."""

    family: str

    def __init__(self, cfg: FlowConfig, prompts: PromptEncoder | None = None) -> None:
        """Without `prompts` the policy cannot act; it can be loaded, inspected and saved."""
        super().__init__()
        self.cfg, self.prompts, self.origin = cfg, prompts, Origin()
        self.num_action_chunks, self.action_dim = cfg.num_action_chunks, cfg.action_dim
        self.relative_actions = cfg.delta_dims
        self.sampler, self.calls = Sampler.of(cfg), Calls()
        self.states = Normalizer(cfg, "state", cfg.state_dim)
        self.actions = Normalizer(cfg, "actions", cfg.action_dim)
        self.network = build_network(cfg)
        self.value_head = ValueHead(cfg.text.width, cfg)
        self.noise_head = NoiseHead(cfg) if cfg.method == "flow_noise" else None
        self._prefix_is_fixed = self._keep_prefix = False
        if cfg.lora:
            self._add_adapters(cfg.lora)

    def train(self, mode: bool = True) -> Self:
        """Dropout, which transformers' layers may have, stays off, so that training scores the policy that acted."""
        super().train(mode)
        self.network.eval()
        return self

    # acting

    def predict_action_batch(self, obs: Mapping[str, Any], mode: Mode = "train") -> ActionOutput:
        """train explores; sampled follows the ODE from random noise, as published; greedy the ODE from the noise's
        mean, 0."""
        inputs = self._inputs(obs)
        num_rows, device = len(inputs["state"]), inputs["state"].device
        keys, shape = row_noise_keys(obs, num_rows), (self.cfg.horizon, self.cfg.max_action_dim)
        drawn = self.sampler.draw(keys, shape, device, obs.get(START_NOISE))
        found = self.calls(self, self._act, inputs, *drawn, mode)
        actions, logprobs = self._to_env(self._executed(found["actions"]), obs), self._executed(found["logprobs"])
        if mode != "train":
            return ActionOutput(actions, logprobs, logprobs[:, :1, 0], {})
        return ActionOutput(
            actions, logprobs, found["values"], {**inputs, "visited": found["visited"], "step": found["step"]}
        )

    def _act(self, inputs: dict[str, Tensor], noise: Tensor, chosen: Tensor, mode: Mode) -> dict[str, Tensor]:
        """The fields of a `Chain`, and with mode train the `values`."""
        prefix = self._prefix(inputs)
        chain = self.sampler.follow(self._guided(prefix, inputs), noise, chosen, mode)
        return vars(chain) | ({"values": self._values(prefix)} if mode == "train" else {})

    def release(self) -> None:
        self.calls.clear()

    def predict_values(self, obs: Mapping[str, Any]) -> Tensor:
        return self._values(self._prefix(self._inputs(obs)))

    def _inputs(self, obs: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Tensor]:
        """Pictures uint8 by slot, padded prompts, and the padded state in the network's units. With guidance prompts
        have conditions, and where it takes two passes the prompts without are there too."""
        cfg, given = self.cfg, obs.get("images", {})
        device = device or self.network.action_in_proj.weight.device
        problem = unseen_cameras(cfg, given)
        if problem:
            raise ObservationError(f"model.options.cameras: {problem}")
        if self.prompts is None:
            raise TokenizerError("the policy has no tokenizer: copy that of its base model to its directory")
        instructions = read_instructions(obs)
        inputs = {
            f"image_{slot}": stored_images(np.asarray(given[camera]), cfg)
            for slot, camera in present_slots(cfg, given).items()
        }
        for name, images in inputs.items():
            if len(images) != len(instructions):
                text = f"{name} has {len(images)} rows, and there are {len(instructions)} instructions"
                raise ObservationError(text)
        state = self.states.normalize(read_state(obs, cfg, len(instructions)))
        conditions = obs.get(CONDITION)
        texts = instructions if cfg.guidance is None else conditioned(instructions, conditions)
        inputs["tokens"], inputs["token_mask"] = self.prompts.encode(texts, state)
        if cfg.guidance not in (None, 1) and conditions is None:
            inputs["plain_tokens"], inputs["plain_token_mask"] = self.prompts.encode(instructions, state)
        inputs["state"] = padded(torch.tensor(state), cfg.max_state_dim)
        return {name: x.to(device) for name, x in inputs.items()}

    def _to_env(self, actions: Tensor, obs: Mapping[str, Any]) -> Tensor:
        """Normalised `actions` [B, C, D] in the environment's units, on the CPU."""
        found = self.actions.unnormalize(actions.cpu())
        if self.cfg.delta_dims:
            found = found + self._offsets(obs).to(found.dtype)
        if self.cfg.action_bounds is not None:
            low, high = (torch.tensor(bound, dtype=found.dtype) for bound in self.cfg.action_bounds)
            found = found.clamp(low, high)
        return found.float()

    def _offsets(self, obs: Mapping[str, Any]) -> Tensor:
        """The state in the relative dimensions, which actions are relative to, and 0 in the others: [B, 1, D]."""
        state = np.asarray(obs["state"])[:, None, : self.cfg.delta_dims]
        return torch.nn.functional.pad(torch.tensor(state), (0, self.cfg.action_dim - state.shape[-1]))

    def _executed(self, x: Tensor) -> Tensor:
        """The part [B, C, D] of `x` [B, H, max_action_dim] that the environment executes."""
        return x[:, : self.num_action_chunks, : self.action_dim]

    # the network

    def _prefix(self, inputs: Mapping[str, Tensor]) -> Prefix:
        """The prefix of inputs from `_inputs`; the part from `fixed_inputs` is not computed again if it is there."""
        read = Prefix.from_kept(inputs) if "prefix_mask" in inputs else self._read(inputs)
        return self.network.with_state(read, inputs["state"])

    def _read(self, inputs: Mapping[str, Tensor]) -> Prefix:
        slots = [name for slot in self.cfg.slots if (name := f"image_{slot}") in inputs]
        images = torch.stack([pixel_values(inputs[name], self.cfg) for name in slots], dim=1)
        mask = torch.ones(images.shape[:2], dtype=torch.bool, device=images.device)
        with torch.no_grad() if self._prefix_is_fixed else nullcontext():
            return self.network.read(images, mask, inputs["tokens"], inputs["token_mask"])

    def _velocity(self, prefix: Prefix, state: Tensor) -> Velocity:
        def velocity(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
            v, states = self.network.velocity(prefix, state, x, t)
            return v, None if self.noise_head is None else self.noise_head(states)

        return velocity

    def _guided(self, prefix: Prefix, inputs: Mapping[str, Tensor]) -> Velocity:
        """The velocity given `prefix`, that of `inputs`; with plain prompts among these, (1 - w) times theirs plus w
        times that, where w is `cfg.guidance`."""
        velocity, w = self._velocity(prefix, inputs["state"]), self.cfg.guidance
        if w is None or "plain_tokens" not in inputs:
            return velocity
        plain_prompts = {"tokens": inputs["plain_tokens"], "token_mask": inputs["plain_token_mask"]}
        read = self.network.with_state(self._read({**inputs, **plain_prompts}), inputs["state"])
        plain = self._velocity(read, inputs["state"])

        def guided(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
            v, std = velocity(x, t)
            return (1 - w) * plain(x, t)[0] + w * v, std

        return guided

    def _values(self, prefix: Prefix) -> Tensor:
        values: Tensor = self.value_head(prefix.mean)
        return values

    # training

    def fixed_inputs(self, forward_inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The part of the prefix that does not train, with `model.options.keep_prefix`; else nothing."""
        return self._read(forward_inputs).kept() if self._keep_prefix else {}

    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        prefix = self._prefix(forward_inputs)
        velocity = self._guided(prefix, forward_inputs)
        logprobs, entropy = self.sampler.score(velocity, forward_inputs["visited"], forward_inputs["step"])
        return PolicyOutput(self._executed(logprobs), self._executed(entropy), self._values(prefix))

    def sft_inputs(self, obs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Inputs as in `predict_action_batch`, each row's noise [B, H, max_action_dim] and time [B], and the offsets of
        relative actions, if there are such."""
        inputs = self._inputs(obs, torch.device("cpu"))
        keys = row_noise_keys(obs, len(inputs["state"]))
        inputs |= self.sampler.draw_imitation(keys, (self.cfg.horizon, self.cfg.max_action_dim))
        if self.cfg.delta_dims:
            inputs["offsets"] = self._offsets(obs)
        return inputs

    def sft_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Squared error of the velocity; in openpi's layout its mean includes padded dimensions, in LeRobot's not."""
        actions = batch["actions"]
        if actions.shape[1] > self.cfg.horizon:
            raise ValueError(f"chunks have {actions.shape[1]} actions, and the policy's horizon is {self.cfg.horizon}")
        if "offsets" in batch:
            actions = actions - batch["offsets"]
        rest = self.cfg.horizon - actions.shape[1]  # actions after the demonstrated chunk do not count
        actions = torch.cat([actions, actions[:, -1:].expand(-1, rest, -1)], dim=1)
        error = self.flow_error(batch, padded(self.actions.normalize(actions), self.cfg.max_action_dim))
        error = error[:, : self.num_action_chunks]
        if self.cfg.layout == "lerobot":
            error = error[..., : self.action_dim]
        mask = batch["mask"]
        return (error.mean(-1) * mask).sum() / mask.sum().clamp(min=1)

    def flow_error(self, inputs: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """`velocity_error` of normalised, padded `actions` [B, H, max_action_dim], with `noise` and `time` of
        `inputs`."""
        velocity = self._velocity(self._prefix(inputs), inputs["state"])
        return velocity_error(velocity, actions, inputs["noise"], inputs["time"])

    def take_statistics(self, statistics: Mapping[str, Mapping[str, list[float]]]) -> None:
        """Replace the statistics of actions, and those of the state if demonstrations have one."""
        found = {"actions": dict(statistics["action"])}
        if self.cfg.state_dim and "state" in statistics:
            found["state"] = dict(statistics["state"])
        self.cfg = replace(self.cfg, statistics={**self.cfg.statistics, **found})
        self.states = Normalizer(self.cfg, "state", self.cfg.state_dim)
        self.actions = Normalizer(self.cfg, "actions", self.cfg.action_dim)

    def usual_ranges(self) -> dict[str, tuple[list[float], list[float]]]:
        return {name: x.usual_range() for name, x in (("state", self.states), ("action", self.actions)) if x.has_range}

    # what the framework asks

    def value_parameters(self) -> list[nn.Parameter]:
        return list(self.value_head.parameters())

    def fsdp_units(self) -> list[nn.Module]:
        network = cast(Any, self.network)
        return [*network.vision.encoder.layers, *network.language.layers, *network.expert.layers]

    def check_env_spec(self, spec: EnvSpec) -> None:
        problem = unseen_cameras(self.cfg, spec.cameras)
        if problem:
            raise ValueError(f"model.options.cameras: {problem}")
        if self.cfg.state_dim and (spec.state_dim or 0) != self.cfg.state_dim:
            raise ValueError(
                f"the policy reads {self.cfg.state_dim} state numbers, the environment gives {spec.state_dim or 'none'}"
            )

    def reads(self) -> PolicyInputs:
        """Cameras are named as in the environment. Without `cfg.cameras`, one of the policy's cameras is enough."""
        width, height = self.cfg.resize_to
        named = None if self.cfg.cameras is None else [*present_slots(self.cfg, {}).values()]
        cameras = dict.fromkeys(named or self.cfg.slots, (height, width))
        return PolicyInputs(cameras, self.cfg.state_dim, has_instruction=True, needs_all_cameras=named is not None)

    @classmethod
    def from_config(cls, cfg: ModelConfig, spec: EnvSpec) -> Self:
        config = fresh_config(cls.family, cfg, Observed(spec.action_dim, spec.state_dim or 0, spec.cameras))
        low, high = np.array(spec.action_low), np.array(spec.action_high)
        zeros, ones = [0.0] * config.state_dim, [1.0] * config.state_dim
        middle, half = ((high + low) / 2).tolist(), ((high - low) / 2).tolist()
        actions = {"mean": middle, "std": half, "q01": low.tolist(), "q99": high.tolist()}
        state = {"mean": zeros, "std": ones, "q01": [-1.0] * config.state_dim, "q99": ones}
        config = replace(
            config,
            statistics={"state": state, "actions": actions},
            action_bounds=(tuple(low.tolist()), tuple(high.tolist())),
        )
        directory = shipped("assets") / "tiny_tokenizer"
        policy = cls(config, PromptEncoder.from_directory(directory, config))
        init_weights(policy.network)
        files = Origin.of(directory).files
        folder = "tokenizer/" if config.layout == "lerobot" else ""  # where LeRobot's processors look for it
        policy.origin = Origin({f"{folder}{name}": content for name, content in files.items()})
        policy.check_env_spec(spec)
        return policy.prepare(cfg)

    def prepare(self, cfg: ModelConfig) -> Self:
        """Apply the run's options that are not part of `cfg`: trainable modules, adapters, gradient checkpointing."""
        frozen = cfg.options.trainable == "expert"
        lora = {**cfg.options.lora.model_dump(), "trainable": cfg.options.trainable}
        if lacks_adapters(self.cfg.lora, lora, "FlowPolicy"):
            self._add_adapters(lora)
        for name in _VLM if frozen else ():
            self.network.get_submodule(name).requires_grad_(False)
        self._prefix_is_fixed, self._keep_prefix = frozen, frozen and cfg.options.keep_prefix
        prepare_layers(self, cfg.options)
        return self

    def _add_adapters(self, lora: Mapping[str, Any]) -> None:
        """Add adapters to the expert, and with `trainable: all` to the vision-language model; smaller modules train
        themselves."""
        names = [name for name, _ in self.network.named_children()]
        small = [f"network.{name}" for name in names if name not in (*_VLM, "expert")]
        heads = [name for name in ("value_head", "noise_head") if getattr(self, name) is not None]
        without = [f"network.{name}" for name in _VLM] if lora["trainable"] == "expert" else []
        also = [f"network.{name.removeprefix('network.')}" for name in lora["also_train"]]
        add_adapters(self, lora, [*small, *heads, *also], without)
        self.cfg = replace(self.cfg, lora=dict(lora))

    def merge_adapters(self) -> None:
        """Merge the adapters into the weights and remove them."""
        merge_adapters(self)
        self.cfg = replace(self.cfg, lora={})

    # files

    def config_dict(self) -> dict[str, Any]:
        return self.cfg.to_dict()

    @classmethod
    def from_config_dict(cls, config: dict[str, Any]) -> Self:
        return cls(FlowConfig.from_dict(config))

    def save_pretrained(self, directory: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the published layout in which the policy was read, and our additions; see `formats`."""
        state = self.state_dict() if state_dict is None else state_dict
        formats.write(Path(directory), self.policy_id, self.cfg, state, self.origin)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        model: ModelConfig | None = None,
        read_weights: bool = True,
        tokenizer: Path | None = None,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Load what `save_pretrained` wrote, or a published directory. Heads that it lacks get random weights.
        `tokenizer`: a directory with a tokenizer, used if `directory` has none. `config`: the result of
        `read_policy_config`, if the caller has it already.

        Raises:
            CheckpointFormatError: if the policy is of another family, or listing tensors that are missing, unexpected
                or of the wrong shape.
            UnsupportedFlowError: if files are damaged, or the policy has an unsupported part.
            StatisticsError: if statistics are missing.
            TokenizerError: if there is no tokenizer; it says how to get one.
        """
        directory = Path(directory)
        config = read_policy_config(directory) if config is None else config
        cfg = read_config(directory, None if model is None else model.options.asset_id, config)
        if cfg.family != cls.family or (model is not None and model.id in FAMILIES and model.id != cls.family):
            wanted = cls.family if model is None else model.id
            raise CheckpointFormatError(
                f"{directory} holds {cfg.family}, and {wanted} is asked for. Set model.id to {cfg.family}"
            )
        cfg = cfg if model is None else with_run_settings(cfg, model)
        file = find_tokenizer(directory, cfg)
        source = directory if tokenizer is None or file is not None else tokenizer
        with no_init_weights():
            policy = cls(cfg, PromptEncoder.from_directory(source, cfg))
        policy.value_head.init_weights()
        if policy.noise_head is not None:
            policy.noise_head.init_weights()
        if read_weights:
            state, policy.origin = formats.read_state(directory, config, cfg, policy.state_dict())
            policy.load_state_dict(state, strict=False)  # published policies have no heads
        if source != directory and (file := find_tokenizer(source, cfg)) is not None:
            policy.origin.files |= tokenizer_files(file.parent)
        return policy if model is None else policy.prepare(model)

    def read_state(self, directory: str | Path) -> dict[str, Tensor]:
        directory = Path(directory)
        return formats.read_state(directory, read_policy_config(directory), self.cfg, self.state_dict())[0]


class Pi0Policy(FlowPolicy):
    family, policy_id, card = "pi0", "pi0", Pi0


class Pi05Policy(FlowPolicy):
    family, policy_id, card = "pi05", "pi05", Pi05


class SmolVLAPolicy(FlowPolicy):
    family, policy_id, card = "smolvla", "smolvla", SmolVLA


FAMILIES = ("pi0", "pi05", "smolvla")
