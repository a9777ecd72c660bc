"""The two transformers of a flow policy: a language model over the prefix, and an expert that attends to the keys and
values of its layers.

The layers are Gemma's and Llama's of transformers. Their forward passes are written here, because transformers' models
neither return keys and values by layer, nor accept those of another model, nor have norms scaled by a condition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GemmaConfig, GemmaModel, LlamaConfig, LlamaModel

from rlinf_lite.models.flow.config import FlowConfig, Transformer

Rotation = tuple[Tensor, Tensor]
Memory = tuple[Tensor, Tensor]
"""Rotated keys, and values, of a layer: [B, kv heads, P, head_dim] each."""
_ROPE_BASE = 10_000.0  # also for SmolVLA, although its language model's config says 100,000


class ExactLinear(nn.Linear):
    """A linear layer that computes in float32 at every `actor.precision`, as actions and likelihoods need."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def rotation(positions: Tensor, head_dim: int) -> Rotation:
    """Cosines and sines [B, L, head_dim / 2] at positions [B, L]."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * (1.0 / _ROPE_BASE ** (steps / head_dim))
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, by: Rotation) -> Tensor:
    """`x` [B, heads, L, head_dim] rotated; element i of its first half and of its second half span one plane."""
    cos, sin = (part[:, None].to(x.dtype) for part in by)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class AdaptiveNorm(nn.Module):
    """RMS norm whose scale and shift come from a condition, which also gives the gate of the layer after the norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps, self.width = eps, width
        self.dense = ExactLinear(width, 3 * width)

    def init_weights(self) -> None:
        """No scale, no shift, open gates. With the published zeros, only the gates would learn at first."""
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)
        nn.init.ones_(self.dense.bias[2 * self.width :])

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """`x` [B, L, width] normalised under `condition` [B, width], and the gate [B, 1, width]."""
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, dim=-1)
        return (normed * (1 + scale) + shift).to(x.dtype), gate.to(x.dtype)


