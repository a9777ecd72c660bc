"""Trajectories against a naive reading of what happened in each environment."""

import numpy as np
import torch

from rlinf_lite.algorithms import compute_advantages, filter_groups
from rlinf_lite.config import AlgorithmConfig
from rlinf_lite.workers.messages import StepResult
from rlinf_lite.workers.trajectory import Trajectories, TrajectoryBuilder, advantage_inputs

T, C, B = 4, 2, 3


def build():
    """Row 0 is truncated at t=1 (first action), row 1 terminates at t=2 (second action), row 2 plays on."""
    builder = TrajectoryBuilder(np.array([4, 5, 6]), T)
    for t in range(T):
        builder.add_decision(
            torch.full((B, C, 1), -float(t)),
            torch.arange(B).float()[:, None] + 10 * t,
            {"x": torch.full((B, 2), float(t))},
            version=t // 2,
        )
        terminated, truncated = np.zeros((B, C), bool), np.zeros((B, C), bool)
        executed, rewards = np.ones((B, C), bool), np.ones((B, C), np.float32)
        if t == 1:
            truncated[0, 0], executed[0, 1], rewards[0, 1] = True, False, 0.0
        if t == 2:
            terminated[1, 1] = True
        builder.add_result(
            StepResult(rewards, terminated, truncated, executed, np.full(B, -1, np.int8), np.empty(0), None)
        )
        if t == 1:
            builder.need_values(np.array([0]), {"state": np.zeros((1, 2))})
    running = builder.running_rows()
    builder.need_values(running, {"state": np.zeros((len(running), 2))})
    assert len(builder.pending_observations()) == 2
    return builder.finish(torch.tensor([77.0, 90.0, 91.0, 92.0]))


def test_next_values_follow_the_chain_and_bootstrap_only_where_needed():
    trajectories = build()
    assert trajectories.next_values.tolist() == [[10, 77, 30, 90], [11, 21, 0, 91], [12, 22, 32, 92]]
    assert trajectories.mask.sum().item() == B * T * C - 1
    assert trajectories.forward_inputs["x"][1, :, 0].tolist() == [0, 1, 2, 3]


def test_chunk_level_positions():
    inputs = advantage_inputs(build(), AlgorithmConfig(group_size=2, reward_scale=0.5))
    assert inputs.rewards.tolist() == [[1, 0.5, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert inputs.dones.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert inputs.group_ids.tolist() == [2, 2, 3]


def test_equal_returns_stay_equal_whenever_they_are_earned():
    """0.1 is no multiple of a power of two: sums of it in float32 depend on their order."""
    trajectories, generator = build(), np.random.default_rng(0)
    earned = np.repeat([0.1, 0.3, 0.7, 0.05], 2).astype(np.float32)
    rewards = np.stack([generator.permutation(earned) for _ in range(B)]).reshape(B, T, C)
    trajectories.rewards, trajectories.mask = torch.from_numpy(rewards), torch.ones(B, T, C, dtype=torch.bool)
    trajectories.env_ids = torch.tensor([0, 0, 0])
    cfg = AlgorithmConfig(group_size=3, reward_scale=0.1)
    inputs = advantage_inputs(trajectories, cfg)
    assert filter_groups(inputs).tolist() == []
    assert compute_advantages("grpo", inputs, cfg).advantages.abs().max() < 1e-6


def test_what_was_not_executed_earns_nothing():
    trajectories = build()
    trajectories.rewards[~trajectories.mask] = torch.nan
    inputs = advantage_inputs(trajectories, AlgorithmConfig(group_size=2))
    assert inputs.rewards.tolist() == [[2, 1, 2, 2], [2, 2, 2, 2], [2, 2, 2, 2]]


def test_action_level_positions():
    trajectories = build()
    trajectories.values = torch.cat([trajectories.values, trajectories.values + 0.5], -1)  # [B, T, C]
    inputs = advantage_inputs(trajectories, AlgorithmConfig(reward_type="action_level"))
    assert inputs.next_values[0].tolist() == [0.5, 10, 77, 77, 20.5, 30, 30.5, 90]  # position 3 was not executed
    assert inputs.mask[0].tolist() == [1, 1, 1, 0, 1, 1, 1, 1]
    assert inputs.next_values[1].tolist() == [1.5, 11, 11.5, 21, 21.5, 0, 31.5, 91]


def test_parts_join_in_the_order_of_their_ids():
    whole = build()
    joined = Trajectories.concat([whole.rows(slice(2, 3)), whole.rows(slice(0, 2))])
    assert joined.env_ids.tolist() == [4, 5, 6]
    assert torch.equal(joined.forward_inputs["x"], whole.forward_inputs["x"])
    assert torch.equal(joined.next_values, whole.next_values)
