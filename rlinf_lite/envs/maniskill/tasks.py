"""What ManiSkill's tasks are called in words, for policies that read instructions, and which have an expert."""

from __future__ import annotations

import re

EXPERT_TASKS = ("PickCube-v1",)
EXPERT_CONTROL_MODES = ("pd_ee_delta_pos", "pd_ee_delta_pose")
_INSTRUCTIONS = {
    "PickCube-v1": "pick up the red cube and move it to the green goal",
    "PushCube-v1": "push the blue cube to the red and white target",
    "PullCube-v1": "pull the blue cube to the red and white target",
    "StackCube-v1": "stack the red cube on the green cube",
    "PegInsertionSide-v1": "insert the orange end of the peg into the hole of the box",
    "LiftPegUpright-v1": "lift the peg upright",
    "PokeCube-v1": "poke the cube with the peg",
    "RollBall-v1": "roll the ball to the goal",
    "PlaceSphere-v1": "place the sphere in the bin",
    "PlugCharger-v1": "plug the charger into the receptacle",
    "TurnFaucet-v1": "turn the faucet on",
}


def instruction_of(task: str) -> str:
    """A sentence for known tasks, else the task's name in words: "OpenCabinetDrawer-v1" -> "open cabinet drawer"."""
    name = re.sub(r"-v\d+$", "", task)
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
    return _INSTRUCTIONS.get(task) or " ".join(words).lower()
