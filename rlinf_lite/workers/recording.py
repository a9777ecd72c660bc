"""Records evaluation episodes from the policy's observations; nothing is rendered for it."""

from __future__ import annotations

import numpy as np

from rlinf_lite.envs import ChunkResult, Obs
from rlinf_lite.workers.messages import EpisodeVideo

MAX_SIDE = 160
"""Longest side of a frame in pixels; larger images are subsampled."""
MAX_FRAMES = 40
"""Approximate number of frames; longer episodes are subsampled."""


class EpisodeRecorder:
    """Records the first camera of the episodes 0 .. num_videos - 1; nothing if there are no images.

    `num_decisions`: the number of chunks of the longest episode.
    """

    videos: list[EpisodeVideo]

    def __init__(self, num_videos: int, num_decisions: int) -> None:
        self.videos = []
        self._num_videos = num_videos
        self._every = -(-num_decisions // MAX_FRAMES)
        self._running: dict[int, list[np.ndarray]] = {}
        self._captions: dict[int, str] = {}

    def begin(self, episodes: np.ndarray, obs: Obs) -> None:
        """Begin episodes: row i of `obs` is the first observation of episode `episodes[i]`."""
        if not obs.get("images"):
            return
        for row in np.flatnonzero(episodes < self._num_videos).tolist():
            episode = int(episodes[row])
            self._running[episode] = [_frame(obs, row)]
            self._captions[episode] = obs["instruction"][row] if obs.get("instruction") else ""

    def add(self, episodes: np.ndarray, decision: int, result: ChunkResult) -> None:
        """Add the result of chunk `decision` (counted from 1) for all rows."""
        ended = {record.env_id: record for record in result.episodes}
        final_rows, final_obs = result.final_obs or (np.empty(0, np.int64), Obs())
        for row, episode in enumerate(episodes.tolist()):
            frames = self._running.get(episode)
            if frames is None:
                continue
            if row in ended:
                frames.append(_frame(final_obs, int(np.flatnonzero(final_rows == row)[0])))
                record, shown = ended[row], np.stack(self._running.pop(episode))
                caption = self._captions[episode] or record.task_id
                steps = record.length, record.steps_to_success
                self.videos.append(EpisodeVideo(episode, caption, record.success_once, *steps, shown))
            elif decision % self._every == 0:
                frames.append(_frame(result.obs, row))


def _frame(obs: Obs, row: int) -> np.ndarray:
    """A subsampled copy of a row's image; environments may overwrite the original."""
    image = next(iter(obs["images"].values()))[row]
    every = -(-max(image.shape[:2]) // MAX_SIDE)
    return image[::every, ::every].copy()
