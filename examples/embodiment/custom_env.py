"""A custom environment in one file: a puck on a damped table, pushed to a goal.

Train on it with any embodied config, by naming its card or, once this module is imported, its registered name:

    python examples/embodiment/train_embodied_agent.py --config-name gym_pendulum_ppo_mlp \\
        env.id=examples.embodiment.custom_env:PuckPush env.task=PuckPush env.options.damping=0.4

The environment is an ordinary gymnasium.Env; rlinf_lite.envs.ChunkedEnv adds time limits, auto-reset, chunks, seeds and
success rates. Its card lists its options and tasks, so that configs are checked before an environment is built:
`env.options.dampling=0.4` is answered by "Did you mean env.options.damping?".
`python examples/embodiment/custom_env.py` checks the environment against the protocol.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import gymnasium
import numpy as np

from rlinf_lite.cards import EnvCard, NonNegativeFloat, PositiveFloat, Section, Task
from rlinf_lite.config import EnvConfig
from rlinf_lite.envs import check_env, register_env

TIME_STEP_S = 0.05
MAX_FORCE_N = 1.0
GOAL_RADIUS_M = 0.1


class PuckEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """A puck on a table. Action: force on the puck [2], in newtons. Observation [6]: position, velocity, and the goal
    relative to the puck."""

    instruction = "push the puck to the goal"

    def __init__(self, reach: float, mass: float, damping: float) -> None:
        self.reach, self.mass, self.damping = reach, mass, damping
        self.action_space = gymnasium.spaces.Box(-MAX_FORCE_N, MAX_FORCE_N, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (6,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-1.0, 1.0, 2)
        self.goal = self.reach * self.np_random.uniform(-1.0, 1.0, 2)
        self.velocity = np.zeros(2)
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.velocity = self.velocity + TIME_STEP_S * (action - self.damping * self.velocity) / self.mass
        self.position = np.clip(self.position + TIME_STEP_S * self.velocity, -2.0, 2.0)
        distance = float(np.linalg.norm(self.goal - self.position))
        success = distance < GOAL_RADIUS_M and np.linalg.norm(self.velocity) < 0.2
        reward = -distance - 0.01 * float(action @ action) + (1.0 if success else 0.0)
        return self._observation(), reward, bool(success), False, {"success": bool(success)}

    def _observation(self) -> np.ndarray:
        return np.concatenate([self.position, self.velocity, self.goal - self.position]).astype(np.float32)


@register_env("puck_push")
class PuckPush(EnvCard):
    """The environment's card, which configs, checks, --dry-run and docs read."""

    class Options(Section):
        mass: PositiveFloat = 0.5
        """Mass of the puck, in kilograms."""
        damping: NonNegativeFloat = 0.5
        """Force of the table on a puck at 1 m/s, in newtons."""

    tasks = {"PuckPush": Task(max_episode_steps=100, state_dim=6, action_dim=2), "PuckHome": Task(60, 6, 2)}

    def make(self, num_envs: int, cfg: EnvConfig, split: Literal["train", "eval"]) -> PuckEnv:
        """One environment; rlinf_lite makes `num_envs` of them."""
        env = PuckEnv(1.0 if cfg.task == "PuckPush" else 0.0, cfg.options.mass, cfg.options.damping)
        limit = self.tasks[cfg.task].max_episode_steps
        env.spec = gymnasium.envs.registration.EnvSpec(cfg.task, max_episode_steps=limit)
        return env


if __name__ == "__main__":
    problems = check_env(PuckPush)
    print("\n".join(problems) or "puck_push keeps the environment protocol")
    sys.exit(1 if problems else 0)
