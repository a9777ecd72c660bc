"""The messages between workers, and from workers to the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class StepResult:
    """The result of one chunk in B rows; arrays are [B, C]. `final_obs`: the last observations of the episodes that
    ended, in the rows `final_rows`. `success` int8 [B]: 1 or 0 where an episode ended with or without success, -1
    elsewhere, and where the environment knows neither."""

    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    executed: np.ndarray
    success: np.ndarray
    final_rows: np.ndarray
    final_obs: dict[str, Any] | None


@dataclass
class ObsMessage:
    """env -> rollout: the observations for decision `t`, and the result of decision t - 1.

    `noise_ids` and `decision` are the keys of the sampling noise. `last`: the message needs no answer.
    """

    stage: int
    start: int
    t: int
    obs: dict[str, Any]
    noise_ids: np.ndarray
    decision: int
    result: StepResult | None = None
    last: bool = False


@dataclass
class ActionMessage:
    """rollout -> env: actions float32 [B, C, D] for the rows of `stage` from `start` on."""

    stage: int
    start: int
    actions: np.ndarray


@dataclass
class EpisodeVideo:
    """env -> driver: pictures of one evaluation episode as the policy saw them, at its start and after its chunks."""

    episode: int
    caption: str
    """The instruction, or the task if there is none."""
    success: bool | None
    """Success at any step; None if the environment does not define success."""
    length: int
    """Length in env steps."""
    steps_to_success: int | None
    """Env steps until the first success; None if there was none."""
    frames: np.ndarray
    """uint8 [T, H, W, 3] of the first camera."""
