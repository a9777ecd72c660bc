"""Messages between workers, and from workers to the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class StepResult:
    """What came of one chunk in some rows: each array [B, C]; `final_obs` are the last observations of `final_rows`."""

    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    executed: np.ndarray
    final_rows: np.ndarray
    final_obs: dict[str, Any] | None


@dataclass
class ObsMessage:
    """env -> rollout: the observations that decision `t` needs, and the result of decision t - 1.

    `noise_ids` and `decision` key the sampling noise. With `last` no action is wanted any more.
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
    """rollout -> env: actions float32 [B, C, D] of the rows of `stage` from `start` on."""

    stage: int
    start: int
    actions: np.ndarray


@dataclass
class EpisodeVideo:
    """env -> driver: what the policy saw of one evaluation episode, at its start and at the ends of its chunks."""

    episode: int
    caption: str
    """The instruction, or the task where there is none."""
    success: bool | None
    """Success at any step; None where the environment has no notion of success."""
    length: int
    """Env steps."""
    steps_to_success: int | None
    """Env steps until the first success; None without one."""
    frames: np.ndarray
    """uint8 [T, H, W, 3] of the first camera."""
