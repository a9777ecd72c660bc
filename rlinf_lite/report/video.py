"""Evaluation episodes side by side in one GIF: the frame's colour shows success, the caption is the instruction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlinf_lite.report.axes import counted
from rlinf_lite.workers.messages import EpisodeVideo

Colour = tuple[int, int, int]

PANEL: Colour = (23, 27, 33)
TEXT: Colour = (236, 239, 243)
SUCCESS: Colour = (31, 180, 134)  # bluish green and vermilion, which also colour-blind readers can distinguish
FAILURE: Colour = (236, 95, 44)
UNKNOWN: Colour = (130, 138, 148)

COLUMNS = 4
TILE_SIDE = 192
"""Images are enlarged by a whole factor, up to this many pixels."""
FRAME, GAP = 4, 14
CAPTION_LINES = 3
FRAME_MS, LAST_FRAME_MS = 220, 1600


def write_gif(videos: Sequence[EpisodeVideo], path: Path) -> None:
    """Write the episodes as one looping GIF, with a comment that describes it in words.

    Episodes that end earlier keep their last frame. Raises ValueError where there are none.
    """
    if not videos:
        raise ValueError(f"{path}: no episode to show")
    length = max(len(video.frames) for video in videos)
    tiles = [_Tile(video) for video in videos]
    frames = [_grid([tile.draw(t) for tile in tiles]) for t in range(length)]
    palette = _palette(frames)
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    unfinished = path.with_name(path.name + ".tmp")
    images[0].save(
        unfinished,
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=[FRAME_MS] * (length - 1) + [LAST_FRAME_MS],
        loop=0,
        comment=describe(videos).encode(),
    )
    os.replace(unfinished, path)


def describe(videos: Sequence[EpisodeVideo]) -> str:
    """Description of the episodes, with one sentence for each."""
    return " ".join(f"{video.caption}: {_outcome(video)}." for video in videos)


class _Tile:
    """One episode: its frames enlarged inside a coloured frame, over its caption."""

    def __init__(self, video: EpisodeVideo) -> None:
        self.video = video
        height, width = video.frames.shape[1:3]
        self.scale = max(1, TILE_SIDE // max(height, width))
        self.height, self.width = height * self.scale, width * self.scale
        colour = {True: SUCCESS, False: FAILURE, None: UNKNOWN}[video.success]
        width, height = self.width + 2 * FRAME, self.height + 2 * FRAME
        font_size = min(17, width // 10)
        font, line_height = ImageFont.load_default(font_size), font_size + 4
        lines = [*_wrap(video.caption, font, width, CAPTION_LINES), _outcome(video)]
        self.base = Image.new("RGB", (width, height + 2 + len(lines) * line_height), PANEL)
        draw = ImageDraw.Draw(self.base)
        draw.rectangle((0, 0, width - 1, height - 1), fill=colour)
        for i, line in enumerate(lines):
            draw.text((0, height + 2 + i * line_height), line, colour if i == len(lines) - 1 else TEXT, font)

    def draw(self, t: int) -> Image.Image:
        frame = Image.fromarray(self.video.frames[min(t, len(self.video.frames) - 1)])
        image = self.base.copy()
        image.paste(frame.resize((self.width, self.height), Image.Resampling.NEAREST), (FRAME, FRAME))
        return image


def _grid(tiles: Sequence[Image.Image]) -> Image.Image:
    width, height = max(tile.width for tile in tiles), max(tile.height for tile in tiles)
    columns = min(COLUMNS, len(tiles))
    rows = -(-len(tiles) // columns)
    grid = Image.new("RGB", (GAP + columns * (width + GAP), GAP + rows * (height + GAP)), PANEL)
    for i, tile in enumerate(tiles):
        grid.paste(tile, (GAP + i % columns * (width + GAP), GAP + i // columns * (height + GAP)))
    return grid


def _palette(frames: Sequence[Image.Image]) -> Image.Image:
    """A palette of 256 colours for all frames, so that nothing flickers, with those of borders and captions."""
    fixed = [PANEL, TEXT, SUCCESS, FAILURE, UNKNOWN]
    shown = [np.asarray(frame)[::2, ::2] for frame in (frames[0], frames[len(frames) // 2], frames[-1])]
    pixels = np.concatenate([frame.reshape(-1, 3) for frame in shown])[None]
    colours = Image.fromarray(pixels).quantize(256 - len(fixed), Image.Quantize.MEDIANCUT).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for colour in fixed for value in colour] + colours[: 3 * (256 - len(fixed))])
    return palette


def _wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int, num_lines: int) -> list[str]:
    """`text` in at most `num_lines` lines that fit into `width` pixels; an ellipsis replaces the rest."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > num_lines:
        lines = [*lines[: num_lines - 1], " ".join(lines[num_lines - 1 :])]
    for i, line in enumerate(lines):
        if font.getlength(line) > width:
            while line and font.getlength(line + "...") > width:
                line = line[:-1]
            lines[i] = line + "..."
    return lines


def _outcome(video: EpisodeVideo) -> str:
    if video.steps_to_success is not None:
        return f"success after {counted(video.steps_to_success, 'steps')}"
    outcome = {True: "success", False: "failure", None: "episode"}[video.success]
    return f"{outcome}, {counted(video.length, 'steps')}"
