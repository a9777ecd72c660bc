"""Levels: conversions from a policy's per-element tensors [B, C, D] to the positions [B, n] of a loss.

`chunk_level`: n = 1. `action_level`: n = C, one per action. `token_level`: n = C * D, one per action dimension.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlinf_lite.algorithms.records import InputError

Level = Literal["chunk_level", "action_level", "token_level"]


def sum_to_level(elements: Tensor, level: Level) -> Tensor:
    """Log-probabilities or entropies [B, C, D], summed over the elements of each position of `level`: [B, n]."""
    if level == "token_level":
        return elements.flatten(1)
    per_action = elements.sum(dim=2)
    return per_action if level == "action_level" else per_action.sum(dim=1, keepdim=True)


def entropy_at_level(entropy: Tensor, executed: Tensor, entropy_type: Level, logprob_type: Level) -> Tensor:
    """Entropies [B, C, D], summed at `entropy_type` and, if the two levels differ, averaged over each row and repeated
    at the positions of `logprob_type`.

    Actions that were not `executed` [B, C] enter neither sums nor means; their positions are 0.
    """
    kept = torch.where(executed[..., None], entropy, 0.0)
    at_level = sum_to_level(kept, entropy_type)
    if entropy_type == logprob_type:
        return at_level
    counted = sum_to_level(executed[..., None].expand_as(entropy), entropy_type) > 0
    mean = at_level.sum(dim=1, keepdim=True) / counted.sum(dim=1, keepdim=True).clamp(min=1)
    return mean * (sum_to_level(executed[..., None].expand_as(entropy), logprob_type) > 0)


def expand_to_level(per_decision: Tensor, level: Level, num_action_chunks: int, action_dim: int) -> Tensor:
    """Advantages or masks, one per chunk [B, 1] or action [B, C], repeated to the positions of `level`: [B, n].

    Raises InputError for per-action input at chunk level, which has fewer positions.
    """
    sizes = {"chunk_level": 1, "action_level": num_action_chunks, "token_level": num_action_chunks * action_dim}
    given = per_decision.shape[1]
    if given not in (1, num_action_chunks) or sizes[level] % given != 0:
        raise InputError(
            f"a tensor of shape {list(per_decision.shape)} does not fit {level} with {num_action_chunks} actions of "
            f"{action_dim} dimensions. algorithm.reward_type: action_level needs a logprob_type finer than a chunk."
        )
    return per_decision.repeat_interleave(sizes[level] // given, dim=1)
