"""Pictures of the table from above: flat shapes, 64 x 64, uint8; x to the right, y up."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.envs.base import FloatArray, IntArray
from rlinf_lite.envs.tabletop.language import COLOURS
from rlinf_lite.envs.tabletop.physics import Scene

SIZE = 64
_MARGIN = 8  # pixels around the canvas, which are cut off at the end
_WIDTH = SIZE + 2 * _MARGIN
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
_DARK, _LIGHT = np.array([[16, 16, 18]], np.uint8), np.array([[255, 255, 255]], np.uint8)

_EMPTY = np.tile(np.array(TABLE, np.uint8), (1, _WIDTH * _WIDTH, 1))  # copying it is far faster than np.full
_ROWS, _COLUMNS = np.indices((2 * _MARGIN + 1, 2 * _MARGIN + 1)) - _MARGIN
_AROUND = np.maximum(np.abs(_ROWS), np.abs(_COLUMNS))  # Chebyshev distance from the centre
_OFF_AXIS = np.minimum(np.abs(_ROWS), np.abs(_COLUMNS))


def _pixels(keep: NDArray[np.bool_]) -> IntArray:
    """Offsets of a shape's pixels from its centre [K], in a flattened canvas."""
    found: IntArray = _ROWS[keep] * _WIDTH + _COLUMNS[keep]
    return found


BLOCK = _pixels(_AROUND <= 5)  # 11 x 11
SQUARE = _pixels((_AROUND <= 7) & (_AROUND > 5))  # a frame into which a block fits
_OUTLINE = _pixels((_OFF_AXIS <= 1) & (_AROUND <= 5))
_OPEN = _pixels((_OFF_AXIS == 0) & (_AROUND <= 4))
_CLOSED = _pixels((_OFF_AXIS == 0) & (_AROUND <= 4) | (_AROUND <= 2))


def render(scene: Scene, rows: IntArray) -> NDArray[np.uint8]:
    """Pictures of `rows` [B, 64, 64, 3]."""
    batch = np.arange(len(rows))
    canvas = np.repeat(_EMPTY, len(rows), axis=0)
    blocks, block_colours, held = scene.blocks[rows], scene.block_colours[rows], scene.held[rows]
    _draw(canvas, SQUARE, scene.squares[rows], scene.square_colours[rows])
    _draw(canvas, BLOCK, blocks, block_colours)
    carried = np.where(held >= 0, block_colours[batch, held], -1)
    _draw(canvas, BLOCK, blocks[batch, held][:, None], carried[:, None])  # once more, on top of the others
    effector, closed = scene.effector[rows], scene.closed[rows]
    _stamp(canvas, _OUTLINE, batch, effector, _DARK)
    _stamp(canvas, _OPEN, batch[~closed], effector[~closed], _LIGHT)
    _stamp(canvas, _CLOSED, batch[closed], effector[closed], _LIGHT)
    inner = slice(_MARGIN, _MARGIN + SIZE)
    return canvas.reshape(-1, _WIDTH, _WIDTH, 3)[:, inner, inner].copy()


def _draw(canvas: NDArray[np.uint8], shape: IntArray, places: FloatArray, colours: IntArray) -> None:
    """Draw the present objects (colour >= 0) of [B, N], the first on top."""
    for slot in reversed(range(colours.shape[1])):
        drawn = np.flatnonzero(colours[:, slot] >= 0)
        if drawn.size:
            _stamp(canvas, shape, drawn, places[drawn, slot], _RGB[colours[drawn, slot]])


def _stamp(
    canvas: NDArray[np.uint8], shape: IntArray, rows: IntArray, places: FloatArray, rgb: NDArray[np.uint8]
) -> None:
    """Draw a shape at `places` [M, 2] of pictures `rows` [M] in colours [M or 1, 3]."""
    column = np.floor((places[:, 0] + 1) * (SIZE / 2))
    row = np.floor((1 - places[:, 1]) * (SIZE / 2))
    centre = [np.clip(pixel, 0, SIZE - 1).astype(np.int64) + _MARGIN for pixel in (row, column)]
    start = (rows * _WIDTH + centre[0]) * _WIDTH + centre[1]
    canvas.reshape(-1, 3)[start[:, None] + shape] = rgb[:, None]
