"""RECAP's returns, advantages and labels against a loop over episodes."""

import numpy as np
import pytest

from rlinf_lite.algorithms.recap import (
    LoggedEpisodes,
    logged_advantages,
    longest_returns,
    normalised_returns,
    positive_frames,
)

EPISODES = LoggedEpisodes(
    lengths=np.array([7, 3, 12, 1, 5, 9, 4]),
    successes=np.array([True, True, False, True, False, True, True]),
    tasks=np.array([0, 1, 0, 1, 1, 0, 1]),
    played=np.array([True, True, True, True, True, True, False]),
)
VALUES = -np.random.default_rng(0).random(41).astype(np.float32)


def looped(cost, horizon):
    """Returns and advantages of all frames, reward by reward."""
    returns, advantages, first = [], [], 0
    for length, success, task in zip(EPISODES.lengths, EPISODES.successes, EPISODES.tasks, strict=True):
        others = [other for other, of in zip(EPISODES.lengths, EPISODES.tasks, strict=True) if of == task]
        scale = max(others) - 1 + cost
        rewards = [-1 / scale] * (length - 1) + [0 if success else -cost / scale]
        for t in range(length):
            returns.append(sum(rewards[t:]))
            ahead = sum(rewards[t : t + horizon])
            if t + horizon < length:
                ahead += VALUES[first + t + horizon]
            advantages.append(ahead - VALUES[first + t])
        first += length
    return returns, advantages


@pytest.mark.parametrize("cost", [3.0, 20.0])
@pytest.mark.parametrize("horizon", [1, 4, 50])
def test_returns_and_advantages_are_those_of_a_loop(cost, horizon):
    returns, advantages = looped(cost, horizon)
    found = normalised_returns(EPISODES, cost)
    np.testing.assert_allclose(found, returns, atol=1e-12)
    assert found.min() == -1 and found.max() == 0, "a failure as long as the longest episode, and a success's end"
    np.testing.assert_allclose(logged_advantages(VALUES, EPISODES, cost, horizon), advantages, atol=1e-6)


def test_episodes_of_one_frame_without_a_cost_are_divided_by_1():
    alone = LoggedEpisodes(np.array([1]), np.array([False]), np.array([0]), np.array([True]))
    assert longest_returns(alone, 0).tolist() == [1] and normalised_returns(alone, 0).tolist() == [0]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_of_each_task_the_best_played_frames_are_positive_and_all_demonstrated_ones(share):
    advantages = logged_advantages(VALUES, EPISODES, 20, 4)
    tasks = np.repeat(EPISODES.tasks, EPISODES.lengths)
    found = positive_frames(advantages, EPISODES, share)
    for task in (0, 1):
        rows = [i for i in range(41) if tasks[i] == task and i < 37]  # the last four are demonstrated
        best = sorted(rows, key=lambda i: -advantages[i])[: round(share * len(rows))]
        assert sorted(best) == [i for i in rows if found[i]]
    assert found[37:].all()
