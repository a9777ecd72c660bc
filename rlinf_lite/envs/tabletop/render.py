"""Pictures of the table from above: flat shapes, 64 x 64, uint8; x to the right, y up."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.envs.base import FloatArray, IntArray
from rlinf_lite.envs.tabletop.language import COLOURS
from rlinf_lite.envs.tabletop.physics import NUM_BLOCKS, NUM_SQUARES, Scene

SIZE = 64
TABLE = (46, 48, 54)
PALETTE = {
    "red": (226, 52, 44),
    "green": (46, 168, 64),
    "blue": (52, 100, 244),
    "yellow": (246, 208, 48),
    "purple": (168, 64, 208),
    "cyan": (84, 220, 228),
}
_RGB = np.array([PALETTE[name] for name in COLOURS], np.uint8)
_DARK, _LIGHT = (16, 16, 18), (255, 255, 255)

_ROWS, _COLUMNS = np.indices((17, 17)) - 8
_AROUND = np.maximum(np.abs(_ROWS), np.abs(_COLUMNS))  # Chebyshev distance from the centre
_OFF_AXIS = np.minimum(np.abs(_ROWS), np.abs(_COLUMNS))


def _pixels(keep: NDArray[np.bool_]) -> IntArray:
    """Offsets (row, column) from a shape's centre [K, 2]."""
    return np.stack([_ROWS[keep], _COLUMNS[keep]], axis=1)


BLOCK = _pixels(_AROUND <= 5)  # 11 x 11
SQUARE = _pixels((_AROUND <= 7) & (_AROUND > 5))  # a frame, and a block fits into it
_OUTLINE = _pixels((_OFF_AXIS <= 1) & (_AROUND <= 5))
_OPEN = _pixels((_OFF_AXIS == 0) & (_AROUND <= 4))
_CLOSED = _pixels((_OFF_AXIS == 0) & (_AROUND <= 4) | (_AROUND <= 2))


def render(scene: Scene, rows: IntArray) -> NDArray[np.uint8]:
    """Pictures of `rows` [B, 64, 64, 3]."""
    batch = np.arange(len(rows))
    canvas = np.full((len(rows), SIZE, SIZE, 3), TABLE, np.uint8)
    held = np.maximum(scene.held[rows], 0)
    kinds = (
        (SQUARE, scene.squares[rows], scene.square_colours[rows], NUM_SQUARES),
        (BLOCK, scene.blocks[rows], scene.block_colours[rows], NUM_BLOCKS),
        (BLOCK, scene.blocks[rows, held][:, None], scene.block_colours[rows, held][:, None], 1),  # on top
    )
    for shape, places, colours, count in kinds:
        for slot in range(count):
            drawn = batch[colours[:, slot] >= 0]
            _stamp(canvas, drawn, places[drawn, slot], shape, _RGB[colours[drawn, slot]])
    effector, closed = scene.effector[rows], scene.closed[rows]
    _stamp(canvas, batch, effector, _OUTLINE, np.array([_DARK], np.uint8))
    for shape, drawn in ((_OPEN, batch[~closed]), (_CLOSED, batch[closed])):
        _stamp(canvas, drawn, effector[drawn], shape, np.array([_LIGHT], np.uint8))
    return canvas


def _stamp(
    canvas: NDArray[np.uint8], rows: IntArray, places: FloatArray, shape: IntArray, rgb: NDArray[np.uint8]
) -> None:
    """Draws a shape at `places` [M, 2] of pictures `rows` [M] in colours [M or 1, 3].

    Pixels beyond the edge fall onto it, which for shapes around their centre is where they are cut off.
    """
    column = (places[:, 0] + 1) * (SIZE / 2)
    row = (1 - places[:, 1]) * (SIZE / 2)
    centres = np.floor(np.stack([row, column], axis=1)).astype(np.int64)
    pixels = np.clip(centres[:, None] + shape, 0, SIZE - 1)  # [M, K, 2]
    canvas[rows[:, None], pixels[..., 0], pixels[..., 1]] = rgb[:, None]
