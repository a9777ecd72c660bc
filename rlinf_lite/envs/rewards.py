"""Rewards that are a function of observations, in place of the environment's own: `env.train.reward`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_lite.envs.base import ChunkResult, FloatArray, Obs, put_rows
from rlinf_lite.envs.errors import StepRewardError
from rlinf_lite.envs.observations import num_rows, take_rows
from rlinf_lite.registry import STEP_REWARDS

if TYPE_CHECKING:
    from rlinf_lite.config.schema import StepRewardConfig

StepReward = Callable[[Obs], Any]
"""The rewards [B] of a batch of observations. It keeps nothing between calls, so that a resumed run is the same."""


def make_reward(settings: StepRewardConfig) -> StepReward | None:
    """The reward that a config names: a function, or an object of a class that is called with `settings`. None: the
    environment's own rewards. Raises UnknownRewardError, PartImportError, and what the class raises."""
    if settings.id is None:
        return None
    part: Any = STEP_REWARDS.get(settings.id)
    return part(settings) if isinstance(part, type) else part  # type: ignore[no-any-return]


def rewards_of(reward: StepReward, obs: Obs) -> FloatArray:
    """The rewards of a batch of observations, float32 [B].

    Raises:
        StepRewardError: if the function returns something else than B finite numbers.
    """
    found = np.asarray(reward(obs))
    batch = num_rows(obs)
    if found.shape != (batch,) or found.dtype.kind not in "biuf" or not np.isfinite(found).all():
        said = f"{found.dtype} {list(found.shape)}" if np.shape(found) != (batch,) else f"{found.tolist()!r:.200}"
        raise StepRewardError(f"env.train.reward.id: the function returned {said}. Return {batch} finite numbers")
    return found.astype(np.float32)


def judged(result: ChunkResult, reward: StepReward) -> ChunkResult:
    """A chunk's result with rewards of its own observations: at the last executed env step of each row that of the
    observation after it, which for a row whose episode ended is the final one; 0 at the other steps. Records of
    episodes keep the environment's own return and success."""
    seen = result.obs
    if result.final_obs is not None:
        rows, final = result.final_obs
        seen = take_rows(seen, np.arange(num_rows(seen)))
        put_rows(seen, rows, final)
    num_executed = result.executed.sum(axis=1)
    rows = np.flatnonzero(num_executed)
    rewards = np.zeros_like(result.rewards)
    rewards[rows, num_executed[rows] - 1] = rewards_of(reward, seen)[rows]
    return replace(result, rewards=rewards)
