"""Environments that fail in the way and at the time that `env.options` sets."""

import os
import time

import gymnasium
import numpy as np


def _is_first(marker):
    """Whether this process is the first to ask for this file; two may ask at the same time."""
    try:
        open(marker, "x").close()
    except FileExistsError:
        return False
    return True


class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, kwargs):
        self._how, self._after, self._steps = kwargs["how"], kwargs.get("after", 40), 0
        self._marker = kwargs.get("marker")
        if self._how == "slow_to_build":
            time.sleep(0.5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self._how == "shape":
            return np.zeros(5, np.float32), {}
        if self._how == "unseeded":
            return np.random.default_rng().uniform(-1, 1, 3).astype(np.float32), {}
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        self._steps += 1
        reward = 0.0
        if self._steps > self._after:
            if self._how == "raise":
                raise ZeroDivisionError("the simulator fell over")
            if self._how == "die":
                os.kill(os.getpid(), 9)
            if self._how == "nan_reward":
                reward = float("nan")
            if self._how == "huge_reward":
                reward = 3e38  # a float32, but what is computed from it is not
            if self._how == "hang_once" and _is_first(self._marker):
                time.sleep(3600)
            if self._how == "slow":
                time.sleep(0.05)
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), reward, False, False, {}


def make_env(num_envs, cfg):
    return Broken(cfg.options)
