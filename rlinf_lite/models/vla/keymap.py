"""Conversion between the tensors of published checkpoints (timm's names in the vision towers) and of our policies."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_lite.models.vla.config import VLAConfig

LM_HEAD, EMBEDDING = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
DINO_CLASS, DINO_POSITIONS, _DINO_MASK = (
    f"vision_backbone.dino.embeddings.{name}" for name in ("cls_token", "position_embeddings", "mask_token")
)


@dataclass(frozen=True)
class _Entry:
    """One published tensor and the policy's tensors `ours`. `join` makes it from them; `split` makes them from it."""

    published: str
    ours: tuple[str, ...]
    join: Callable[..., Tensor] = lambda tensor: tensor
    split: Callable[[Tensor], tuple[Tensor, ...]] = lambda tensor: (tensor,)


class KeyMap:
    """Converts between a published state dict and a policy's.

    Modules that an adapter wraps keep their published name. `additions` are the policy's tensors that published
    checkpoints do not have: value head, slot embeddings, adapters, and the proprio projector unless `with_proprio`.
    """

    def __init__(self, cfg: VLAConfig, own_names: Collection[str], with_proprio: bool = False) -> None:
        wrapped = {name.replace(".base_layer", ""): name for name in own_names if ".lora_" not in name}
        shared = ("language_model.", "projector.", *(["proprio_projector."] if with_proprio else []))
        entries = [*_tower_entries(cfg), *(_Entry(name, (name,)) for name in wrapped if name.startswith(shared))]
        self._tied, self._has_mask_token = cfg.tied_embeddings, cfg.dino is not None
        self._wrapped = wrapped
        self._entries = [entry for entry in entries if not (self._tied and entry.published == LM_HEAD)]
        covered = {wrapped.get(name, name) for name in (*itertools.chain(*(e.ours for e in entries)), _DINO_MASK)}
        self.additions = [name for name in own_names if name not in covered]
        unread = [  # the last block, the norm after it and the pooling of each tower; buffers of old language models
            rf"vision_backbone\.{name}\.(blocks\.{tower.num_layers - 1}|norm|attn_pool)\."
            for tower, name in ((cfg.dino, "featurizer"), (cfg.siglip, _siglip_name(cfg)))
            if tower is not None
        ]
        unread.append(r"language_model\.model\..*rotary_emb\.inv_freq$")
        unread += [re.escape(LM_HEAD)] if self._tied else []
        unread += [] if cfg.proprio_dim else [r"proprio_projector\."]
        self._unread = re.compile("|".join(unread))

    def to_published(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The published tensors, from the policy's `state`."""
        return {
            entry.published: entry.join(*(state[self._wrapped.get(name, name)] for name in entry.ours))
            for entry in self._entries
        }

    def to_policy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The policy's tensors, without `additions`, from the published `tensors`, which must be complete."""
        state: dict[str, Tensor] = {}
        for entry in self._entries:
            state.update(zip(entry.ours, entry.split(tensors[entry.published]), strict=False))
        if self._has_mask_token:  # transformers' class has this parameter, but does not read it here
            state[_DINO_MASK] = torch.zeros_like(state[DINO_POSITIONS][:, 0])
        if self._tied:
            state[LM_HEAD] = state[EMBEDDING]
        return {self._wrapped.get(name, name): tensor for name, tensor in state.items()}

    def is_unread(self, published: str) -> bool:
        """Whether this is a published tensor that no forward pass reads."""
        return self._unread.match(published) is not None


_KINDS = ("weight", "bias")
_DINO_BLOCK = {
    **{f"{name}.{kind}": f"{name}.{kind}" for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2") for kind in _KINDS},
    **{f"attn.proj.{kind}": f"attention.o_proj.{kind}" for kind in _KINDS},
    **{f"ls{i}.scale_factor": f"layer_scale{i}.lambda1" for i in (1, 2)},
}
_SIGLIP_BLOCK = {
    **{f"norm{i}.{kind}": f"layer_norm{i}.{kind}" for i in (1, 2) for kind in _KINDS},
    **{f"mlp.fc{i}.{kind}": f"mlp.fc{i}.{kind}" for i in (1, 2) for kind in _KINDS},
    **{f"attn.proj.{kind}": f"self_attn.out_proj.{kind}" for kind in _KINDS},
}


def _tower_entries(cfg: VLAConfig) -> Iterator[_Entry]:
    if cfg.dino is not None:
        published, ours = "vision_backbone.featurizer.", "vision_backbone.dino."
        yield from _block_entries(published, f"{ours}encoder.layer.", _DINO_BLOCK, "attention", cfg.dino.num_layers - 1)
        # timm's class token has no position: a position that training gave it is added to the token
        yield _Entry(f"{published}cls_token", (DINO_CLASS, DINO_POSITIONS), lambda token, own: token + own[:, :1])
        yield _Entry(
            f"{published}pos_embed",
            (DINO_POSITIONS,),
            lambda own: own[:, 1:].clone(),
            lambda tensor: (torch.cat([torch.zeros_like(tensor[:, :1]), tensor], dim=1),),
        )
        yield _Entry(f"{published}reg_token", (f"{ours}embeddings.register_tokens",))
        for kind in _KINDS:
            own_name = f"{ours}embeddings.patch_embeddings.projection.{kind}"
            yield _Entry(f"{published}patch_embed.proj.{kind}", (own_name,))
    if cfg.siglip is not None:
        published, ours = f"vision_backbone.{_siglip_name(cfg)}.", "vision_backbone.siglip."
        num_blocks = cfg.siglip.num_layers - 1
        yield from _block_entries(published, f"{ours}encoder.layers.", _SIGLIP_BLOCK, "self_attn", num_blocks)
        positions = f"{ours}embeddings.position_embedding.weight"
        yield _Entry(f"{published}pos_embed", (positions,), lambda own: own[None], lambda tensor: (tensor[0],))
        for kind in _KINDS:
            yield _Entry(f"{published}patch_embed.proj.{kind}", (f"{ours}embeddings.patch_embedding.{kind}",))


def _block_entries(
    published: str, ours: str, names: dict[str, str], attention: str, num_blocks: int
) -> Iterator[_Entry]:
    for block in range(num_blocks):
        theirs = f"{published}blocks.{block}."
        for name, own in names.items():
            yield _Entry(f"{theirs}{name}", (f"{ours}{block}.{own}",))
        for kind in _KINDS:
            own_names = tuple(f"{ours}{block}.{attention}.{letter}_proj.{kind}" for letter in "qkv")
            yield _Entry(
                f"{theirs}attn.qkv.{kind}",
                own_names,
                lambda *parts: torch.cat(parts),
                lambda x: tuple(one.contiguous() for one in x.chunk(3)),
            )


def _siglip_name(cfg: VLAConfig) -> str:
    return "featurizer" if cfg.dino is None else "fused_featurizer"
