"""CPU simulation by mani_skill 3.0 without a memory: a trajectory is a function of its seed and actions alone."""

from __future__ import annotations

import itertools
from typing import Any

import sapien
import sapien.physx


def renew_physics(env: Any) -> None:
    """Moves a CPU-simulated ManiSkill environment into a new PhysX scene; call it before `reset`.

    A trajectory is then a function of its seed and actions, bit for bit, not of what ran before. ManiSkill's reset sets
    poses and velocities. PhysX keeps more: cached contacts, the order in which it solves them, and how long each
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
