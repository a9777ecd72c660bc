"""From trajectories to the positions [B, T] that advantage estimators work on."""

from __future__ import annotations

import torch

from rlinf_lite.algorithms import AdvantageInputs
from rlinf_lite.config import AlgorithmConfig
from rlinf_lite.workers.trajectory import Trajectories


def advantage_inputs(trajectories: Trajectories, cfg: AlgorithmConfig) -> AdvantageInputs:
    """One position per chunk, [B, T], or with `reward_type: action_level` one per action, [B, T * C]."""
    own = trajectories
    group_ids = own.env_ids // cfg.group_size
    rewards = own.rewards * cfg.reward_scale
    if cfg.reward_type == "chunk_level":
        return AdvantageInputs(
            rewards=rewards.sum(-1),
            mask=own.mask[..., 0].float(),
            values=own.values[..., 0],
            next_values=own.next_values,
            dones=own.dones.any(-1),
            group_ids=group_ids,
        )
    following = torch.cat([own.values[..., 1:], own.next_values[..., None]], -1)
    next_values = torch.where(own.dones, own.next_values[..., None], following)
    return AdvantageInputs(
        rewards=rewards.flatten(1),
        mask=own.mask.flatten(1).float(),
        values=own.values.flatten(1),
        next_values=next_values.flatten(1),
        dones=own.dones.flatten(1),
        group_ids=group_ids,
    )
