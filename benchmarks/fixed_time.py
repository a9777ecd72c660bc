"""An environment and a policy that take a fixed time per row and compute next to nothing, for `pipeline_bench.py`.

They wait rather than work, so that two cores are enough to run them side by side, and the time of whatever is done
around them shows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rlinf_lite.envs import Obs, Simulator, StepOutputs, register_env
from rlinf_lite.envs.base import FloatArray, IntArray
from rlinf_lite.models import ActionOutput, Mode, register_policy
from rlinf_lite.models.mlp.card import MLP, MLPOptions
from rlinf_lite.models.mlp.policy import MLPGaussianPolicy

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig
    from rlinf_lite.config.schema import ModelConfig
    from rlinf_lite.envs import EnvSpec


class FixedTimeSimulator:
    """`row_s` seconds per row and step."""

    task_id = "fixed_time"
    max_episode_steps: int | None = 1_000_000

    def __init__(self, num_envs: int, row_s: float) -> None:
        self.num_envs, self.row_s = num_envs, row_s
        self._state = np.zeros((num_envs, 4), np.float32)
        self.action_low, self.action_high = -np.ones(2, np.float32), np.ones(2, np.float32)

    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        self._state[rows] = np.array(seeds, np.float32)[:, None] * 2.0**-31

    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        time.sleep(self.row_s * len(rows))

    def observe(self, rows: IntArray) -> Obs:
        return {"state": self._state[rows], "instruction": [""] * len(rows)}

    def close(self) -> None:
        pass


@register_env("fixed_time")
def make_env(num_envs: int, cfg: EnvConfig) -> Simulator:
    return FixedTimeSimulator(num_envs, cfg.options["row_s"])


class FixedTimeOptions(MLPOptions):
    row_s: float = 0.0
    """Seconds per row."""


class FixedTimeCard(MLP):
    Options = FixedTimeOptions


@register_policy("fixed_time")
class FixedTimePolicy(MLPGaussianPolicy):
    """A small MLP whose answers come `row_s` seconds per row after the question."""

    card = FixedTimeCard
    row_s: float

    @classmethod
    def from_config(cls, cfg: ModelConfig, spec: EnvSpec) -> Self:
        policy = super().from_config(cfg, spec)
        policy.row_s = cfg.options.row_s
        return policy

    def predict_action_batch(self, obs: Mapping[str, Any], mode: Mode = "train") -> ActionOutput:
        start = time.perf_counter()
        output = super().predict_action_batch(obs, mode)
        time.sleep(max(start + self.row_s * len(obs["state"]) - time.perf_counter(), 0.0))
        return output
