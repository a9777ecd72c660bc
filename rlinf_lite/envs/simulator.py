"""The protocol `Simulator`: all that an adapter has to provide for `ChunkedEnv`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from rlinf_lite.envs.base import BoolArray, FloatArray, IntArray, Obs


@dataclass(slots=True)
class StepOutputs:
    """Arrays into which a simulator writes the results of a step. Rows that were not stepped are not read."""

    reward: FloatArray  # [B]
    terminated: BoolArray  # [B]
    truncated: BoolArray  # [B], only for limits that the simulator keeps itself
    success: FloatArray  # [B], 1 or 0; -1: not reported

    @classmethod
    def empty(cls, num_envs: int) -> StepOutputs:
        return cls(
            reward=np.zeros(num_envs, np.float32),
            terminated=np.zeros(num_envs, np.bool_),
            truncated=np.zeros(num_envs, np.bool_),
            success=np.full(num_envs, -1, np.float32),
        )


@runtime_checkable
class Simulator(Protocol):
    """B rows that can be reset, stepped and observed by row. Episodes are kept by `ChunkedEnv`.

    A simulator may also step rows that it was not asked to step, as one batched simulation does; their results are
    ignored. The first reset is always of all rows. Stepping a row past its termination must be possible
    (ignore_terminations). A row's state after `reset` is a function of its seed alone.

    Optional:
    * `task_ids`, a list of B strings that `reset` keeps up to date, if rows play different tasks;
    * `reports_success`, read after the first reset: True if every step reports whether the task is solved, and steps
      after a termination are meaningful. Evaluations then play on by default (ignore_terminations: null);
    * `state_key(column)`, the name of a column of the state, for messages;
    * `state_names` and `action_names`, see `VecEnv`;
    * `expert_actions`, see `Demonstrator`.

    A simulator that steps its rows in turn raises `RowError(row)` from the error of one of them.
    """

    num_envs: int
    task_id: str
    action_low: FloatArray  # [D]
    action_high: FloatArray  # [D]
    max_episode_steps: int | None
    """The task's own time limit in env steps; None: it has none."""

    def reset(self, rows: IntArray, seeds: list[int]) -> None: ...

    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        """Step `rows` with actions [B, D] (of all rows, clipped to the bounds) and fill these rows of `out`."""
        ...

    def observe(self, rows: IntArray) -> Obs:
        """Observations of `rows`, in that order, in arrays that the caller may keep."""
        ...

    def close(self) -> None: ...
