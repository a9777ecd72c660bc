"""A toy simulator: a point moves by its action; the episode's events are read off the seed."""

from __future__ import annotations

import numpy as np

from rlinf_lite.config import EnvConfig
from rlinf_lite.envs.base import FloatArray, IntArray, Obs
from rlinf_lite.envs.simulator import StepOutputs


class ToySimulator:
    """State: [position, clock]. Succeeds and terminates while position > goal; start and goal come from the seed."""

    task_id = "toy"
    max_episode_steps: int | None = None

    def __init__(self, num_envs: int, own_limit: int | None = None) -> None:
        self.num_envs = num_envs
        self.own_limit = own_limit
        self.action_low, self.action_high = -np.ones(1, np.float32), np.ones(1, np.float32)
        self.position, self.goal = np.zeros(num_envs), np.zeros(num_envs)
        self.clock = np.zeros(num_envs, np.int64)
        self.num_observed = 0

    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            rng = np.random.default_rng(seed)
            self.position[row], self.goal[row], self.clock[row] = rng.normal(), rng.uniform(1.0, 4.0), 0

    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        self.position[rows] += actions[rows, 0]
        self.clock[rows] += 1
        success = self.position[rows] > self.goal[rows]
        out.reward[rows] = -np.abs(self.goal[rows] - self.position[rows])
        out.terminated[rows] = success
        out.truncated[rows] = False if self.own_limit is None else self.clock[rows] >= self.own_limit
        out.success[rows] = success

    def observe(self, rows: IntArray) -> Obs:
        self.num_observed += len(rows)
        state = np.stack([self.position[rows], self.clock[rows], self.goal[rows]], 1).astype(np.float32)
        return {"state": state, "instruction": [f"reach {goal:.2f}" for goal in self.goal[rows]]}

    def close(self) -> None:
        pass


def make_env(num_envs: int, cfg: EnvConfig) -> ToySimulator:
    return ToySimulator(num_envs)
