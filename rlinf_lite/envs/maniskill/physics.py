"""CPU simulation by mani_skill 3.0 as we need it: faster with the same results, bit for bit, and without memory."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import sapien
import sapien.physx
import torch
from mani_skill.agents.base_agent import BaseAgent
from mani_skill.agents.controllers import PDJointPosController
from mani_skill.agents.controllers.base_controller import BaseController, CombinedController
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.scene import ManiSkillScene
from mani_skill.utils.structs import Articulation, Pose

_create = Pose.create.__func__
_set_joint_drive_targets = Articulation.set_joint_drive_targets
_seeding = threading.Lock()


def speed_up() -> None:
    """Puts three hot functions in place, in this process; calling it again changes nothing.

    A step of PushCube reads 11 poses and sets 9 joint targets, each through several torch calls, and looks for NaN in
    its action through a deprecated numpy protocol: a quarter of its time.
    """
    Pose.create = classmethod(create_pose)
    Articulation.set_joint_drive_targets = set_joint_drive_targets
    BaseAgent.set_action = set_action


def create_pose(cls: type[Pose], pose: Any, device: Any = None) -> Pose:
    """`Pose.create`, quick for a list of poses on the CPU."""
    on_cpu = torch.device(device or "cpu").type == "cpu"
    if not isinstance(pose, list) or not isinstance(pose[0], sapien.Pose) or not on_cpu:
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


def has_hooks(env: Any) -> bool:
    """Whether `env._step_action(None)` does more than steps of physics: whether its task, its robot or a controller has
    something to do in them. Counting them, as controllers of joint positions do, is not."""

    def is_own(thing: Any, name: str, of: type) -> bool:
        return getattr(getattr(thing, name), "__func__", None) is getattr(of, name)

    def waits(controller: Any) -> bool:
        if is_own(controller, "before_simulation_step", CombinedController):
            return all(map(waits, controller.controllers.values()))
        if is_own(controller, "before_simulation_step", PDJointPosController):
            return not controller.config.interpolate
        return is_own(controller, "before_simulation_step", BaseController)

    hooks = ("control_step", "simulation_step")
    names = ["_step_action", *[f"_{when}_{hook}" for when in ("before", "after") for hook in hooks]]
    robot = env.agent
    return not (
        all(is_own(env, name, BaseEnv) for name in names)
        and is_own(env.scene, "step", ManiSkillScene)
        and (robot is None or (is_own(robot, "before_simulation_step", BaseAgent) and waits(robot.controller)))
    )


@contextlib.contextmanager
def seeds_of_the_cpu() -> Iterator[None]:
    """Inside the block, in one thread at a time, `torch.manual_seed` seeds the CPU alone.

    It would also format a stack trace for each kind of device that is not in use: a fifth of a reset's time.
    """
    with _seeding:
        of_all = torch.manual_seed
        torch.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
        try:
            yield
        finally:
            torch.manual_seed = of_all


def renew_physics(env: Any) -> None:
    """Moves a CPU-simulated ManiSkill environment into a new PhysX scene; call it before `reset`.

    A trajectory of ours is then a function of its seed and actions, bit for bit, whatever ran before. ManiSkill's reset
    sets poses and velocities. PhysX keeps more: cached contacts, the order in which it solves them, and how long each
    body has been at rest. Of trajectories that grasp, 4 to 8 in 16 differ from those in a fresh scene because of it
    (PickCube, PushCube; from 1e-5 on, then chaotically). Moving all entities and waking the bodies afresh removes it,
    in 0.3 ms per episode; rebuilding the environment, as `reconfigure` does, takes 100 ms.
    """
    scene = env.scene
    old = scene.sub_scenes[0]
    entities = list(old.entities)
    for entity in entities:
        old.remove_entity(entity)
    env._set_scene_config()  # process-wide in SAPIEN: another environment may have set its own
    physics = sapien.physx.PhysxCpuSystem()
    physics.timestep = scene.px.timestep
    new = sapien.Scene([physics, *([old.render_system] if env.scene.can_render() else [])])
    for entity in entities:
        new.add_entity(entity)
    bodies = [actor._bodies for actor in scene.actors.values() if actor.px_body_type == "dynamic"]
    bodies += [[one.root for one in articulation._objs] for articulation in scene.articulations.values()]
    for body in itertools.chain(*bodies):  # waking alone leaves a clock that contacts have wound further
        body.put_to_sleep()
        body.wake_up()
    scene.sub_scenes = [new]
    scene.px = physics
