"""Three hot functions of mani_skill 3.0, rewritten for CPU simulation with the same results, bit for bit.

A step of PushCube reads 11 poses and sets 9 joint targets, each through several torch calls, and looks for NaN in its
action through a deprecated numpy protocol: a quarter of its time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import sapien
import torch
from mani_skill.agents.base_agent import BaseAgent
from mani_skill.utils.structs import Articulation, Pose

_create = Pose.create.__func__
_set_joint_drive_targets = Articulation.set_joint_drive_targets


def speed_up() -> None:
    """Puts them in place, in this process; calling it again changes nothing."""
    Pose.create = classmethod(create_pose)
    Articulation.set_joint_drive_targets = set_joint_drive_targets
    BaseAgent.set_action = set_action


def create_pose(cls: type[Pose], pose: Any, device: Any = None) -> Pose:
    """`Pose.create`, quick for a list of poses on the CPU."""
    if not isinstance(pose, list) or not isinstance(pose[0], sapien.Pose) or not _is_cpu(device):
        return _create(cls, pose, device)
    if len(pose) == 1:
        raw = np.concatenate((pose[0].p, pose[0].q))[None]
    else:
        raw = np.stack([np.concatenate((one.p, one.q)) for one in pose])
    return cls(raw_pose=torch.from_numpy(raw))


def set_joint_drive_targets(self: Articulation, targets: Any, joints: Any = None, joint_indices: Any = None) -> None:
    """`Articulation.set_joint_drive_targets`, quick for tensors on the CPU."""
    if self.scene.gpu_sim_enabled or not isinstance(targets, torch.Tensor) or targets.dtype != torch.float32:
        return _set_joint_drive_targets(self, targets, joints, joint_indices)
    values = targets[0].numpy()
    for i, joint in enumerate(joints):
        joint._objs[0].drive_target = values[i : i + 1]


def set_action(self: BaseAgent, action: Any) -> None:
    """`BaseAgent.set_action` without its search for NaN: ChunkedEnv lets no such action through."""
    self.controller.set_action(action)


def _is_cpu(device: Any) -> bool:
    return device is None or torch.device(device).type == "cpu"
