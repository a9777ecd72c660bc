"""Beginning of an episode as a function of its seed: task, colours, positions and sentence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from rlinf_lite.envs.base import BoolArray, FloatArray, IntArray
from rlinf_lite.envs.seeding import seeded_uniforms
from rlinf_lite.envs.tabletop.card import TabletopOptions
from rlinf_lite.envs.tabletop.language import COLOURS, FAMILIES, HELD_OUT, PICK, PLACE, PUSH, sentence
from rlinf_lite.envs.tabletop.physics import NUM_BLOCKS, NUM_SQUARES, RIM, Scene

GRID = 4
_CENTRES = ((np.arange(GRID) + 0.5) * 2 / GRID - 1).astype(np.float32)
CELLS = np.stack(np.meshgrid(_CENTRES, _CENTRES, indexing="ij"), axis=-1).reshape(-1, 2)  # [16, 2], x first
JITTER = 0.08
START_JITTER = 0.06
_CLEAR = 0.45  # distance of other cells from the way of a push: contact or tolerance, plus the jitter of all objects
_FAR = np.float32(9)
_BLOCKS = np.array([(1, NUM_BLOCKS), (1, 2), (2, NUM_BLOCKS)])  # fewest and most blocks, by family
_NUM_DRAWS = 26
_OTHER_SENTENCE = 0x5EED


def draw(
    seeds: Sequence[int], families: tuple[int, ...], pairs: str, options: TabletopOptions
) -> tuple[Scene, list[str], list[str]]:
    """Beginnings of episodes, one per seed: their scene, sentences and task ids.

    `pairs`: colours that each family may name: train (all but the held-out one), held_out (only that one), all.
    Shuffled instructions come from other, unrelated seeds.
    """
    scene, sentences = _draw(seeds, families, pairs, options)
    if options.shuffle_instructions:
        _, sentences = _draw([seed ^ _OTHER_SENTENCE for seed in seeds], families, pairs, options)
    names = zip(scene.family.tolist(), scene.block_colours[:, 0].tolist(), strict=True)
    return scene, sentences, [f"{FAMILIES[family]}_{COLOURS[colour]}" for family, colour in names]


def _draw(
    seeds: Sequence[int], families: tuple[int, ...], pairs: str, options: TabletopOptions
) -> tuple[Scene, list[str]]:
    u = seeded_uniforms(seeds, _NUM_DRAWS)  # [B, 26]
    scene = Scene.empty(len(u))
    scene.family = np.array(families)[_index(u[:, 0], len(families))]
    allowed, counts = _allowed(pairs)
    order = u[:, 2:8].copy()
    order[np.arange(len(u)), allowed[scene.family, _index(u[:, 1], counts[scene.family])]] = -1
    colours = np.argsort(order, axis=1)  # all six in random order; the first is one that the family may name
    sides = np.where(u[:, 8] < 0.5, -1, 1)
    scene.side = np.where(scene.family == PLACE, sides, 0).astype(np.float32)
    scene.effector = ((2 * u[:, 9:11] - 1) * START_JITTER).astype(np.float32)

    cells = np.zeros((len(u), NUM_BLOCKS + NUM_SQUARES), np.int64)  # cells of absent objects have no meaning
    for family, side in ((PICK, 0), (PUSH, 0), (PLACE, -1), (PLACE, 1)):
        rows = np.flatnonzero((scene.family == family) & ((sides == side) | (side == 0)))
        if rows.size:
            table = _layout_table(family, side)
            cells[rows] = table[_index(u[rows, 11], len(table))]
    places = CELLS[cells]  # [B, 5, 2]
    places += ((2 * u[:, 12:22].reshape(-1, NUM_BLOCKS + NUM_SQUARES, 2) - 1) * JITTER).astype(np.float32)
    pushing = (scene.family == PUSH)[:, None]
    blocks = places[:, :NUM_BLOCKS]
    blocks = np.where(pushing[..., None], np.clip(blocks, -RIM, RIM), blocks)
    fewest, most = (np.clip(count, *_BLOCKS[scene.family].T) for count in options.num_blocks)
    there = np.arange(NUM_BLOCKS) < (fewest + _index(u[:, 22], most - fewest + 1))[:, None]
    scene.blocks = np.where(there[..., None], blocks, _FAR)
    scene.block_colours = np.where(there, colours[:, :NUM_BLOCKS], -1)
    scene.squares = np.where(pushing[..., None], places[:, NUM_BLOCKS:], _FAR)
    scene.square_colours = np.where(pushing, colours[:, NUM_BLOCKS : NUM_BLOCKS + NUM_SQUARES], -1)

    others = np.where(scene.family == PUSH, scene.square_colours[:, 0], scene.block_colours[:, 1])
    columns = (scene.family, _index(u[:, 23], options.num_wordings), scene.block_colours[:, 0], others, sides)
    words = zip(*(column.tolist() for column in columns), strict=True)
    return scene, [sentence(*one) for one in words]


def _index(u: np.ndarray, count: int | IntArray) -> IntArray:
    """Uniform numbers in [0, 1) as indices below `count`."""
    return np.asarray(u * count, np.int64)


@lru_cache
def _allowed(pairs: str) -> tuple[IntArray, IntArray]:
    """Colours that each family may name, padded to [3, 6], and their number."""
    listed = []
    for family in FAMILIES:
        held_out = COLOURS.index(HELD_OUT[family])
        trained = [colour for colour in range(len(COLOURS)) if colour != held_out]
        listed.append({"train": trained, "held_out": [held_out], "all": [*trained, held_out]}[pairs])
    padded = np.array([colours + [0] * (len(COLOURS) - len(colours)) for colours in listed])
    return padded, np.array([len(colours) for colours in listed])


@lru_cache
def _layout_table(family: int, side: int) -> IntArray:
    """All layouts from which a family can be played, as cells of 3 blocks and 2 squares, [L, 5]."""
    if family == PUSH:
        tuples = _distinct(4)
        clear = np.ones(len(tuples), np.bool_)
        # the way must be clear for every pair, so that the scene does not reveal which pair is named
        for block, square in ((0, 2), (0, 3), (1, 2), (1, 3)):
            clear &= _way_is_clear(CELLS[tuples], block, square)
        tuples = tuples[clear]
        return tuples[:, [0, 1, 0, 2, 3]]
    tuples = _distinct(3)
    if family == PLACE:
        target, reference, third = (tuples[:, i] for i in range(3))
        goal = reference + side * GRID
        tuples = tuples[(goal >= 0) & (goal < GRID * GRID) & (target != goal) & (third != goal)]
    return tuples[:, [0, 1, 2, 0, 0]]


def _distinct(count: int) -> IntArray:
    """All ordered choices of `count` different cells."""
    grid = np.indices((GRID * GRID,) * count).reshape(count, -1).T
    in_order = np.sort(grid, axis=1)
    return grid[(in_order[:, 1:] != in_order[:, :-1]).all(axis=1)]


def _way_is_clear(points: FloatArray, block: int, square: int) -> BoolArray:
    """Whether no other object is near the straight way of a block to a square, [L]; points [L, 4, 2]."""
    start, stop = points[:, block], points[:, square]
    way = stop - start
    clear = np.ones(len(points), np.bool_)
    for other in set(range(4)) - {block, square}:
        to_other = points[:, other] - start
        along = np.clip((to_other * way).sum(-1) / (way * way).sum(-1), 0, 1)
        nearest = to_other - along[:, None] * way
        clear &= np.hypot(nearest[:, 0], nearest[:, 1]) > _CLEAR
    return clear
