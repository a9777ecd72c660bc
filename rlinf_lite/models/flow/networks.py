"""The networks of flow policies: a prefix of pictures, words and (SmolVLA) the state, followed by noisy actions, whose
velocity is computed.

Time runs from 1 (noise e) to 0 (actions a): x_t = t e + (1 - t) a, and the velocity is e - a. A prefix is computed once
per observation and never changed. Only valid tokens count as positions, so that padding and missing cameras change
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, SiglipVisionConfig
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector

from rlinf_lite.models.flow.config import FlowConfig
from rlinf_lite.models.flow.layers import AdaptiveNorm, ExactLinear, Memory, Stack, gemma, joined, llama
from rlinf_lite.models.pictures import sincos_positions


@dataclass
class Prefix:
    """The features of an observation from which velocities and values are computed; P positions, some are padding."""

    mask: Tensor  # bool [B, P]
    memory: list[Memory]  # by layer
    mean: Tensor  # float32 [B, width], of the valid states
    states: Tensor | None = None  # [B, P, width], after the final norm
    embedded: Tensor | None = None  # [B, P, width], the language model's inputs

    @classmethod
    def of(cls, embedded: Tensor, mask: Tensor, states: Tensor, memory: list[Memory]) -> Self:
        weights = mask[..., None].float()
        mean = (states.float() * weights).sum(1) / weights.sum(1).clamp(min=1)
        return cls(mask, memory, mean, states, embedded)

    def followed_by(self, other: Prefix) -> Prefix:
        count, more = (part.mask.sum(1, keepdim=True) for part in (self, other))
        return Prefix(
            torch.cat([self.mask, other.mask], dim=1),
            [joined(one, two) for one, two in zip(self.memory, other.memory, strict=True)],
            (self.mean * count + other.mean * more) / (count + more),
            None if self.states is None or other.states is None else torch.cat([self.states, other.states], dim=1),
            None if self.embedded is None or other.embedded is None else torch.cat([self.embedded, other.embedded], 1),
        )

    def kept(self) -> dict[str, Tensor]:
        """The prefix as tensors, batch first, for `from_kept`."""
        keys, values = (torch.stack(parts, dim=1) for parts in zip(*self.memory, strict=True))
        return {"prefix_mask": self.mask, "prefix_mean": self.mean, "prefix_keys": keys, "prefix_values": values}

    @classmethod
    def from_kept(cls, kept: Mapping[str, Tensor]) -> Self:
        memory = list(zip(kept["prefix_keys"].unbind(1), kept["prefix_values"].unbind(1), strict=True))
        return cls(kept["prefix_mask"], memory, kept["prefix_mean"])


class FlowNetwork(nn.Module):
    """Base of the families' networks. A subclass makes the modules below, and combines them."""

    vision: nn.Module
    connector: nn.Module
    language: Stack
    expert: Stack

    def __init__(self, cfg: FlowConfig) -> None:
        super().__init__()
        self.cfg = cfg
        width = cfg.expert.width
        self.action_in_proj, self.action_out_proj = (
            ExactLinear(cfg.max_action_dim, width),
            ExactLinear(width, cfg.max_action_dim),
        )

    def prefix(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor, state: Tensor) -> Prefix:
        """The prefix of images float [B, N, 3, H, W] in [-1, 1], tokens [B, L] and padded states [B, max_state_dim];
        masks are bool [B, N] and [B, L]."""
        return self.with_state(self.read(images, image_mask, tokens, token_mask), state)

    def read(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor) -> Prefix:
        """The part of `prefix` that depends only on the vision-language model's weights."""
        raise NotImplementedError

    def with_state(self, prefix: Prefix, state: Tensor) -> Prefix:
        """The prefix with the state's token appended, in families whose prefix has one."""
        return prefix

    def velocity(self, prefix: Prefix, state: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The velocity at noisy actions `x` [B, H, max_action_dim] and times `t` [B], and the expert's last states
        [B, H, width]; both float32."""
        raise NotImplementedError

    def _seen(self, images: Tensor, image_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of all cameras' pictures in order, and their mask."""
        found: Tensor = self.connector(self.vision(images.flatten(0, 1)).last_hidden_state)
        found = found.unflatten(0, images.shape[:2])  # [B, N, P, width]
        return found.flatten(1, 2), image_mask.repeat_interleave(found.shape[2], dim=1)

    def _act(
        self, prefix: Prefix, suffix: Tensor, blocks: Tensor, condition: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Velocity and states from the expert over `suffix` [B, L, width], whose last H tokens are actions. `blocks`
        bool [L, L]: which tokens of the suffix (columns) each of them (rows) attends to."""
        batch, length = suffix.shape[:2]
        seen = prefix.mask[:, None].expand(-1, length, -1)
        mask = torch.cat([seen, blocks.expand(batch, -1, -1)], dim=2)[:, None]
        positions = prefix.mask.sum(1, keepdim=True) + torch.arange(length, device=suffix.device)
        states, _ = self.expert(suffix, positions, mask, prefix.memory, condition)
        states = states[:, -self.cfg.horizon :].float()
        return self.action_out_proj(states), states

    def _mixed(self, x: Tensor, t: Tensor) -> Tensor:
        """Action tokens mixed with the time, for families whose norms do not read it (pi0, SmolVLA)."""
        actions = self.action_in_proj(x)
        time = self._time(t)[:, None].expand_as(actions)
        mixed = F.silu(self.action_time_mlp_in(torch.cat([actions, time], dim=-1)))
        out: Tensor = self.action_time_mlp_out(mixed)
        return out

    def _time(self, t: Tensor) -> Tensor:
        """`time_embedding` as float32 [B, width of the expert]."""
        return time_embedding(t, self.cfg.expert.width, self.cfg.min_period, self.cfg.max_period).float()

    def _add_mixing(self) -> None:
        width = self.cfg.expert.width
        self.action_time_mlp_in, self.action_time_mlp_out = ExactLinear(2 * width, width), ExactLinear(width, width)


def time_embedding(t: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """Sines, then cosines of times `t` [B] at geometric periods, float64 [B, width]."""
    fractions = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=t.device)
    periods = min_period * (max_period / min_period) ** fractions
    angles = 2 * math.pi * t.double()[:, None] / periods
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class PiNetwork(FlowNetwork):
    """pi0 and pi0.5: SigLIP and Gemma compute the prefix, whose tokens all see each other; the expert is a Gemma."""

    def __init__(self, cfg: FlowConfig) -> None:
        super().__init__(cfg)
        width, self.adaptive = cfg.expert.width, cfg.family == "pi05"
        siglip = SiglipVisionConfig(**_tower(cfg), vision_use_head=False)
        self.vision = AutoModel.from_config(siglip, attn_implementation="sdpa")
        self.connector = nn.Linear(cfg.vision.width, cfg.text.width)
        self.language = gemma(cfg.text, cfg, cfg.vocab_size)
        self.expert = gemma(cfg.expert, cfg, adaptive=self.adaptive)
        if self.adaptive:
            self.time_mlp_in, self.time_mlp_out = ExactLinear(width, width), ExactLinear(width, width)
        else:
            self.state_proj = ExactLinear(cfg.max_state_dim, width)
            self._add_mixing()

    def read(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor) -> Prefix:
        seen, seen_mask = self._seen(images, image_mask)
        words = self.language.embed_tokens(tokens)  # Gemma's embedding multiplies by sqrt(width) itself
        x, mask = torch.cat([seen, words.to(seen.dtype)], dim=1), torch.cat([seen_mask, token_mask], dim=1)
        states, memory = self.language(x, mask.cumsum(1) - 1, mask[:, None, None])
        return Prefix.of(x, mask, states, memory)

    def velocity(self, prefix: Prefix, state: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        if self.adaptive:
            condition = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(self._time(t)))))
            return self._act(prefix, self.action_in_proj(x), _all(x.shape[1], x), condition)
        suffix = torch.cat([self.state_proj(state)[:, None], self._mixed(x, t)], dim=1)
        blocks = _all(suffix.shape[1], x)
        blocks[0, 1:] = False  # the state sees no action
        return self._act(prefix, suffix, blocks)


class SmolVLANetwork(FlowNetwork):
    """SmolVLA: the state is the last token of the prefix; actions see only earlier ones, and see none in some layers
    (`cross_every`)."""

    def __init__(self, cfg: FlowConfig) -> None:
        super().__init__(cfg)
        vision = SmolVLMVisionConfig(**_tower(cfg))
        self.vision = AutoModel.from_config(vision, attn_implementation="sdpa")
        text = SimpleNamespace(hidden_size=cfg.text.width)
        both: Any = SimpleNamespace(scale_factor=cfg.pixel_shuffle, vision_config=vision, text_config=text)
        self.connector = SmolVLMConnector(both)
        self.language = llama(cfg.text, cfg, cfg.vocab_size)
        self.expert = llama(cfg.expert, cfg, memory=cfg.text)
        self.state_proj = ExactLinear(cfg.max_state_dim, cfg.text.width)
        self._add_mixing()

    def read(self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor) -> Prefix:
        seen, seen_mask = self._seen(images, image_mask)
        words, scale = self.language.embed_tokens(tokens), math.sqrt(self.cfg.text.width)
        x = torch.cat([seen * scale, (words * scale).to(seen.dtype)], dim=1)
        mask = torch.cat([seen_mask, token_mask], dim=1)
        states, memory = self.language(x, mask.cumsum(1) - 1, mask[:, None, None])
        return Prefix.of(x, mask, states, memory)

    def with_state(self, prefix: Prefix, state: Tensor) -> Prefix:
        """The prefix with one more token, which sees all others; these do not see it, so they do not change."""
        own = self.state_proj(state)[:, None].to(prefix.memory[0][1].dtype)
        mask = F.pad(prefix.mask, (0, 1), value=True)
        states, memory = self.language(own, prefix.mask.sum(1, keepdim=True), mask[:, None, None], prefix.memory)
        return prefix.followed_by(Prefix.of(own, mask[:, -1:], states, memory))

    def velocity(self, prefix: Prefix, state: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        causal = _all(x.shape[1], x).tril()
        return self._act(prefix, self._mixed(x, t), causal)


def build_network(cfg: FlowConfig) -> FlowNetwork:
    return SmolVLANetwork(cfg) if cfg.family == "smolvla" else PiNetwork(cfg)


def init_weights(network: FlowNetwork) -> None:
    """Initialise what transformers does not: our own modules, and image positions as 2D sines and cosines."""
    for module in network.modules():
        if isinstance(module, AdaptiveNorm):
            module.init_weights()
    positions = cast(Any, network.vision).embeddings.position_embedding.weight
    side, width = network.cfg.vision.image_size // network.cfg.vision.patch_size, network.cfg.vision.width
    positions.data[:, : 4 * (width // 4)] = sincos_positions(side, width)


def _all(length: int, like: Tensor) -> Tensor:
    """A mask bool [L, L] with which all tokens see each other."""
    return torch.ones(length, length, dtype=torch.bool, device=like.device)


def _tower(cfg: FlowConfig) -> dict[str, Any]:
    return {
        "hidden_size": cfg.vision.width,
        "num_hidden_layers": cfg.vision.depth,
        "intermediate_size": cfg.vision.mlp_size,
        "num_attention_heads": cfg.vision.num_heads,
        "image_size": cfg.vision.image_size,
        "patch_size": cfg.vision.patch_size,
        "layer_norm_eps": cfg.vision_eps,
    }
