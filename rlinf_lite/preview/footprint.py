"""How large a policy is and what one sample of it costs, by formulas over its config; needs no torch.

Parameter counts are exact. Activations are what autograd keeps between forward and backward, counted tensor by tensor
through transformers' Llama and vision layers with `sdpa`; tests compare both with the modules themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rlinf_lite.cards import Observed
from rlinf_lite.config.schema import Config, ModelConfig
from rlinf_lite.models.vla.config import vla_config

if TYPE_CHECKING:
    from rlinf_lite.models.vla.config import TowerConfig


@dataclass(frozen=True)
class Sizes:
    """Counts of parameters, and bytes. Rows are environments or samples of a micro-batch."""

    parameters: int
    trained: int
    largest_unit: int
    """Parameters of the largest module that is sharded by itself."""
    root: int
    """Parameters of what is left over; gathered during all of forward and backward."""
    sample_bytes: int
    """One decision in a trajectory."""
    activation_bytes: int
    """Kept for the backward pass, per row."""
    working_bytes: int
    """Gradients inside the widest layer, and with checkpointing that layer computed again, per row."""
    acting_bytes: int
    """While acting, per row: the widest layer's intermediate results, and the KV cache of autoregressive decoding."""


class _Linear(NamedTuple):
    """`times` linear layers of one name in one part of the policy."""

    part: str
    name: str
    num_in: int
    num_out: int
    bias: bool = True
    times: int = 1

    @property
    def each(self) -> int:
        return (self.num_in + self.bias) * self.num_out

    @property
    def parameters(self) -> int:
        return self.times * self.each


class _Stack(NamedTuple):
    """`times` equal layers; `layer` is bytes that one keeps per token."""

    times: int
    tokens: int
    width: int
    layer: int


def policy_sizes(config: Config, seen: Observed) -> Sizes | None:
    """Sizes of the policy that a run trains; None where its class alone knows them."""
    if config.model.id == "mlp_gaussian" and seen.state_dim:
        return _mlp(config.model, seen)
    if config.model.id == "openvla" and seen.cameras:
        return _OpenVLA(config, seen).sizes()
    return None


def scores_bytes(model: ModelConfig, action_dim: int) -> int:
    """What a trajectory keeps of a decision besides the policy's own inputs."""
    chunk, num_values = model.num_action_chunks, _num_values(model)
    floats = chunk * action_dim + chunk + num_values + 1  # log-probabilities, rewards, values, the next value
    return 4 * floats + 2 * chunk  # dones, mask


def _num_values(model: ModelConfig) -> int:
    return 1 if model.value_type == "chunk_level" else model.num_action_chunks


def _mlp(model: ModelConfig, seen: Observed) -> Sizes:
    actions = model.num_action_chunks * seen.action_dim
    hidden = [seen.state_dim, *model.options.hidden_sizes]
    parameters = _mlp_parameters([*hidden, actions]) + _mlp_parameters([*hidden, _num_values(model)]) + actions
    return Sizes(
        parameters=parameters,
        trained=parameters,
        largest_unit=0,
        root=parameters,
        sample_bytes=4 * (seen.state_dim + actions) + scores_bytes(model, seen.action_dim),
        activation_bytes=4 * (seen.state_dim + 2 * sum(model.options.hidden_sizes) + 8 * actions),
        working_bytes=8 * max(hidden),
        acting_bytes=8 * max(hidden),
    )


def _mlp_parameters(widths: Sequence[int]) -> int:
    return sum((num_in + 1) * num_out for num_in, num_out in itertools.pairwise(widths))


