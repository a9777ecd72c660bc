"""MetaWorld's 50 tasks: sentences and difficulties of the public data, and the sets of tasks that papers use."""

from __future__ import annotations

from rlinf_lite.config.rules.cards import named_tasks

STATE_DIM = 39
"""Hand and objects now (18), the same one step before (18), and the goal (3)."""
OWN_STATE_DIM = 4
"""The hand's position (3) and the opening of the gripper: the state that comes with pictures."""
MAX_STEPS = 500

_EASY = {
    "button-press-topdown-v3": "Press a button from the top",
    "button-press-topdown-wall-v3": "Bypass a wall and press a button from the top",
    "button-press-v3": "Press a button",
    "button-press-wall-v3": "Bypass a wall and press a button",
    "coffee-button-v3": "Push a button on the coffee machine",
    "dial-turn-v3": "Rotate a dial 180 degrees",
    "door-close-v3": "Close a door with a revolving joint",
    "door-lock-v3": "Lock the door by rotating the lock clockwise",
    "door-open-v3": "Open a door with a revolving joint",
    "door-unlock-v3": "Unlock the door by rotating the lock counter-clockwise",
    "drawer-close-v3": "Push and close a drawer",
    "drawer-open-v3": "Open a drawer",
    "faucet-close-v3": "Rotate the faucet clockwise",
    "faucet-open-v3": "Rotate the faucet counter-clockwise",
    "handle-press-side-v3": "Press a handle down sideways",
    "handle-press-v3": "Press a handle down",
    "handle-pull-side-v3": "Pull a handle up sideways",
    "handle-pull-v3": "Pull a handle up",
    "lever-pull-v3": "Pull a lever down 90 degrees",
    "peg-unplug-side-v3": "Unplug a peg sideways",
    "plate-slide-back-side-v3": "Get a plate from the cabinet sideways",
    "plate-slide-back-v3": "Get a plate from the cabinet",
    "plate-slide-side-v3": "Slide a plate into a cabinet sideways",
    "plate-slide-v3": "Slide a plate into a cabinet",
    "reach-v3": "Reach a goal position",
    "reach-wall-v3": "Bypass a wall and reach a goal",
    "window-close-v3": "Push and close a window",
    "window-open-v3": "Push and open a window",
}
_MEDIUM = {
    "basketball-v3": "Dunk the basketball into the basket",
    "bin-picking-v3": "Grasp the puck from one bin and place it into another bin",
    "box-close-v3": "Grasp the cover and close the box with it",
    "coffee-pull-v3": "Pull a mug from a coffee machine",
    "coffee-push-v3": "Push a mug under a coffee machine",
    "hammer-v3": "Hammer a screw on the wall",
    "peg-insert-side-v3": "Insert a peg sideways",
    "push-wall-v3": "Bypass a wall and push a puck to a goal",
    "soccer-v3": "Kick a soccer into the goal",
    "sweep-into-v3": "Sweep a puck into a hole",
    "sweep-v3": "Sweep a puck off the table",
}
_HARD = {
    "assembly-v3": "Pick up a nut and place it onto a peg",
    "hand-insert-v3": "Insert the gripper into a hole",
    "pick-out-of-hole-v3": "Pick up a puck from a hole",
    "pick-place-v3": "Pick and place a puck to a goal",
    "push-back-v3": "Push the puck to a goal",
    "push-v3": "Push the puck to a goal",
}
_VERY_HARD = {
    "disassemble-v3": "Pick a nut out of a peg",
    "pick-place-wall-v3": "Pick a puck, bypass a wall and place the puck",
    "shelf-place-v3": "Pick and place a puck onto a shelf",
    "stick-pull-v3": "Grasp a stick and pull a box with the stick",
    "stick-push-v3": "Grasp a stick and push a box using the stick",
}

SENTENCES = {**_EASY, **_MEDIUM, **_HARD, **_VERY_HARD}
"""Instructions for the policy, by task."""
DIFFICULTIES = {"easy": tuple(_EASY), "medium": tuple(_MEDIUM), "hard": tuple(_HARD), "very_hard": tuple(_VERY_HARD)}
MT10 = (
    "reach-v3",
    "push-v3",
    "pick-place-v3",
    "door-open-v3",
    "drawer-open-v3",
    "drawer-close-v3",
    "button-press-topdown-v3",
    "peg-insert-side-v3",
    "window-open-v3",
    "window-close-v3",
)
MT50 = (
    "assembly-v3", "basketball-v3", "bin-picking-v3", "box-close-v3", "button-press-topdown-v3",
    "button-press-topdown-wall-v3", "button-press-v3", "button-press-wall-v3", "coffee-button-v3", "coffee-pull-v3",
    "coffee-push-v3", "dial-turn-v3", "disassemble-v3", "door-close-v3", "door-lock-v3", "door-open-v3",
    "door-unlock-v3", "hand-insert-v3", "drawer-close-v3", "drawer-open-v3", "faucet-open-v3", "faucet-close-v3",
    "hammer-v3", "handle-press-side-v3", "handle-press-v3", "handle-pull-side-v3", "handle-pull-v3", "lever-pull-v3",
    "pick-place-wall-v3", "pick-out-of-hole-v3", "pick-place-v3", "plate-slide-v3", "plate-slide-side-v3",
    "plate-slide-back-v3", "plate-slide-back-side-v3", "peg-insert-side-v3", "peg-unplug-side-v3", "soccer-v3",
    "stick-push-v3", "stick-pull-v3", "push-v3", "push-wall-v3", "push-back-v3", "reach-v3", "reach-wall-v3",
    "shelf-place-v3", "sweep-into-v3", "sweep-v3", "window-open-v3", "window-close-v3",
)  # fmt: skip
"""Tasks in the library's order, which is the order of its one-hot."""
SETS = {"MT10": MT10, "MT50": MT50, **DIFFICULTIES}
"""Sets of tasks that `env.task` may name, besides one task (MT1 in papers) and a comma-separated list of tasks."""


def tasks_of(name: str) -> tuple[str, ...]:
    """The tasks that `env.task` stands for, in the order of their one-hot. Raises UnknownEnvError."""
    return named_tasks(name, SENTENCES, SETS, "set")
