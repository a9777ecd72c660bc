"""CPU simulation by mani_skill 3.0 whose trajectories are functions of seed and actions alone."""

from __future__ import annotations

import itertools
from typing import Any

import sapien
import sapien.physx


def renew_physics(env: Any) -> None:
    """Move a CPU-simulated ManiSkill environment into a new PhysX scene; call it before `reset`.

    A trajectory is then a function of its seed and actions, bit for bit, and does not depend on earlier episodes.
    ManiSkill's reset sets poses and velocities. PhysX keeps more: cached contacts, the order in which it solves them,
    and how long each body has been at rest. Because of it, 4 to 8 of 16 trajectories that grasp differ from those in a
    new scene (PickCube, PushCube; by 1e-5 at first, then chaotically). Moving all entities and waking the bodies
    removes it, in 0.3 ms per episode; rebuilding the environment, as `reconfigure` does, takes 100 ms.
    """
    scene = env.scene
    old = scene.sub_scenes[0]
    entities = list(old.entities)
    for entity in entities:
        old.remove_entity(entity)
    env._set_scene_config()  # it holds for the whole process, where another environment may have changed it
    physics = sapien.physx.PhysxCpuSystem()
    physics.timestep = scene.px.timestep
    new = sapien.Scene([physics, *([old.render_system] if env.scene.can_render() else [])])
    for entity in entities:
        new.add_entity(entity)
    bodies = [actor._bodies for actor in scene.actors.values() if actor.px_body_type == "dynamic"]
    bodies += [[one.root for one in articulation._objs] for articulation in scene.articulations.values()]
    for body in itertools.chain(*bodies):  # waking alone does not reset the time that a body has been at rest
        body.put_to_sleep()
        body.wake_up()
    scene.sub_scenes = [new]
    scene.px = physics
