"""Making one ManiSkill environment, and reading its observations: common to CPU and GPU simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import gymnasium
import torch
from mani_skill.utils.common import flatten_state_dict
from mani_skill.utils.registration import REGISTERED_ENVS

from rlinf_lite.envs.base import FloatArray
from rlinf_lite.envs.gymnasium.simulator import box_actions
from rlinf_lite.envs.maniskill.setup import Backends
from rlinf_lite.registry import UnknownEnvError, did_you_mean

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig


def build(num_envs: int, cfg: EnvConfig, backends: Backends) -> Any:
    """The bare environment (no wrappers: their only use here, time limits, is ChunkedEnv's). Raises UnknownEnvError."""
    if cfg.task not in REGISTERED_ENVS:
        known = did_you_mean(cfg.task, REGISTERED_ENVS)
        raise UnknownEnvError(f"env.task: there is no environment {cfg.task!r}. {known}")
    settings: dict[str, Any] = dict(
        num_envs=num_envs,
        obs_mode=cfg.options.obs_mode,
        reward_mode=cfg.options.reward_mode,
        sim_backend=backends.sim,
        render_backend=backends.render,
    )
    if cfg.options.control_mode is not None:
        settings["control_mode"] = cfg.options.control_mode
    if backends.render != "none":
        height, width = cfg.options.camera_size
        settings["sensor_configs"] = {"height": height, "width": width}
    return gymnasium.make(cfg.task, **(settings | cfg.options.kwargs)).unwrapped


def limit_of(task: str) -> int | None:
    limit: int | None = REGISTERED_ENVS[task].max_episode_steps
    return limit


def bounds_of(env: Any, task: str) -> tuple[FloatArray, FloatArray]:
    low, high, _, _ = box_actions(env.single_action_space, task)
    return low, high


def reset_unseen(env: Any, seed: int | list[int], options: dict[str, Any] | None = None) -> dict[str, Any]:
    """`BaseEnv.reset` without its observation, which would be rendered in vain; returns its info."""
    wanted, env._obs_mode = env._obs_mode, "none"
    try:
        info: dict[str, Any] = env.reset(seed=seed, options=options)[1]
        return info
    finally:
        env._obs_mode = wanted


class LazyObs(Mapping[str, Any]):
    """The raw observation that a reward function may look at, computed only if it does."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._info: dict[str, Any] = {}
        self._obs: dict[str, Any] | None = None

    def renewed(self, info: dict[str, Any]) -> LazyObs:
        self._info, self._obs = info, None
        return self

    def _get(self) -> dict[str, Any]:
        if self._obs is None:
            self._obs = self._env.get_obs(self._info, unflattened=True)
        return self._obs

    def __getitem__(self, key: str) -> Any:
        return self._get()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._get())

    def __len__(self) -> int:
        return len(self._get())


class Stepper:
    """`BaseEnv.step` without its observation: same physics, reward and success."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self._obs = LazyObs(env)

    def __call__(self, action: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """Takes action [B, D], returns the reward [B] and the info that success and failure are read from."""
        env = self.env
        action = env._step_action(action)
        env._elapsed_steps += 1
        info = env.get_info()
        return env.get_reward(obs=self._obs.renewed(info), action=action, info=info), info


def split_obs(obs: Any, keep_state: bool) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """State [B, S] and images by camera from what `BaseEnv.get_obs` returns.

    With images alone, the state is what a robot itself senses: joint positions and velocities, and what the task adds.
    """
    if not isinstance(obs, dict):
        return obs, {}
    images = {name: data["rgb"] for name, data in obs["sensor_data"].items() if "rgb" in data}
    if keep_state:
        return obs["state"], images
    sensed = {"agent": obs["agent"], "extra": obs["extra"]}
    return flatten_state_dict(sensed, use_torch=True), images
