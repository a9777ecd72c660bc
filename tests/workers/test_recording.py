"""Evaluation episodes are recorded as the policy saw them."""

import numpy as np

from rlinf_lite.envs import ChunkedEnv
from rlinf_lite.workers.recording import MAX_FRAMES, MAX_SIDE, EpisodeRecorder
from tests.envs.toy import ToySimulator

CHUNK = 4


class ToyWithCamera(ToySimulator):
    """The image's grey level is the clock; it is written over at every observation."""

    def __init__(self, num_envs: int, side: int = 8) -> None:
        super().__init__(num_envs)
        self.image = np.zeros((num_envs, side, side, 3), np.uint8)

    def observe(self, rows):
        self.image[rows] = self.clock[rows, None, None, None]
        shown = self.image if len(rows) == self.num_envs else self.image[rows]
        return {**super().observe(rows), "images": {"front": shown}}


def record(simulator: ToySimulator, num_videos: int, limit: int = 20, **settings):
    """Plays one episode per row, moving by `seed % 2`: rows of even seeds never arrive."""
    env = ChunkedEnv(simulator, auto_reset=False, max_episode_steps=limit, **settings)
    episodes = np.arange(simulator.num_envs)
    recorder = EpisodeRecorder(num_videos, -(-limit // CHUNK))
    recorder.begin(episodes, env.reset(list(range(simulator.num_envs))))
    actions = np.zeros((simulator.num_envs, CHUNK, 1), np.float32)
    actions[1::2] = 1.0
    for decision in range(1, -(-limit // CHUNK) + 1):
        recorder.add(episodes, decision, env.chunk_step(actions))
    return sorted(recorder.videos, key=lambda video: video.episode)


def test_frames_at_the_start_the_ends_of_chunks_and_the_end_of_the_episode():
    failed, succeeded = record(ToyWithCamera(4), num_videos=2)
    assert [frame[0, 0, 0] for frame in failed.frames] == [0, 4, 8, 12, 16, 20]
    assert (failed.success, failed.length, failed.episode) == (False, 20, 0)
    assert failed.caption.startswith("reach ")
    assert (succeeded.success, succeeded.episode) == (True, 1)
    clocks = [int(frame[0, 0, 0]) for frame in succeeded.frames]
    assert clocks == [*range(0, succeeded.length, CHUNK), succeeded.length]


def test_after_success_the_episode_is_shown_to_its_end_where_it_is_played_on():
    _, succeeded = record(ToyWithCamera(2), num_videos=2, ignore_terminations=True)
    assert succeeded.success and len(succeeded.frames) == 6


def test_large_images_and_long_episodes_are_thinned():
    (video,) = record(ToyWithCamera(1, side=400), num_videos=1, limit=200 * CHUNK)
    assert len(video.frames) <= MAX_FRAMES + 2
    assert max(video.frames.shape[1:3]) <= MAX_SIDE


def test_without_images_or_videos_nothing_is_kept():
    assert record(ToySimulator(2), num_videos=2) == []
    assert record(ToyWithCamera(2), num_videos=0) == []
