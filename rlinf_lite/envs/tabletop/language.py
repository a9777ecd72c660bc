"""The tabletop's instructions: their families, colours and sentences."""

from __future__ import annotations

FAMILIES = ("pick", "push", "place")
PICK, PUSH, PLACE = range(3)
COLOURS = ("red", "green", "blue", "yellow", "purple", "cyan")
SIDES = {-1: "left", 1: "right"}
HELD_OUT = {"pick": "purple", "push": "cyan", "place": "yellow"}
"""The block colour that instructions of a family never name in training. Blocks of that colour are still on the
table."""
WORDINGS = {
    "pick": ("pick up the {a} block", "grasp the {a} block", "take the {a} block", "lift the {a} block"),
    "push": (
        "push the {a} block onto the {b} square",
        "slide the {a} block to the {b} square",
        "move the {a} block onto the {b} square",
        "shove the {a} block over to the {b} square",
    ),
    "place": (
        "put the {a} block {side} of the {b} block",
        "place the {a} block to the {side} of the {b} block",
        "set the {a} block down {side} of the {b} block",
        "move the {a} block to the {side} of the {b} block",
    ),
}


def sentence(family: int, wording: int, colour: int, other: int, side: int) -> str:
    """An instruction; `other` is the colour of the square or block that it refers to, `side` -1 (left) or 1 (right)."""
    template = WORDINGS[FAMILIES[family]][wording]
    return template.format(a=COLOURS[colour], b=COLOURS[other], side=SIDES.get(side, ""))
