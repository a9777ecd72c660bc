"""The order in which environments play the episodes of evaluations and demonstrations."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf_lite.envs import balanced_seed, episode_order, episode_seed


@pytest.mark.parametrize(
    ("num_episodes", "num_envs", "num_scenes"),
    [(500, 2, 10), (500, 10, 10), (7, 5, 1), (50, 3, 10), (23, 4, 5), (3, 8, 10)],
)
def test_every_episode_is_played_once_and_rows_keep_their_scene(
    num_episodes: int, num_envs: int, num_scenes: int
) -> None:
    waves = episode_order(num_episodes, num_envs, num_scenes)
    assert waves.shape == (-(-num_episodes // num_envs), num_envs)
    assert sorted(waves[waves < num_episodes]) == list(range(num_episodes)) and len(np.unique(waves)) == waves.size
    built = [len(np.unique(row[row < num_episodes] % num_scenes)) for row in waves.T]
    changes = [np.count_nonzero(np.diff(row[row < num_episodes] % num_scenes)) for row in waves.T]
    assert changes == [max(number - 1, 0) for number in built], "no row goes back to a scene that it had"
    assert sum(built) <= num_scenes + num_envs
    assert waves[:-1].max(initial=0) < num_episodes, "no row waits for others before the last wave"


def test_one_scene_is_played_in_order() -> None:
    assert episode_order(6, 4, 1).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert episode_order(8, 4, 2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert episode_order(6, 2, 3).tolist() == [[0, 4], [3, 2], [1, 5]]
    assert episode_order(7, 2, 3).tolist() == [[0, 4], [3, 2], [6, 5], [1, 7]]


@pytest.mark.parametrize("num_scenes", [1, 3, 10])
def test_later_episodes_of_a_row_play_the_scene_of_the_first(num_scenes: int) -> None:
    firsts = [balanced_seed(5, row, num_scenes) for row in range(20)]
    assert [first % num_scenes for first in firsts] == [row % num_scenes for row in range(20)]
    seeds = np.array([[episode_seed(first, k, num_scenes) for k in range(200)] for first in firsts])
    assert (seeds % num_scenes == np.array(firsts)[:, None] % num_scenes).all()
    assert len(np.unique(seeds)) == seeds.size and seeds.min() >= 0 and seeds.max() < 1 << 31
    plain = np.array([[episode_seed(first, k) for k in range(200)] for first in firsts])
    assert np.abs(seeds - plain).max() < 2 * num_scenes
