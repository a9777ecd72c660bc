"""Bytes per rank of a reasoning run, from the model's config alone; for decoders of Llama's and Qwen2's kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_lite.config.plan import slots
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.reasoning_checks import ReasoningPlan
from rlinf_lite.config.resources import policy_directory
from rlinf_lite.config.roles import fused_roles, roles_of
from rlinf_lite.models.text.presets import preset

LOGITS_BYTES = 3 * 4 * 2**26  # of a chunk of the vocabulary's logits, with their softmax and gradient (causal_lm.py)


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder-only language model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    has_biases: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Decoder:
        """Of a `config.json`. Raises KeyError where it is not of this kind."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            hidden=hidden,
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab=config["vocab_size"],
            is_tied=config.get("tie_word_embeddings", False),
            has_biases=config.get("model_type") == "qwen2",
        )

    @property
    def parameters(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys + (queries + 2 * keys) * self.has_biases
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocab * self.hidden * (1 if self.is_tied else 2) + self.layers * layer + self.hidden

    @property
    def kept_per_token(self) -> int:
        """Numbers that a layer keeps of a token for the backward pass: its inputs and outputs, one by one."""
        return 5 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head_dim + 4 * self.intermediate


def decoder_of(config: ReasoningConfig) -> Decoder | None:
    """The model that a run starts from; None where its directory does not say."""
    named = config.actor.checkpoint_load_path or config.rollout.model_dir
    if named is None:
        return Decoder.from_config(preset(config.model.size))
    try:
        return Decoder.from_config(json.loads((policy_directory(named) / "config.json").read_text()))
    except (OSError, ValueError, KeyError):
        return None


def estimate_reasoning(plan: ReasoningPlan, decoder: Decoder) -> dict[str, dict[str, int]]:
    """Bytes of every role's largest rank, by what they are for."""
    config = plan.config
    roles, together = roles_of(config), fused_roles(config)
    on_gpu = slots(config.cluster)[0] == "cuda"
    low = 2 if config.actor.precision == "bf16" else 4
    number, found = decoder.parameters, dict[str, dict[str, int]]()
    for role in roles:
        ranks = plan.size(role) or 1
        shards = ranks if config.actor.strategy == "fsdp" else 1
        if role in ("actor", "critic"):
            found[role] = _training(config, decoder, -(-number // shards), low)
        elif role == "reference":
            found[role] = {"weights": 4 * -(-number // shards), "logits": LOGITS_BYTES // 3}
        elif role == "rollout":
            shared = {"actor", "rollout"} <= set(together) and shards == 1
            weights = 0 if shared else number * (low if on_gpu else 4)
            found[role] = {"weights": weights, "keys and values": _cache_bytes(config, decoder, low)}
    return found


def _training(config: ReasoningConfig, decoder: Decoder, own: int, low: int) -> dict[str, int]:
    tokens, layer = config.actor.max_tokens_per_micro_batch, decoder.kept_per_token
    kept = decoder.layers * layer
    if config.model.gradient_checkpointing:
        kept = decoder.layers * decoder.hidden + layer
    return {
        "weights": 4 * own,
        "gradients": 4 * own,
        "optimizer": 8 * own,
        "activations": tokens * kept * low + min(LOGITS_BYTES, 3 * 4 * tokens * decoder.vocab),
    }


def _cache_bytes(config: ReasoningConfig, decoder: Decoder, low: int) -> int:
    length = config.data.max_prompt_length + config.rollout.max_response_length
    rows = min(config.rollout.max_batch_size, config.data.num_prompts * config.algorithm.group_size)
    return 2 * rows * length * decoder.layers * decoder.kv_heads * decoder.head_dim * low
