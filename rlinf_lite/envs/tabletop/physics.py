"""Effects of actions on the table (moving, gripping, pushing) and the test for success, for all rows at once.

Lengths are in half table widths: the table is [-1, 1] in x (to the right) and y (up, in the picture).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.envs.base import BoolArray, FloatArray, IntArray
from rlinf_lite.envs.tabletop.language import PICK, PLACE, PUSH

NUM_BLOCKS, NUM_SQUARES = 3, 2
REACH = np.float32(0.2)  # largest distance of one env step, per axis
GRASP = np.float32(0.13)  # a closing gripper grasps a block whose centre is nearer than this
ON_SQUARE = np.float32(0.13)  # a block is on a square if their centres are nearer than this
CONTACT = np.float32(0.22)  # a closed gripper pushes blocks nearer than this
RIM = np.float32(0.78)  # blocks are not pushed further out than this, so that the gripper has room outside them
NEXT_TO = np.float32(0.45)  # distance of the places "left of" and "right of" from the other block
NEXT_TO_X, NEXT_TO_Y = np.float32(0.2), np.float32(0.2)  # tolerance around these places
_SUBSTEPS = 4


@dataclass
class Scene:
    """B tables. The instruction names block 0, square 0 (push), and block 1 as the reference of a place.

    Absent objects have colour -1 and lie far off the table.
    """

    family: IntArray  # [B]
    block_colours: IntArray  # [B, 3]
    squares: FloatArray  # [B, 2, 2]
    square_colours: IntArray  # [B, 2]
    side: FloatArray  # [B], place: -1 left of, 1 right of; else 0

    effector: FloatArray  # [B, 2]
    blocks: FloatArray  # [B, 3, 2]
    closed: BoolArray  # [B]
    held: IntArray  # [B], the block in the gripper, or -1
    outcome: NDArray[np.int8]  # [B], 1 succeeded, -1 failed, 0 undecided; once decided it is final and nothing moves

    @classmethod
    def empty(cls, num_envs: int) -> Scene:
        return cls(
            family=np.zeros(num_envs, np.int64),
            block_colours=np.full((num_envs, NUM_BLOCKS), -1),
            squares=np.zeros((num_envs, NUM_SQUARES, 2), np.float32),
            square_colours=np.full((num_envs, NUM_SQUARES), -1),
            side=np.zeros(num_envs, np.float32),
            effector=np.zeros((num_envs, 2), np.float32),
            blocks=np.zeros((num_envs, NUM_BLOCKS, 2), np.float32),
            closed=np.zeros(num_envs, np.bool_),
            held=np.full(num_envs, -1),
            outcome=np.zeros(num_envs, np.int8),
        )

    def put(self, rows: IntArray, other: Scene) -> None:
        """Overwrite `rows` with another scene, which consists of these rows."""
        for field in fields(self):
            getattr(self, field.name)[rows] = getattr(other, field.name)

    def moving_copy(self) -> Scene:
        """A copy that can be stepped; arrays that never change in an episode are shared."""
        moving = ("effector", "blocks", "closed", "held", "outcome")
        return replace(self, **{name: getattr(self, name).copy() for name in moving})


def goals(scene: Scene) -> FloatArray:
    """Target position of the named block [B, 2]: its square, the place next to the other block, or for a pick its own
    position."""
    next_to = scene.blocks[:, 1].copy()
    next_to[:, 0] += scene.side * NEXT_TO
    on_square = np.where((scene.family == PUSH)[:, None], scene.squares[:, 0], next_to)
    return np.where((scene.family == PICK)[:, None], scene.blocks[:, 0], on_square)


def remaining(scene: Scene) -> FloatArray:
    """Remaining distance [B]: from the effector to the named block (0 if held), plus from the block to its goal."""
    to_block = np.where(scene.held == 0, np.float32(0), length(scene.blocks[:, 0] - scene.effector))
    return to_block + length(goals(scene) - scene.blocks[:, 0])


def length(vectors: FloatArray) -> FloatArray:
    """Euclidean length over the last axis, of size 2. A row's result does not depend on its batch, bit for bit."""
    found: FloatArray = np.sqrt(vectors[..., 0] * vectors[..., 0] + vectors[..., 1] * vectors[..., 1])
    return found


