"""Rewards that are a function of observations, in place of the environment's own: `env.train.reward`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_lite.envs.base import ChunkResult, FloatArray, Obs, put_rows
from rlinf_lite.envs.errors import StepRewardError
from rlinf_lite.envs.observations import num_rows, take_rows
from rlinf_lite.registry import STEP_REWARDS

if TYPE_CHECKING:
    from rlinf_lite.config.schema import StepRewardConfig


class ObservedReward:
    """The reward that a config names: `pkg.module:function`, called with a batch of observations, or a class, whose
    object is built with `env.train.reward` and then called so. It keeps nothing between chunks, so that a resumed run
    is the same."""

    def __init__(self, settings: StepRewardConfig) -> None:
        """Raises UnknownRewardError, PartImportError, and what the class raises."""
        part: Any = STEP_REWARDS.get(str(settings.id))
        self._function = part(settings) if isinstance(part, type) else part
        self._relative = settings.relative

    def of(self, obs: Obs) -> FloatArray:
        """The function's values, float32 [B].

        Raises:
            StepRewardError: if it returns something else than B finite numbers.
        """
        found, batch = np.asarray(self._function(obs)), num_rows(obs)
        if found.shape != (batch,):
            said = f"{found.dtype} {list(found.shape)}"
        elif found.dtype.kind not in "biuf" or not (np.abs(found) <= np.finfo(np.float32).max).all():  # or NaN
            said = f"{found.tolist()!r:.200}"
        else:
            return found.astype(np.float32)
        raise StepRewardError(f"env.train.reward.id: the function returned {said}. Return {batch} finite numbers")

    def before(self, obs: Obs) -> FloatArray:
        """The value of the observation before a chunk, which is subtracted from that after it, or 0; float32 [B]."""
        return self.of(obs) if self._relative else np.zeros(num_rows(obs), np.float32)

    def judged(self, result: ChunkResult, before: FloatArray) -> ChunkResult:
        """A chunk's result with these rewards: at the last executed env step of each row by the observation after it,
        which for a row whose episode ended is the final one; 0 at the other steps. Records of episodes keep the
        environment's own return and success."""
        seen = result.obs
        if result.final_obs is not None:
            rows, final = result.final_obs
            seen = take_rows(seen, np.arange(num_rows(seen)))
            put_rows(seen, rows, final)
        num_executed = result.executed.sum(axis=1)
        rows = np.flatnonzero(num_executed)
        rewards = np.zeros_like(result.rewards)
        rewards[rows, num_executed[rows] - 1] = (self.of(seen) - before)[rows]
        return replace(result, rewards=rewards)
