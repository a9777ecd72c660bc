"""From images to language-model tokens: DINOv2 and SigLIP side by side, and the projector.

Published policies use the second-to-last block of each tower, without the final norm, so the last block and the norms
are not built. SigLIP uses the exact GELU, as in the training of its weights; transformers' default is an approximation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModel,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from rlinf_lite.models.pictures import sincos_positions
from rlinf_lite.models.vla.config import TowerConfig, VLAConfig


class VisionBackbone(nn.Module):
    """The vision towers of a policy: DINOv2, SigLIP or both."""

    def __init__(self, cfg: VLAConfig, attn_implementation: str) -> None:
        super().__init__()
        self.num_towers = (cfg.dino is not None) + (cfg.siglip is not None)
        self.num_prefix_tokens = 1 + cfg.num_registers
        side = cfg.image_size // cfg.patch_size
        self.dino: Dinov2WithRegistersModel | None = None
        self.siglip: SiglipVisionModel | None = None
        if cfg.dino is not None:
            mlp_ratio = cfg.dino.mlp_size // cfg.dino.hidden_size
            dino = Dinov2WithRegistersConfig(
                **_settings(cfg, cfg.dino), mlp_ratio=mlp_ratio, num_register_tokens=cfg.num_registers
            )
            self.dino = AutoModel.from_config(dino, attn_implementation=attn_implementation)
            self.dino.layernorm = nn.Identity()
            self.dino.embeddings.mask_token.requires_grad_(False)
            if cfg.sincos_positions:
                positions = sincos_positions(side, cfg.dino.hidden_size)
                self.dino.embeddings.position_embeddings.data[0, 1:] = positions
        if cfg.siglip is not None:
            siglip = SiglipVisionConfig(
                **_settings(cfg, cfg.siglip), intermediate_size=cfg.siglip.mlp_size, vision_use_head=False
            )
            self.siglip = AutoModel.from_config(siglip, attn_implementation=attn_implementation)
            self.siglip.post_layernorm = nn.Identity()
            if cfg.sincos_positions:
                positions = sincos_positions(side, cfg.siglip.hidden_size)
                self.siglip.embeddings.position_embedding.weight.data[:] = positions

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Patches [B, cameras * P, width] of images [B, cameras * towers * 3, S, S] from `normalize_images`."""
        batch, channels, size, _ = pixel_values.shape
        images = pixel_values.reshape(batch * channels // (3 * self.num_towers), -1, size, size)
        patches = []
        if self.dino is not None:
            patches.append(self.dino(images[:, :3]).last_hidden_state[:, self.num_prefix_tokens :])
        if self.siglip is not None:
            patches.append(self.siglip(images[:, -3:]).last_hidden_state)
        fused = torch.cat(patches, dim=-1)
        return fused.reshape(batch, -1, fused.shape[-1])

    def layers(self) -> list[nn.Module]:
        """The blocks of both towers."""
        found: list[nn.Module] = []
        if self.dino is not None:
            found += self.dino.encoder.layer
        if self.siglip is not None:
            found += self.siglip.encoder.layers
        return found


class Projector(nn.Module):
    """An MLP from patches (or the robot's state) to the language model's width; three layers after fused towers."""

    def __init__(self, num_in: int, num_out: int, fused: bool) -> None:
        super().__init__()
        hidden = 4 * num_in if fused else num_out
        self.fc1, self.fc2 = nn.Linear(num_in, hidden), nn.Linear(hidden, num_out)
        self.fc3 = nn.Linear(num_out, num_out) if fused else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(F.gelu(self.fc1(x)))
        return x if self.fc3 is None else self.fc3(F.gelu(x))


def _settings(cfg: VLAConfig, tower: TowerConfig) -> dict[str, Any]:
    return {
        "hidden_size": tower.hidden_size,
        "num_hidden_layers": tower.num_layers - 1,
        "num_attention_heads": tower.num_heads,
        "image_size": cfg.image_size,
        "patch_size": cfg.patch_size,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu",
    }
