"""The scripted expert of the tabletop: the next action from any state, for all rows at once."""

from __future__ import annotations

import numpy as np

from rlinf_lite.envs.base import FloatArray
from rlinf_lite.envs.tabletop.language import PICK, PUSH
from rlinf_lite.envs.tabletop.physics import CONTACT, REACH, Scene, goals, length

_PUSH_START = np.float32(0.9) * CONTACT  # distance from the block's centre at which a push begins
_NEAR = np.float32(0.05)  # distance per axis that may remain when the gripper closes or opens
_ALIGNED = np.float32(0.8)  # cosine between the way to the block and the block's way to its goal


def expert_action(scene: Scene) -> FloatArray:
    """Actions [B, 3]; zeros in rows whose outcome is decided."""
    # pick and place: move to the block and close there; move to its goal and open there
    holding = (scene.held == 0) & (scene.family != PICK)
    way = np.where(holding[:, None], goals(scene), scene.blocks[:, 0]) - scene.effector
    arrives = np.abs(way).max(axis=1) <= REACH + _NEAR
    action = _towards(way, closed=arrives != holding)
    pushing = scene.family == PUSH
    if pushing.any():
        action = np.where(pushing[:, None], _push(scene), action)
    return np.where((scene.outcome == 0)[:, None], action, np.float32(0))


def _push(scene: Scene) -> FloatArray:
    """Actions of pushes: with an open gripper to the far side of the block, then closed and straight to the square."""
    block = scene.blocks[:, 0]
    to_goal, to_block = scene.squares[:, 0] - block, block - scene.effector
    goal_distance, block_distance = length(to_goal), length(to_block)
    direction = to_goal / np.maximum(goal_distance, np.float32(1e-6))[:, None]
    cosine = to_block[:, 0] * direction[:, 0] + to_block[:, 1] * direction[:, 1]
    near = (block_distance < CONTACT) & (block_distance > CONTACT / 2)
    aligned = near & (cosine > _ALIGNED * block_distance)
    to_start = block - _PUSH_START * direction - scene.effector
    straight = to_goal * (REACH / np.maximum(np.abs(to_goal).max(axis=1), REACH))[:, None]
    return _towards(np.where(aligned[:, None], straight, to_start), closed=aligned)


def _towards(way: FloatArray, closed: np.ndarray) -> FloatArray:
    grip = np.where(closed, np.float32(1), np.float32(-1))
    return np.concatenate([np.clip(way / REACH, -1, 1), grip[:, None]], axis=1).astype(np.float32)
