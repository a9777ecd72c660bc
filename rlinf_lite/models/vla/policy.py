"""OpenVLA and OpenVLA-OFT as policies: from images and an instruction to a distribution over each action token."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.initialization import no_init_weights

from rlinf_lite.cards import Observed
from rlinf_lite.envs.observations import ObservationError as ObservationError
from rlinf_lite.file_modes import follow_umask
from rlinf_lite.models.base import (
    ActionOutput,
    Mode,
    Policy,
    PolicyInputs,
    PolicyOutput,
    read_policy_config,
    row_noise_keys,
    tokenizer_files,
)
from rlinf_lite.models.graphs import Calls
from rlinf_lite.models.heads import CategoricalTokens
from rlinf_lite.models.layers import prepare_layers
from rlinf_lite.models.lora import add_adapters, lacks_adapters, merge_adapters
from rlinf_lite.models.text.causal_lm import logits_cap, logits_scale
from rlinf_lite.models.vla import checkpoint
from rlinf_lite.models.vla.actions import RANGES, ActionCodec, Normalizer, dataset_statistics
from rlinf_lite.models.vla.card import OpenVLA
from rlinf_lite.models.vla.checkpoint import Origin
from rlinf_lite.models.vla.config import VLAConfig, fresh_config, with_run_settings
from rlinf_lite.models.vla.inputs import PromptEncoder, TokenizerError, normalize_images, resize_images
from rlinf_lite.models.vla.vision import Projector, VisionBackbone
from rlinf_lite.shipped import shipped

if TYPE_CHECKING:
    from rlinf_lite.config.schema import ModelConfig
    from rlinf_lite.envs import EnvSpec


class OpenVLAPolicy(Policy):
    """OpenVLA-OFT (`cfg.parallel_decoding`) or OpenVLA.

    The sequence is `<s>`, the patches of every camera, the robot's state, the left-padded prompt, the action tokens. A
    token is predicted from the hidden state one position before it, and the value from that of the first token.
    """

    policy_id, card = "openvla", OpenVLA

    def __init__(self, cfg: VLAConfig, prompts: PromptEncoder | None = None, attn_implementation: str = "sdpa") -> None:
        """Without `prompts` the policy cannot act; it can be loaded, inspected and saved."""
        super().__init__()
        self.cfg, self.prompts = cfg, prompts
        self.origin, self.save_base = Origin(), True
        self.num_action_chunks, self.action_dim = cfg.num_action_chunks, cfg.action_dim
        self.sft_label_sigma = 0.0
        self.head = CategoricalTokens(cfg.temperature)
        self.calls = Calls()
        self._read_statistics()

        text = dict(cfg.text)
        text_config = AutoConfig.for_model(text.pop("model_type"), **text)
        self.vision_backbone = VisionBackbone(cfg, attn_implementation)
        self.language_model = AutoModelForCausalLM.from_config(text_config, attn_implementation=attn_implementation)
        self.language_model.tie_weights()  # not done under `no_init_weights`
        if logits_scale(text_config) != 1 or logits_cap(text_config) is not None:
            raise ValueError(f"{text_config.model_type} scales or caps its logits, which is not supported here")
        width = text_config.hidden_size
        fused = cfg.dino is not None and cfg.siglip is not None
        self.projector = Projector(cfg.vision_dim, width, fused)
        self.proprio_projector = Projector(cfg.proprio_dim, width, fused=False) if cfg.proprio_dim else None
        self.slot_embeddings: nn.Parameter | None = None
        if cfg.learned_slots and cfg.parallel_decoding:
            std = text_config.initializer_range
            self.slot_embeddings = nn.Parameter(torch.randn(cfg.num_action_tokens, width) * std)
        self._init_value_head()
        if cfg.lora:
            self._add_adapters(cfg.lora)

    def _init_value_head(self) -> None:
        """Make the value head, an MLP whose outputs start near 0."""
        num_values = 1 if self.cfg.value_type == "chunk_level" else self.cfg.num_action_chunks
        widths = [self.language_model.config.hidden_size, *self.cfg.value_hidden_sizes]
        layers: list[nn.Module] = []
        for num_in, num_out in itertools.pairwise(widths):
            linear = nn.Linear(num_in, num_out)
            nn.init.kaiming_normal_(linear.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.GELU()]
        last = nn.Linear(widths[-1], num_values, bias=False)
        nn.init.normal_(last.weight, std=0.02)
        self.value_head = nn.Sequential(*layers, last)

    def train(self, mode: bool = True) -> Self:
        """Dropout, which published configs may have, stays off, so that training scores the policy that acted."""
        super().train(mode)
        self.vision_backbone.eval()
        self.language_model.eval()
        return self

    # acting

    def predict_action_batch(self, obs: Mapping[str, Any], mode: Mode = "train") -> ActionOutput:
        inputs = self._inputs(obs)
        num_rows = len(inputs["input_ids"])
        uniform = None
        if mode != "greedy":
            keys = row_noise_keys(obs, num_rows)
            uniform = self.head.noise(keys, self.cfg.num_action_tokens, inputs["input_ids"].device)
        decode = self._decode_at_once if self.cfg.parallel_decoding else self._decode_one_by_one
        first, logits, bins = self.calls(self, decode, inputs, uniform)
        bins = bins.view(num_rows, self.num_action_chunks, self.action_dim)
        logprobs = self.head.logprobs(logits.view(*bins.shape, -1), bins)
        training = mode == "train"
        values = self._values(first) if training else logprobs.new_zeros(num_rows, 1)
        return ActionOutput(
            self.codec.decode(bins), logprobs, values, {**inputs, "action_bins": bins} if training else {}
        )

    def release(self) -> None:
        self.calls.clear()

    def predict_values(self, obs: Mapping[str, Any]) -> Tensor:
        inputs = self._inputs(obs)
        if self.cfg.parallel_decoding:
            return self._values(self._parallel_states(inputs)[:, 0])
        x, mask = self._prompt(inputs)
        return self._values(self._language_states(x, mask)[:, -1])

    def sft_inputs(self, obs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Resized images uint8 [B, cameras, S, S, 3], the padded prompts and the normalised state, on the CPU."""
        return self._inputs(obs, torch.device("cpu"))

    def _inputs(self, obs: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Tensor]:
        device = device or self.projector.fc1.weight.device
        images, given = [], obs.get("images", {})
        for name in self.cfg.cameras:
            if name not in given:
                raise ObservationError(
                    f"model.options.cameras: there is no {name!r}; the environment has {', '.join(given)}"
                )
            image = np.asarray(given[name])
            if image.dtype != np.uint8:
                raise ObservationError(f"images of {name!r} are {image.dtype}; uint8 from 0 to 255 is needed")
            images.append(resize_images(torch.tensor(image).to(device), self.cfg))  # a copy: messages are read-only
        input_ids, attention_mask = self._prompts().encode(obs["instruction"])
        inputs = {"images": torch.stack(images, dim=1), "input_ids": input_ids, "attention_mask": attention_mask}
        if self.proprio_projector is not None:
            state = torch.from_numpy(np.asarray(obs["state"], dtype=np.float32))
            inputs["proprio"] = state if self.proprio is None else self.proprio.normalize(state)
        return {name: value.to(device) for name, value in inputs.items()}

    def _prompts(self) -> PromptEncoder:
        if self.prompts is None:
            raise TokenizerError(
                "the policy has no tokenizer: copy the files of its base model to its directory, or set "
                "actor.tokenizer.tokenizer_model"
            )
        return self.prompts

    def _decode_at_once(self, inputs: dict[str, Tensor], uniform: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The state that predicts the first action token, then logits and bins of all action tokens."""
        states = self._parallel_states(inputs)
        logits = self._logits(states)
        return states[:, 0], logits, self._choose(logits, uniform)

    @torch.compiler.set_stance("force_eager")  # every token makes the sequence longer: each would be compiled again
    def _decode_one_by_one(self, inputs: dict[str, Tensor], uniform: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """As `_decode_at_once`, but each token is computed from those before it."""
        x, mask = self._prompt(inputs)
        cache = DynamicCache(config=self.language_model.config)
        states, logits, bins = [], [], []
        for i in range(self.cfg.num_action_tokens):
            states.append(self._language_states(x, mask, cache)[:, -1:])
            logits.append(self._logits(states[-1]))
            bins.append(self._choose(logits[-1], None if uniform is None else uniform[:, i : i + 1]))
            x = self._embed(bins[-1] + self.cfg.first_action_id)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        return states[0][:, 0], torch.cat(logits, dim=1), torch.cat(bins, dim=1)

    def _choose(self, logits: Tensor, uniform: Tensor | None) -> Tensor:
        return logits.argmax(-1) if uniform is None else self.head.sample(logits, uniform)

    # training

    def forward(self, forward_inputs: dict[str, Tensor]) -> PolicyOutput:
        bins = forward_inputs["action_bins"]
        states = self._action_states(forward_inputs, bins)
        logits = self._logits(states).view(*bins.shape, -1)
        return PolicyOutput(self.head.logprobs(logits, bins), self.head.entropy(logits), self._values(states[:, 0]))

    def sft_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy against the bin of each action, or against a Gaussian over bins if `sft_label_sigma` > 0."""
        actions = batch["actions"]
        bins = self.codec.encode(actions)
        logits = self._logits(self._action_states(batch, bins)).view(*bins.shape, -1)
        if self.sft_label_sigma > 0:
            losses = self.head.cross_entropy(logits, self.codec.soft_labels(actions, self.sft_label_sigma))
        else:
            losses = -self.head.logprobs(logits, bins)
        mask = batch["mask"]
        return (losses.mean(-1) * mask).sum() / mask.sum().clamp(min=1)

    def take_statistics(self, statistics: Mapping[str, Mapping[str, list[float]]]) -> None:
        """Bins span the range of demonstrated actions within the environment's bounds; the state is normalised."""
        action = {name: list(statistics["action"][name]) for name in RANGES}
        bounds = dataset_statistics(self.cfg)["action"]
        for dim, (least, most) in enumerate(zip(bounds["min"], bounds["max"], strict=True)):
            for low, high in (("min", "max"), ("q01", "q99")):
                ends = max(action[low][dim], least), min(action[high][dim], most)
                action[low][dim], action[high][dim] = ends if ends[0] < ends[1] else (least, most)
        found: dict[str, Any] = {"action": action}
        if self.cfg.proprio_dim and "state" in statistics:
            found["proprio"] = {name: list(statistics["state"][name]) for name in RANGES}
        self.cfg = replace(self.cfg, norm_stats={"demonstrations": found}, unnorm_key=None)
        self._read_statistics()

    def usual_ranges(self) -> dict[str, tuple[list[float], list[float]]]:
        found = {"action": self.codec.normalizer} | ({} if self.proprio is None else {"state": self.proprio})
        return {name: normalizer.usual_range() for name, normalizer in found.items()}

    def _read_statistics(self) -> None:
        self.codec = ActionCodec(self.cfg)
        has_state = self.cfg.proprio_dim and "proprio" in dataset_statistics(self.cfg)
        self.proprio = Normalizer(self.cfg, "proprio", self.cfg.proprio_dim) if has_state else None

    def _action_states(self, inputs: dict[str, Tensor], bins: Tensor) -> Tensor:
        """The states [B, C * D, width] that predict the action tokens, given the tokens' bins."""
        if self.cfg.parallel_decoding:
            return self._parallel_states(inputs)
        x, mask = self._prompt(inputs)
        tokens = self._embed(bins.flatten(1)[:, :-1] + self.cfg.first_action_id)
        mask = torch.cat([mask, mask.new_ones(tokens.shape[:2])], dim=1)
        return self._language_states(torch.cat([x, tokens], dim=1), mask)[:, -self.cfg.num_action_tokens :]

    # the network

    def _parallel_states(self, inputs: dict[str, Tensor]) -> Tensor:
        """As `_action_states`, by one bidirectional pass over slots, which do not depend on the actions."""
        x, mask = self._prompt(inputs)
        batch, num_slots = len(x), self.cfg.num_action_tokens
        if self.slot_embeddings is None:
            slots = x.new_zeros(batch, num_slots, x.shape[2])
        else:
            slots = self.slot_embeddings.to(x.dtype).expand(batch, -1, -1)
        parts = [x, slots]
        if self.cfg.append_stop:
            parts.append(self._embed(inputs["input_ids"].new_full((batch, 1), self.cfg.stop_token_id)))
        x = torch.cat(parts, dim=1)
        mask = torch.cat([mask, mask.new_ones(batch, x.shape[1] - mask.shape[1])], dim=1)
        first = x.shape[1] - num_slots - self.cfg.append_stop - 1
        return self._language_states(x, mask, causal=False)[:, first : first + num_slots]

    def _prompt(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Embeddings [B, L, width] and mask [B, L] of all tokens before the action tokens."""
        embedded, mask = self._embed(inputs["input_ids"]), inputs["attention_mask"]
        pixels = normalize_images(inputs["images"], self.cfg).to(embedded.dtype)
        seen = [self.projector(self.vision_backbone(pixels))]
        if self.proprio_projector is not None:
            seen.append(self.proprio_projector(inputs["proprio"].to(embedded.dtype))[:, None])
        x = torch.cat([embedded[:, :1], *seen, embedded[:, 1:]], dim=1)
        ones = mask.new_ones(len(mask), x.shape[1] - mask.shape[1])
        return x, torch.cat([mask[:, :1], ones, mask[:, 1:]], dim=1)

    def _language_states(
        self, x: Tensor, mask: Tensor, cache: DynamicCache | None = None, causal: bool = True
    ) -> Tensor:
        """Final states of `x`, which holds the last of the positions that `mask` covers."""
        positions = (mask.cumsum(1) - 1)[:, -x.shape[1] :]
        config = self.language_model.config
        sees_all = set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
        if config._attn_implementation == "sdpa" and sees_all:
            # a full mask: transformers would read back from the GPU whether there is padding
            columns = torch.arange(mask.shape[1], device=mask.device)
            seen = columns <= columns[-x.shape[1] :, None] if causal else columns >= columns[:1]
            mask = (mask[:, None].bool() & seen)[:, None].expand(-1, -1, x.shape[1], -1)
        return self.language_model.model(
            inputs_embeds=x,
            attention_mask=mask,
            position_ids=positions,
            is_causal=causal,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    def _embed(self, ids: Tensor) -> Tensor:
        return self.language_model.get_input_embeddings()(ids)

    def _logits(self, states: Tensor) -> Tensor:
        """Logits of the action bins; by calling lm_head as a module, which adapters and sharding need."""
        first = self.cfg.first_action_id
        return self.language_model.lm_head(states)[..., first : first + self.cfg.n_action_bins].float()

    def _values(self, states: Tensor) -> Tensor:
        return self.value_head(states).float()

    # what the framework asks

    def value_parameters(self) -> list[nn.Parameter]:
        return list(self.value_head.parameters())

    def fsdp_units(self) -> list[nn.Module]:
        return [*self.vision_backbone.layers(), *self.language_model.model.layers]

    def check_env_spec(self, spec: EnvSpec) -> None:
        self._prompts()
        if not spec.cameras:
            raise ValueError("model.id: openvla looks at images, and this environment gives none")
        unknown = [name for name in self.cfg.cameras if name not in spec.cameras]
        if unknown:
            has = ", ".join(spec.cameras) or "none"
            raise ValueError(
                f"model.options.cameras: the policy looks through {', '.join(unknown)}; the environment has {has}"
            )
        if self.cfg.proprio_dim and spec.state_dim != self.cfg.proprio_dim:
            raise ValueError(
                f"model.options.use_proprio: the policy reads {self.cfg.proprio_dim} state numbers, the environment "
                f"gives {spec.state_dim}"
            )

    def reads(self) -> PolicyInputs:
        size = (self.cfg.image_size, self.cfg.image_size)
        return PolicyInputs(dict.fromkeys(self.cfg.cameras, size), self.cfg.proprio_dim, has_instruction=True)

    @classmethod
    def from_config(cls, cfg: ModelConfig, spec: EnvSpec) -> Self:
        low, high = spec.action_low, spec.action_high
        statistics = {"min": low, "max": high, "q01": low, "q99": high}
        fresh = fresh_config(cfg, Observed(spec.action_dim, spec.state_dim or 0, spec.cameras))
        config = with_run_settings(replace(fresh, norm_stats={"env": {"action": statistics}}), cfg)
        directory = shipped("assets") / "tiny_tokenizer"
        policy = cls(config, PromptEncoder.from_directory(directory, config), cfg.options.attn_implementation)
        policy.origin = Origin.of(directory, {})
        policy.check_env_spec(spec)
        return policy.prepare(cfg)

    def prepare(self, cfg: ModelConfig) -> Self:
        """Apply the run's options that are not part of `cfg`: adapters, checkpointing, compilation, SFT labels."""
        options = cfg.options
        self.sft_label_sigma, self.save_base = options.sft_label_sigma, options.lora.save_base
        lora = options.lora.model_dump(exclude={"save_base"})
        if lacks_adapters(self.cfg.lora, lora, "OpenVLAPolicy"):
            if self.origin.trained and not self.save_base:
                raise ValueError(
                    "model.options.lora.save_base: false would lose base weights that the policy to start from has "
                    f"trained, which are not in {self.origin.weights_dir}. Set it to true"
                )
            self._add_adapters(lora)
            self.cfg = replace(self.cfg, lora=lora)
        prepare_layers(self, options)
        return self

    def _add_adapters(self, lora: Mapping[str, Any]) -> None:
        """Add adapters. Then only they, the value head and the modules of `also_train` train."""
        if self.cfg.tied_embeddings and "lm_head" in lora["targets"]:
            text = "the output layer shares the embedding's weights (tie_word_embeddings). Leave lm_head out"
            raise ValueError(f"model.options.lora.targets: {text}")
        add_adapters(self, lora, ["value_head", *lora["also_train"]])

    def merge_adapters(self) -> None:
        """Merge the adapters into the weights and remove them."""
        merge_adapters(self)
        self.cfg = replace(self.cfg, lora={})

    # files

    def config_dict(self) -> dict[str, Any]:
        return self.cfg.to_dict()

    @classmethod
    def from_config_dict(cls, config: dict[str, Any]) -> Self:
        return cls(VLAConfig.from_dict(config))

    def save_pretrained(self, directory: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the published layout, and our additions in extra files; see `checkpoint`."""
        state = self.state_dict() if state_dict is None else state_dict
        trained = None if self.save_base else [name for name, x in self.named_parameters() if x.requires_grad]
        checkpoint.write(Path(directory), self.policy_id, self.cfg, state, self.origin, without_base=trained)
        follow_umask(Path(directory).glob("*.safetensors"))

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
        """Load what `save_pretrained` wrote, or a published directory, whose value head is random. `tokenizer`: a
        directory with a tokenizer, used if `directory` has none. `config`: the result of `read_policy_config`, if the
        caller has it already.

        Raises:
            CheckpointFormatError: if the policy has an unsupported part, or listing tensors that are missing,
                unexpected or of the wrong shape.
            StatisticsError: if `model.options.unnorm_key` names no statistics.
            TokenizerError: if the tokenizer does not start or end prompts as the policy needs.
        """
        directory = Path(directory)
        config = read_policy_config(directory) if config is None else config
        cfg = checkpoint.read_config(directory, config)
        cfg = cfg if model is None else with_run_settings(cfg, model)
        has_tokenizer = (directory / "tokenizer.json").is_file()
        source = directory if has_tokenizer else tokenizer
        with no_init_weights():
            policy = cls(
                cfg,
                None if source is None else PromptEncoder.from_directory(source, cfg),
                "sdpa" if model is None else model.options.attn_implementation,
            )
        policy._init_value_head()
        if read_weights:
            state, policy.origin = checkpoint.read_state(directory, config, cfg, policy.state_dict())
            policy.load_state_dict(state, strict=False)
        if source is not None and source != directory:
            policy.origin.files |= tokenizer_files(source)
        return policy if model is None else policy.prepare(model)

    def read_state(self, directory: str | Path) -> dict[str, Tensor]:
        directory = Path(directory)
        return checkpoint.read_state(directory, read_policy_config(directory), self.cfg, self.state_dict())[0]
