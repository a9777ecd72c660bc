"""Forgetting an episode: a trajectory of ours is a function of its seed and actions, bit for bit, whatever ran before.

ManiSkill's reset sets poses and velocities. PhysX keeps more: cached contacts, the order in which it solves them, and
how long each body has been at rest. Of trajectories that grasp, 4 to 8 in 16 differ from those in a fresh scene
because of it (PickCube, PushCube; from 1e-5 on, then chaotically). Moving all entities into a new PhysX scene and
waking the bodies afresh removes it, in 0.3 ms per episode; rebuilding the environment, as `reconfigure` does, takes
100 ms.
"""

from __future__ import annotations

from typing import Any

import sapien
import sapien.physx


def renew_physics(env: Any) -> None:
    """Moves a CPU-simulated ManiSkill environment into a new PhysX scene; call it before `reset`."""
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
    for actor in scene.actors.values():
        if actor.px_body_type == "dynamic":
            _restart_sleep_clock(actor._bodies)
    for articulation in scene.articulations.values():
        _restart_sleep_clock([one.root for one in articulation._objs])
    scene.sub_scenes = [new]
    scene.px = physics


def _restart_sleep_clock(bodies: list[Any]) -> None:
    for body in bodies:  # waking alone leaves a clock that contacts have wound further
        body.put_to_sleep()
        body.wake_up()