class _OpenVLA:
    """The sums over an OpenVLA policy."""

    def __init__(self, config: Config, seen: Observed) -> None:
        self.model, self.seen, self.bf16 = config.model, seen, config.actor.precision == "bf16"
        self.cfg = cfg = vla_config(config, seen)
        text = cfg.text
        self.width = int(text.get("hidden_size", 4096))
        self.inner = int(text.get("intermediate_size", 11008))
        self.layers = int(text.get("num_hidden_layers", 32))
        heads = int(text.get("num_attention_heads", 32))
        head_dim = int(text.get("head_dim") or self.width // heads)
        self.query = heads * head_dim
        self.key = int(text.get("num_key_value_heads", heads)) * head_dim
        self.vocab = int(text["vocab_size"])
        self.towers = [("dino", cfg.dino), ("siglip", cfg.siglip)]
        self.patches = cfg.num_patches * len(cfg.cameras)
        decoded = cfg.num_action_tokens + cfg.append_stop if cfg.parallel_decoding else cfg.num_action_tokens - 1
        self.tokens = cfg.max_prompt_length + self.patches + bool(cfg.proprio_dim) + decoded

    def sizes(self) -> Sizes:
        linears = list(self._linears())
        other = self._other_parameters()
        total = sum(one.parameters for one in linears) + sum(other.values())
        adapters = self._adapters(linears)
        units = [(self.layers, 2 * self.width + sum(one.each for one in linears if one.part == "language layers"))]
        for name, tower in self.towers:
            if tower is not None:
                weights = sum(one.each for one in self._tower_linears(tower, ""))
                units.append((tower.num_layers - 1, weights + _vision_extras(name) * tower.hidden_size))
        return Sizes(
            parameters=total + adapters,
            trained=self._trained(linears, other, adapters),
            largest_unit=max(unit for _, unit in units),
            root=total - sum(times * unit for times, unit in units),
            sample_bytes=self._sample_bytes(),
            activation_bytes=self._activation_bytes(),
            working_bytes=(1 + self.model.options.gradient_checkpointing)
            * max(stack.tokens * stack.layer for stack in self._stacks()),
            acting_bytes=self._acting_bytes(),
        )

    # parameters

    def _linears(self) -> Iterator[_Linear]:
        cfg, width = self.cfg, self.width
        for name, tower in self.towers:
            if tower is not None:
                yield from self._tower_linears(tower, "o_proj" if name == "dino" else "out_proj")
        qwen = cfg.text["model_type"] == "qwen2"
        for name, num_in, num_out, bias in (
            ("q_proj", width, self.query, qwen),
            ("k_proj", width, self.key, qwen),
            ("v_proj", width, self.key, qwen),
            ("o_proj", self.query, width, False),
            ("gate_proj", width, self.inner, False),
            ("up_proj", width, self.inner, False),
            ("down_proj", self.inner, width, False),
        ):
            yield _Linear("language layers", name, num_in, num_out, bias, self.layers)
        yield _Linear("language_model", "lm_head", width, self.vocab, bias=False)
        fused = cfg.dino is not None and cfg.siglip is not None
        yield from _projector("projector", cfg.vision_dim, width, fused)
        if cfg.proprio_dim:
            yield from _projector("proprio_projector", cfg.proprio_dim, width, fused=False)
        for num_in, num_out in itertools.pairwise([width, *cfg.value_hidden_sizes]):
            yield _Linear("value_head", "", num_in, num_out)
        yield _Linear("value_head", "", cfg.value_hidden_sizes[-1], _num_values(self.model), bias=False)

    def _tower_linears(self, tower: TowerConfig, output: str) -> Iterator[_Linear]:
        width, count = tower.hidden_size, tower.num_layers - 1
        for name in ("q_proj", "k_proj", "v_proj", output):
            yield _Linear("vision_backbone", name, width, width, times=count)
        yield _Linear("vision_backbone", "fc1", width, tower.mlp_size, times=count)
        yield _Linear("vision_backbone", "fc2", tower.mlp_size, width, times=count)

    def _other_parameters(self) -> dict[str, int]:
        """Embeddings, norms, positions: what no adapter can be put on."""
        cfg = self.cfg
        vision = 0
        for name, tower in self.towers:
            if tower is None:
                continue
            width = tower.hidden_size
            tokens = cfg.num_patches + (3 + cfg.num_registers if name == "dino" else 0)  # class twice, mask, registers
            vision += (3 * cfg.patch_size**2 + 1 + tokens) * width
            vision += (tower.num_layers - 1) * width * _vision_extras(name)
        slots = cfg.num_action_tokens * self.width if cfg.learned_slots and cfg.parallel_decoding else 0
        language = (self.vocab + 2 * self.layers + 1) * self.width
        return {"vision_backbone": vision, "language_model": language, "slot_embeddings": slots}

    def _adapters(self, linears: list[_Linear]) -> int:
        lora = self.model.options.lora
        kept = ("value_head", *lora.also_train)
        adapted = [one for one in linears if one.name in lora.targets and one.part not in kept]
        return sum(one.times * lora.rank * (one.num_in + one.num_out) for one in adapted)

    def _trained(self, linears: list[_Linear], other: dict[str, int], adapters: int) -> int:
        if not self.model.options.lora.rank:
            mask_token = self.cfg.dino.hidden_size if self.cfg.dino is not None else 0
            return sum(one.parameters for one in linears) + sum(other.values()) - mask_token
        in_full = ("value_head", *self.model.options.lora.also_train)
        whole = sum(one.parameters for one in linears if one.part.replace(" layers", "_model") in in_full)
        return adapters + whole + sum(count for part, count in other.items() if part in in_full)

    # bytes

    def _sample_bytes(self) -> int:
        cfg = self.cfg
        pixels = 3 * cfg.image_size**2 * len(cfg.cameras)
        prompt = 9 * cfg.max_prompt_length  # int64 ids, bool mask
        return (
            pixels + prompt + 4 * cfg.proprio_dim + 8 * cfg.num_action_tokens + scores_bytes(self.model, cfg.action_dim)
        )

    def _stacks(self) -> Iterator[_Stack]:
        yield _Stack(self.layers, self.tokens, self.width, self._decoder_layer())
        for name, tower in self.towers:
            if tower is not None:
                tokens = self.patches + (1 + self.cfg.num_registers) * len(self.cfg.cameras) * (name == "dino")
                yield _Stack(tower.num_layers - 1, tokens, tower.hidden_size, self._vision_layer(tower, name))

    def _activation_bytes(self) -> int:
        checkpointing = self.model.options.gradient_checkpointing  # only the layers' inputs are kept
        kept = (one.times * one.tokens * (4 * one.width if checkpointing else one.layer) for one in self._stacks())
        return sum(kept) + self._around_the_layers()

    def _decoder_layer(self) -> int:
        """Bytes per token: both norms, rotated queries and keys, values, attention, the gated MLP."""
        width, attention = self.width, 3 * self.query + 2 * self.key
        if self.bf16:  # norms in fp32; every linear layer casts its own copy of its input
            return 26 * width + 2 * attention + 8 * self.inner
        return 4 * (6 * width + attention + 4 * self.inner)

    def _vision_layer(self, tower: TowerConfig, name: str) -> int:
        width, scaled = tower.hidden_size, 2 * (name == "dino")
        if self.bf16:
            return (26 + 2 * scaled) * width + 4 * tower.mlp_size
        return 4 * ((9 + scaled) * width + 2 * tower.mlp_size)

    def _around_the_layers(self) -> int:
        """Pixels, projector, last norm, logits and the distributions over action tokens."""
        cfg, element = self.cfg, 2 if self.bf16 else 4
        pixels = self.patches * cfg.patch_size**2 * 3 * sum(tower is not None for _, tower in self.towers)
        hidden = 4 * cfg.vision_dim + self.width if cfg.dino and cfg.siglip else self.width
        projector = self.patches * (cfg.vision_dim + 2 * hidden)
        logits = cfg.num_action_tokens * (2 * self.vocab * element + 16 * cfg.n_action_bins)
        return pixels * (4 + 2 * self.bf16) + projector * element + 12 * self.tokens * self.width + logits

    def _acting_bytes(self) -> int:
        element = 2 if self.bf16 else 4
        cache = 0 if self.cfg.parallel_decoding else self.layers * self.tokens * 2 * self.key * element
        return self.tokens * (4 * self.width + 3 * self.inner) * element + cache


def _vision_extras(tower: str) -> int:
    """Vectors of a layer: two norms of two, and DINO's two layer scales."""
    return 6 if tower == "dino" else 4


def _projector(part: str, num_in: int, num_out: int, fused: bool) -> Iterator[_Linear]:
    hidden = 4 * num_in if fused else num_out
    yield _Linear(part, "fc1", num_in, hidden)
    yield _Linear(part, "fc2", hidden, num_out)
    if fused:
        yield _Linear(part, "fc3", num_out, num_out)