def _norm(norm: nn.Module, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if isinstance(norm, AdaptiveNorm):
        normed, gate = norm(x, condition)
        return normed, gate
    return norm(x), None


class Block(nn.Module):
    """One layer of a transformers model, with the same parameter names."""

    def __init__(self, layer: Any, crosses: bool = False) -> None:
        """`crosses`: the layer attends only to the memory, through its own key and value projections."""
        super().__init__()
        self.self_attn, self.mlp, self.crosses = layer.self_attn, layer.mlp, crosses
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.head_dim: int = layer.self_attn.head_dim

    def forward(
        self, x: Tensor, by: Rotation, mask: Tensor, memory: Memory | None = None, condition: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`x` [B, L, width] after the layer, and the layer's own keys and values.

        `memory`: keys and values of P earlier positions. `mask`: bool [B, 1, 1 or L, P + L], the positions that each of
        the L may attend to; P columns if the layer crosses.
        """
        normed, gate = _norm(self.input_layernorm, x, condition)
        attended, keys, values = self._attend(normed, by, mask, memory)
        x = x + (attended if gate is None else attended * gate)
        normed, gate = _norm(self.post_attention_layernorm, x, condition)
        out = self.mlp(normed)
        return x + (out if gate is None else out * gate), keys, values

    def _attend(self, x: Tensor, by: Rotation, mask: Tensor, memory: Memory | None) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.self_attn
        queries = _rotated(self._heads(attention.q_proj(x)), by)
        if self.crosses:
            assert memory is not None
            read = [part.transpose(1, 2).flatten(2) for part in memory]  # [B, P, kv heads * head_dim]
            keys, values = self._heads(attention.k_proj(read[0])), self._heads(attention.v_proj(read[1]))
            seen = keys, values
        else:
            keys, values = _rotated(self._heads(attention.k_proj(x)), by), self._heads(attention.v_proj(x))
            # the memory is not changed: every step reads the same prefix
            seen = (keys, values) if memory is None else joined(memory, (keys, values))
        # with `enable_gqa` and a mask, a GPU would use the kernel that keeps all scores in memory
        keys_of_all, values_of_all = (_repeated(part, queries.shape[1]) for part in seen)
        out = F.scaled_dot_product_attention(queries, keys_of_all, values_of_all, attn_mask=mask)
        return attention.o_proj(out.transpose(1, 2).flatten(2)), keys, values

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _repeated(part: Tensor, heads: int) -> Tensor:
    """Keys or values [B, kv heads, P, head_dim] repeated to `heads` heads, as each serves several queries."""
    return part.unsqueeze(2).expand(-1, -1, heads // part.shape[1], -1, -1).flatten(1, 2)


def joined(before: Memory, own: Memory) -> Memory:
    """Keys and values of both, concatenated along P."""
    return torch.cat([before[0], own[0]], dim=2), torch.cat([before[1], own[1]], dim=2)


class Stack(nn.Module):
    """The blocks of a transformer, and its final norm. Blocks numbered in `crossing` attend only to the memory."""

    def __init__(self, model: Any, crossing: Iterable[int] = (), embeds: bool = True) -> None:
        super().__init__()
        crossing = set(crossing)
        self.layers = nn.ModuleList(Block(layer, number in crossing) for number, layer in enumerate(model.layers))
        self.norm: nn.Module = model.norm
        if embeds:
            self.embed_tokens = model.embed_tokens
        self.head_dim = cast(Block, self.layers[0]).head_dim

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        memory: Sequence[Memory] | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, list[Memory]]:
        """States [B, L, width] after the norm, and every layer's keys and values.

        `memory`: by layer, keys and values of P earlier positions. `mask`: bool [B, 1, 1 or L, P + L], the positions
        that each of the last L may attend to.
        """
        by, found = rotation(positions, self.head_dim), []
        restarted = rotation(positions - positions[:, :1], self.head_dim)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Block)
            before = None if memory is None else memory[number]
            if layer.crosses and before is not None:
                x, keys, values = layer(x, restarted, mask[..., : before[0].shape[2]], before, condition)
            else:
                x, keys, values = layer(x, by, mask, before, condition)
            found.append((keys, values))
        return _norm(self.norm, x, condition)[0], found


def gemma(size: Transformer, cfg: FlowConfig, vocab_size: int | None = None, adaptive: bool = False) -> Stack:
    """A Gemma with random weights; without `vocab_size` it has no embedding. `adaptive`: with `AdaptiveNorm`s."""
    model: Any = GemmaModel(GemmaConfig(**_sizes(size, cfg, vocab_size)))
    if adaptive:
        for layer in model.layers:
            layer.input_layernorm = AdaptiveNorm(size.width, cfg.rms_eps)
            layer.post_attention_layernorm = AdaptiveNorm(size.width, cfg.rms_eps)
        model.norm = AdaptiveNorm(size.width, cfg.rms_eps)
    return Stack(model, embeds=vocab_size is not None)


def llama(
    size: Transformer, cfg: FlowConfig, vocab_size: int | None = None, memory: Transformer | None = None
) -> Stack:
    """A Llama with random weights; without `vocab_size` it has no embedding. `memory`: the language model to whose keys
    and values alone some layers attend (`cfg.cross_every`)."""
    sizes = _sizes(size, cfg, vocab_size)
    config = LlamaConfig(**{**sizes, "hidden_size": size.num_heads * size.head_dim})
    config.hidden_size = size.width  # set afterwards: the class refuses a width that is no multiple of num_heads
    model: Any = LlamaModel(config)
    layers = range(size.depth) if memory is not None and cfg.cross_every != 1 else ()
    crossing = [number for number in layers if cfg.cross_every == 0 or number % cfg.cross_every]
    for number in crossing:
        assert memory is not None
        read, attention = memory.num_kv_heads * memory.head_dim, model.layers[number].self_attn
        for name in ("k_proj", "v_proj"):
            projection = nn.Linear(read, size.num_kv_heads * size.head_dim, bias=False)
            nn.init.normal_(projection.weight, std=cfg.initializer_range)
            setattr(attention, name, projection)
    return Stack(model, crossing, embeds=vocab_size is not None)


def _sizes(size: Transformer, cfg: FlowConfig, vocab_size: int | None) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "intermediate_size": size.mlp_size,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": vocab_size or 1,
        "rms_norm_eps": cfg.rms_eps,
        "initializer_range": cfg.initializer_range,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        "tie_word_embeddings": False,
    }
