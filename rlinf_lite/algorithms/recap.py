"""RECAP's advantages of logged episodes (arXiv:2511.14759): from returns in env steps to a label of each frame.

The reward is -1 at each env step, 0 at the last one of a success and -`failure_cost` at the last one of a failure. All
of it is divided by the longest possible return of the task: that of a failure as long as the task's longest episode.
Returns are so in [-1, 0].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LoggedEpisodes:
    """E episodes of F frames in all, in the order of their frames."""

    lengths: NDArray[np.int64]
    """Frames of each episode, [E]."""
    successes: NDArray[np.bool_]
    """[E]."""
    tasks: NDArray[np.int64]
    """Number of each episode's task, [E]."""
    played: NDArray[np.bool_]
    """False: an expert's demonstration, all of whose frames are positive; [E]."""

    @property
    def steps_left(self) -> NDArray[np.int64]:
        """Env steps from each frame to the last one of its episode, [F]."""
        ends = np.cumsum(self.lengths)
        return self.of_frames(ends) - 1 - np.arange(ends[-1])

    def of_frames(self, x: NDArray) -> NDArray:
        """Values [E] of episodes as values [F] of their frames."""
        return np.repeat(x, self.lengths)


def longest_returns(episodes: LoggedEpisodes, failure_cost: float) -> NDArray[np.float64]:
    """What rewards are divided by, in env steps, [E]: one less than the task's longest episode, plus the cost of a
    failure; at least 1."""
    longest = np.zeros(episodes.tasks.max() + 1)
    np.maximum.at(longest, episodes.tasks, episodes.lengths - 1.0)
    return np.maximum(longest[episodes.tasks] + failure_cost, 1.0)


def normalised_returns(episodes: LoggedEpisodes, failure_cost: float) -> NDArray[np.float64]:
    """The return from each frame to the end of its episode, [F], in [-1, 0]."""
    at_end = np.where(episodes.successes, 0.0, failure_cost)
    scale = longest_returns(episodes, failure_cost)
    return -(episodes.steps_left + episodes.of_frames(at_end)) / episodes.of_frames(scale)


def logged_advantages(
    values: NDArray[np.floating], episodes: LoggedEpisodes, failure_cost: float, horizon: int
) -> NDArray[np.float32]:
    """Advantages [F] of what was done in the `horizon` env steps from each frame: their rewards, plus the value of the
    frame after them, minus the frame's own. Where the episode ends before, its return in place of the first two.

    `values` [F]: the value network's, in [-1, 0].
    """
    scale = episodes.of_frames(longest_returns(episodes, failure_cost))
    after = np.minimum(np.arange(len(values)) + horizon, len(values) - 1)
    goes_on = episodes.steps_left >= horizon
    found = np.where(goes_on, values[after] - horizon / scale, normalised_returns(episodes, failure_cost)) - values
    return found.astype(np.float32)


def positive_frames(
    advantages: NDArray[np.float32], episodes: LoggedEpisodes, positive_share: float
) -> NDArray[np.bool_]:
    """The frames that are labelled positive, [F]: all demonstrated ones, and of each task the `positive_share` of its
    played frames whose advantages [F] are the largest; of equal ones the earlier."""
    found = episodes.of_frames(~episodes.played)
    tasks = np.where(episodes.of_frames(episodes.played), episodes.of_frames(episodes.tasks), -1)
    for task in range(episodes.tasks.max() + 1):
        rows = np.flatnonzero(tasks == task)
        best = np.argsort(-advantages[rows], kind="stable")[: round(positive_share * len(rows))]
        found[rows[best]] = True
    return found