def advance(scene: Scene, actions: FloatArray) -> None:
    """Take one env step of all rows, in place. Actions [B, 3]: dx, dy, grip; the gripper is closed while grip > 0."""
    undecided = scene.outcome == 0
    before = scene.effector
    scene.closed = np.where(undecided, actions[:, 2] > 0, scene.closed)
    moved = np.clip(before + REACH * actions[:, :2], np.float32(-1), np.float32(1))
    scene.effector = np.where(undecided[:, None], moved, before)
    pushing = np.flatnonzero(undecided & scene.closed & (scene.family == PUSH))
    if pushing.size:
        scene.blocks[pushing] = _pushed(scene.blocks[pushing], before[pushing], scene.effector[pushing])
    was_held = scene.held
    # a closed gripper holds the block that it carries, or takes the nearest one within GRASP; an open one, none
    distance = length(scene.blocks - scene.effector[:, None])
    nearest = distance.argmin(axis=1)
    rows = np.arange(len(nearest))
    grasps = scene.closed & (scene.family != PUSH) & (distance[rows, nearest] < GRASP)
    held = np.where(scene.held >= 0, scene.held, np.where(grasps, nearest, -1))
    carried = np.flatnonzero(undecided & (held >= 0))
    scene.blocks[carried, held[carried]] = scene.effector[carried]
    scene.held = np.where(undecided, np.where(scene.closed, held, -1), scene.held)
    _decide(scene, undecided, released=(was_held == 0) & (scene.held < 0))


def _pushed(blocks: FloatArray, start: FloatArray, stop: FloatArray) -> FloatArray:
    """Blocks [P, 3, 2] after closed grippers moved from start to stop [P, 2].

    A block in contact and ahead (within 60 degrees of the way) moves with the gripper, without turning or slipping.
    """
    way = (stop - start) / np.float32(_SUBSTEPS)
    way_length = length(way)
    for substep in range(_SUBSTEPS):
        apart = blocks - (start + np.float32(substep) * way)[:, None]
        distance = length(apart)
        along = apart[..., 0] * way[:, None, 0] + apart[..., 1] * way[:, None, 1]
        touched = (distance < CONTACT) & (along > np.float32(0.5) * distance * way_length[:, None])
        blocks = np.where(touched[..., None], np.clip(blocks + way[:, None], -RIM, RIM), blocks)
    return blocks


def _decide(scene: Scene, undecided: BoolArray, released: BoolArray) -> None:
    picked, wrong = scene.held == 0, scene.held > 0
    succeeded, failed = picked & (scene.family == PICK), wrong
    placed = released & (scene.family == PLACE)
    if placed.any():
        apart = scene.blocks[:, 0] - scene.blocks[:, 1]
        level = placed & (np.abs(apart[:, 1]) <= NEXT_TO_Y)
        succeeded = succeeded | (level & (np.abs(apart[:, 0] - scene.side * NEXT_TO) <= NEXT_TO_X))
        failed = failed | (level & (np.abs(apart[:, 0] + scene.side * NEXT_TO) <= NEXT_TO_X))
    pushed = scene.family == PUSH
    if pushed.any():
        on_square = length(scene.blocks[:, :, None] - scene.squares[:, None]) < ON_SQUARE  # [B, 3, 2]
        right = on_square[:, 0, 0]
        succeeded = succeeded | (pushed & right)
        failed = failed | (pushed & ~right & on_square.any(axis=(1, 2)))
    decided = succeeded.astype(np.int8) - (failed & ~succeeded).astype(np.int8)
    scene.outcome = np.where(undecided, decided, scene.outcome)
