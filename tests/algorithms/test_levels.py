"""Entropy bonuses at every pair of levels, against loops over the actions that were executed."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest
import torch

from rlinf_lite.algorithms import Level, LossInputs, actor_loss, entropy_at_level, sum_to_level
from rlinf_lite.config import AlgorithmConfig

LEVELS = get_args(Level)
B, C, D = 5, 4, 3
EXECUTED = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]).bool()


def positions(level: str) -> list[list[tuple[int, int]]]:
    """The (action, dimension) pairs of each position of a row."""
    if level == "chunk_level":
        return [list(itertools.product(range(C), range(D)))]
    if level == "action_level":
        return [[(c, d) for d in range(D)] for c in range(C)]
    return [[(c, d)] for c in range(C) for d in range(D)]


def slow(entropy: torch.Tensor, row: int, entropy_type: str, logprob_type: str) -> list[float]:
    def total(pairs: list[tuple[int, int]]) -> float | None:
        counted = [float(entropy[row, c, d]) for c, d in pairs if EXECUTED[row, c]]
        return sum(counted) if counted else None

    own = [total(pairs) for pairs in positions(entropy_type)]
    if entropy_type == logprob_type:
        return [value or 0.0 for value in own]
    there = [value for value in own if value is not None]
    mean = sum(there) / len(there) if there else 0.0
    return [0.0 if total(pairs) is None else mean for pairs in positions(logprob_type)]


@pytest.mark.parametrize("logprob_type", LEVELS)
@pytest.mark.parametrize("entropy_type", LEVELS)
def test_only_executed_actions_have_entropy(entropy_type: Level, logprob_type: Level) -> None:
    entropy = torch.rand(B, C, D, dtype=torch.float64) + 0.5
    entropy[~EXECUTED] = float("nan")  # what stands there enters nothing, gradients included
    entropy.requires_grad_()
    found = entropy_at_level(entropy, EXECUTED, entropy_type, logprob_type)
    expected = [slow(entropy.detach(), row, entropy_type, logprob_type) for row in range(B)]
    np.testing.assert_allclose(found.detach().numpy(), expected)

    mask = sum_to_level(EXECUTED[..., None].expand(B, C, D), logprob_type) > 0
    logprobs = torch.zeros_like(found.detach())
    inputs = LossInputs(logprobs, logprobs, logprobs, mask, entropy=found)
    actor_loss("ppo", inputs, AlgorithmConfig(entropy_coef=1.0)).loss.backward()
    assert entropy.grad is not None
    assert torch.equal(entropy.grad != 0, EXECUTED[..., None].expand(B, C, D))
