"""Environments with one mistake each, for check_env."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class Good(gymnasium.Env[Any, Any]):
    """A point in the plane; ten steps."""

    observation_space: Any = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space: Any = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self) -> None:
        self.spec = gymnasium.envs.registration.EnvSpec("Point", max_episode_steps=10)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.position = self.np_random.normal(size=3)
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.position = self.position + 0.1 * action.sum()
        return self.observe(), self.reward(), False, False, {}

    def observe(self) -> Any:
        return self.position.astype(np.float32)

    def reward(self) -> Any:
        return 1.0


class WrongShape(Good):
    def observe(self) -> Any:
        return np.zeros((1, 3), np.float32)


class NotFinite(Good):
    def observe(self) -> Any:
        return np.array([0.0, np.nan, 0.0], np.float32)


class TooLarge(Good):
    def observe(self) -> Any:
        return np.array([0.0, -1e300, 0.0])


class OldStep(Good):
    def step(self, action: Any) -> Any:
        return self.observe(), 1.0, False, {}


class OldReset(Good):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class NoActionSpace(gymnasium.Env[Any, Any]):
    observation_space: Any = Good.observation_space


class FloatImage(Good):
    observation_space = gymnasium.spaces.Dict({"camera": gymnasium.spaces.Box(0, 255, (4, 4, 3), np.uint8)})

    def observe(self) -> Any:
        return {"camera": np.zeros((4, 4, 3), np.float32)}


class ChannelsFirst(Good):
    observation_space = gymnasium.spaces.Dict({"cam": gymnasium.spaces.Box(0, 255, (3, 64, 64), np.uint8)})


class FloatPicture(Good):
    observation_space = gymnasium.spaces.Box(0, 1, (64, 64, 3), np.float32)


class SaysSuccessInWords(Good):
    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"success": "no"}


class MissingKey(Good):
    observation_space = gymnasium.spaces.Dict({"arm": Good.observation_space})

    def observe(self) -> Any:
        return {"hand": np.zeros(3, np.float32)}


class VectorReward(Good):
    def reward(self) -> Any:
        return np.zeros(2)


class NanReward(Good):
    def reward(self) -> Any:
        return float("nan")


class IgnoresSeed(Good):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.position = np.random.default_rng().normal(size=3)
        return self.observe(), {}


class AlwaysTheSame(Good):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.position = np.zeros(3)
        return self.observe(), {}


class KeepsState(Good):
    drift = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.position = self.position + self.drift
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.drift += 1.0
        return super().step(action)


class SaysSuccessWhereItIs(Good):
    """Arrives at its third step, and at its fifth, which is its last, is still there."""

    def step(self, action: Any) -> Any:
        self.clock += 1
        obs, reward, *_ = super().step(action)
        return obs, reward, False, self.clock == 5, {"success": True} if self.clock == 3 else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.clock = 0
        return super().reset(seed=seed)


class Unbounded(Good):
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)


class DiscreteActions(Good):
    action_space = gymnasium.spaces.Discrete(4)


class WholeNumbers(Good):
    action_space = gymnasium.spaces.Box(-2, 2, (2,), np.int64)


class EmptyRange(Good):
    action_space = gymnasium.spaces.Box(np.array([-1.0, 1.0]), np.array([1.0, 1.0]), (2,), np.float64)


class NoTimeLimit(Good):
    def __init__(self) -> None:
        pass


class RaisesAtTheBound(Good):
    def step(self, action: Any) -> Any:
        if (abs(action) >= 1).any():
            raise RuntimeError("joint limit")
        return super().step(action)


class StateAlone:
    """A VecEnv by hand that forgets about rows."""

    num_envs, action_dim, max_episode_steps = 2, 1, 5

    def reset(self, seeds: Any = None, env_ids: Any = None) -> Any:
        return {"state": np.zeros(3), "pixels": None}

    def chunk_step(self, actions: Any) -> Any:
        return self.reset(), 0.0, False, {}


class ReseedsNeighbours(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Obeys reset_mask, and draws new generators for all rows whenever some are reset."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    num_envs = 2
    single_observation_space = gymnasium.spaces.Box(-1e9, 1e9, (1,), np.float32)
    single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self) -> None:
        self.values, self.steps = np.zeros(2), np.zeros(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        rows = (options or {}).get("reset_mask", np.ones(2, np.bool_))
        self.generators = [np.random.default_rng(one) for one in seed]
        self.values[rows] = [one.normal() for one in np.array(self.generators)[rows]]
        self.steps[rows] = 0
        return self.values[:, None].astype(np.float32), {}

    def step(self, actions: Any) -> Any:
        self.steps += 1
        self.values += [one.normal() for one in self.generators]
        return self.values[:, None].astype(np.float32), self.values, self.steps >= 5, np.zeros(2, np.bool_), {}


CASES = [
    (WrongShape, "shape (1, 3) where observation_space promises shape (3,)"),
    (NotFinite, "row 0, at the start of the episode with seed 1: state[1] is nan"),
    (TooLarge, "the observation holds a number of size 1e+300, which does not fit float32"),
    (OldStep, "step returned 4 values; gymnasium's step returns obs, reward, terminated, truncated, info."),
    (OldReset, "reset returned a ndarray; gymnasium's reset returns obs, info."),
    (NoActionSpace, "NoActionSpace has no action_space; set it in __init__."),
    (FloatImage, "observation 'camera' is float32 of shape (4, 4, 3) where observation_space promises uint8"),
    (ChannelsFirst, "cam is uint8 [3, 64, 64], which would be 12,288 state numbers; pictures are uint8 [H, W, 3]"),
    (FloatPicture, "the observation is float32 [64, 64, 3], which would be 12,288 state numbers"),
    (SaysSuccessInWords, "info['success'] is 'no'; return True or False, one per step."),
    (MissingKey, "observation 'arm' is nothing where observation_space promises that key"),
    (VectorReward, "reward is array([0., 0.]); return one number per step"),
    (NanReward, "row 0, step 1 of the episode with seed 1: the reward is nan"),
    (IgnoresSeed, "the same seeds gave other first observations the second time"),
    (AlwaysTheSame, "other seeds gave the same first observations"),
    (KeepsState, "reset all that a step changes"),
    (SaysSuccessWhereItIs, "success is reported at some steps only"),
    (Unbounded, "action dimensions [0, 1] have no finite bounds"),
    (DiscreteActions, "policies here act in a continuous Box"),
    (
        WholeNumbers,
        "(2,), int64), and policies act in fractions, which int64 would cut off: make it a Box of np.float32",
    ),
    (EmptyRange, "action dimensions [1] have low >= high"),
    (ReseedsNeighbours, "resetting row 0 changed what the other rows did next"),
    (NoTimeLimit, "has no time limit of its own: set max_episode_steps"),
    (
        RaisesAtTheBound,
        "bound low as action: row 0, step 1 of the episode with seed 1001: step raised RuntimeError: joint limit",
    ),
]
