"""Episode GIFs: frames, outcome and caption of every episode."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from rlinf_lite.report.video import FAILURE, FRAME, GAP, SUCCESS, UNKNOWN, describe, write_gif
from rlinf_lite.workers.messages import EpisodeVideo


def video(episode: int, success: bool | None, num_frames: int = 3, side: int = 64) -> EpisodeVideo:
    """Frame t is uniformly grey of level 40 t + episode's."""
    levels = 40 * np.arange(num_frames, dtype=np.uint8)[:, None, None, None] + np.uint8(episode)
    frames = np.broadcast_to(levels, (num_frames, side, side, 3)).copy()
    return EpisodeVideo(
        episode, f"pick up the red block {episode}", success, 10 * num_frames, 8 if success else None, frames
    )


def test_tiles_are_framed_by_success_and_enlarged(tmp_path):
    write_gif([video(0, True), video(1, False), video(2, None)], tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as gif:
        picture = gif.convert("RGB")
        assert gif.n_frames == 3 and gif.info["loop"] == 0
    width = 3 * 64 + 2 * FRAME + GAP
    frames = np.array([picture.getpixel((GAP + i * width, GAP)) for i in range(3)])
    assert np.abs(frames - [SUCCESS, FAILURE, UNKNOWN]).max() <= 4
    assert picture.width == GAP + 3 * width


def test_one_step_is_no_steps() -> None:
    shown = EpisodeVideo(0, "push", True, 1, 1, np.zeros((2, 8, 8, 3), np.uint8))
    assert describe([shown, replace(shown, success=False, steps_to_success=None)]) == (
        "push: success after 1 step. push: failure, 1 step."
    )
    assert describe([replace(shown, steps_to_success=2)]) == "push: success after 2 steps."


def test_an_episode_that_ended_stands_still(tmp_path):
    write_gif([video(0, True, num_frames=2), video(0, False, num_frames=5)], tmp_path / "a.gif")
    inside, beside = GAP + FRAME + 5, 2 * GAP + 3 * FRAME + 3 * 64 + 5
    with Image.open(tmp_path / "a.gif") as gif:
        shown = []
        for t in range(gif.n_frames):
            gif.seek(t)
            picture = gif.convert("RGB")
            shown.append([picture.getpixel((x, inside))[0] for x in (inside, beside)])
        assert gif.info["duration"] > 1000  # the end is shown for longer
    assert np.abs(np.array(shown) - [[0, 0], [40, 40], [40, 80], [40, 120], [40, 160]]).max() <= 4


def test_the_comment_says_what_it_shows(tmp_path):
    write_gif([video(0, True), video(1, False)], tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as gif:
        comment = gif.info["comment"].decode()
    assert comment == ("pick up the red block 0: success after 8 steps. pick up the red block 1: failure, 30 steps.")


def test_more_episodes_than_columns_and_large_images(tmp_path):
    write_gif([video(i, True, side=160) for i in range(9)], tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.width == GAP + 4 * (160 + 2 * FRAME + GAP)
        assert gif.height > 3 * 160


def test_no_episodes_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no episode"):
        write_gif([], tmp_path / "a.gif")
