"""ManiSkill as a `Simulator`: one scene per row on the CPU, stepped in turn, or all rows in one batch on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG
from mani_skill.utils.common import flatten_state_dict
from mani_skill.utils.registration import REGISTERED_ENVS

from rlinf_lite.envs.base import FloatArray, IntArray, Obs
from rlinf_lite.envs.errors import RowError
from rlinf_lite.envs.gymnasium.simulator import action_bounds_of
from rlinf_lite.envs.maniskill.card import instruction_of
from rlinf_lite.envs.maniskill.expert import expert_action
from rlinf_lite.envs.maniskill.physics import renew_physics
from rlinf_lite.envs.maniskill.setup import Backends
from rlinf_lite.envs.observations import take_rows
from rlinf_lite.envs.simulator import StepOutputs
from rlinf_lite.registry import UnknownEnvError, did_you_mean

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig


def build(num_envs: int, cfg: EnvConfig, backends: Backends) -> Any:
    """The environment without its wrappers, because ChunkedEnv keeps time limits. Raises UnknownEnvError."""
    if cfg.task not in REGISTERED_ENVS:
        known = did_you_mean(cfg.task, REGISTERED_ENVS)
        raise UnknownEnvError(f"there is no environment {cfg.task!r}. {known}", "env.task")
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
    with torch.inference_mode():
        return gymnasium.make(cfg.task, **(settings | cfg.options.kwargs)).unwrapped


class Scenes:
    """Common base of both kinds of simulation."""

    def __init__(self, envs: list[Any], num_envs: int, cfg: EnvConfig) -> None:
        self.envs, self.num_envs, self.task_id = envs, num_envs, cfg.task
        self.max_episode_steps: int | None = REGISTERED_ENVS[cfg.task].max_episode_steps
        self.action_low, self.action_high = action_bounds_of(envs[0].single_action_space, cfg.task)
        self._infos: list[dict[str, Any]] = [{} for _ in envs]
        self._instruction = instruction_of(cfg.task)
        self._keep_state = "state" in cfg.options.obs_mode

    @property
    def reports_success(self) -> bool:
        return "success" in self._infos[0]

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _split_obs(self, number: int) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """State [B, S] and images by camera.

        If `obs_mode` is rgb, the state is what the robot itself senses: joint positions and velocities, and the task's
        extra entries.
        """
        obs = self.envs[number].get_obs(self._infos[number])
        if not isinstance(obs, dict):
            return obs, {}
        images = {name: data["rgb"] for name, data in obs["sensor_data"].items() if "rgb" in data}
        if self._keep_state:
            return obs["state"], images
        sensed = {"agent": obs["agent"], "extra": obs["extra"]}
        return flatten_state_dict(sensed, use_torch=True), images


class CpuSimulator(Scenes):
    """A `Simulator` on the CPU. Rows are independent scenes, stepped in turn."""

    def __init__(self, num_envs: int, cfg: EnvConfig, backends: Backends) -> None:
        super().__init__([build(1, cfg, backends) for _ in range(num_envs)], num_envs, cfg)

    @torch.inference_mode()
    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            env = self.envs[row]
            try:
                if not env.reconfiguration_freq:  # otherwise reset rebuilds the scene
                    renew_physics(env)
                self._infos[row] = _reset_unseen(env, seed)
            except (Exception, SystemExit) as error:  # any error of the task's own code
                raise RowError(row) from error

    @torch.inference_mode()
    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        batch = torch.from_numpy(np.ascontiguousarray(actions))
        for row in rows.tolist():
            try:
                reward, info = _step_unseen(self.envs[row], batch[row : row + 1])
            except (Exception, SystemExit) as error:  # any error of the task's own code
                raise RowError(row) from error
            self._infos[row] = info
            out.reward[row] = reward.item()
            success, fail = info.get("success"), info.get("fail")
            succeeded = success is not None and success.item()
            out.success[row] = succeeded if success is not None else -1
            out.terminated[row] = succeeded or (fail is not None and fail.item())

    @torch.inference_mode()
    def observe(self, rows: IntArray) -> Obs:
        parts = [self._split_obs(row) for row in rows.tolist()]
        obs: Obs = {"instruction": [self._instruction] * len(parts)}
        states = [state for state, _ in parts if state is not None]
        if states:
            obs["state"] = torch.cat(states).numpy()
        if parts and parts[0][1]:
            obs["images"] = {  # a GPU's pictures are in its memory
                name: torch.cat([images[name] for _, images in parts]).cpu().numpy() for name in parts[0][1]
            }
        return obs

    @torch.inference_mode()
    def expert_actions(self, num_actions: int) -> FloatArray:
        """The next action [B, 1, D] of the scripted expert, which needs a new observation after each."""
        return np.stack([expert_action(env, self.task_id) for env in self.envs])[:, None]


class CudaSimulator(Scenes):
    """A `Simulator` on a GPU. All rows are stepped together; results of rows that were not asked for are ignored.

    Initial states are drawn row by row, each from its own seed; ManiSkill would draw a batch from the first row's seed.
    Objects that a task builds into its scene (the shapes of PegInsertionSide) are drawn from the seeds of the first
    reset and never change.
    """

    def __init__(self, num_envs: int, cfg: EnvConfig, backends: Backends) -> None:
        self.env: Any = build(num_envs, cfg, backends)
        super().__init__([self.env], num_envs, cfg)
        self._initialize_batch = self.env._initialize_episode
        self.env._initialize_episode = self._initialize_rows
        self._seeds = np.zeros(num_envs, np.int64)
        self._scene_is_seeded = False
        self._obs: Obs | None = None  # of all rows, since the last step or reset

    @torch.inference_mode()
    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        self._seeds[rows] = seeds
        if self._scene_is_seeded:  # no seed: it would make the generators of all rows again, twice
            info = _reset_unseen(self.env, None, {"env_idx": torch.from_numpy(rows).to(self.env.device)})
        else:  # ChunkedEnv's first reset is of all rows
            info = _reset_unseen(self.env, self._seeds.tolist(), {"reconfigure": True})
            self._scene_is_seeded = True
        self._infos, self._obs = [info], None

    @torch.inference_mode()
    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        batch = torch.from_numpy(np.ascontiguousarray(actions)).to(self.env.device)
        reward, info = _step_unseen(self.env, batch)
        self._infos, self._obs = [info], None
        success, fail = info.get("success"), info.get("fail")
        nothing = torch.zeros_like(reward)
        columns = [reward, nothing if success is None else success, nothing if fail is None else fail]
        table = torch.stack([column.to(torch.float32) for column in columns]).cpu().numpy()  # one transfer
        out.reward[:] = table[0]
        out.success[:] = -1 if success is None else table[1]
        out.terminated[:] = (table[1] + table[2]) > 0

    @torch.inference_mode()
    def observe(self, rows: IntArray) -> Obs:
        if self._obs is None:
            state, images = self._split_obs(0)
            self._obs = {"instruction": [self._instruction] * self.num_envs}
            if state is not None:
                self._obs["state"] = state.to(torch.float32).cpu().numpy()
            if images:
                self._obs["images"] = {name: image.cpu().numpy() for name, image in images.items()}
        return take_rows(self._obs, rows)

    def _initialize_rows(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        """Replacement for `BaseEnv._initialize_episode`: calls it once per row, with the row's own random state."""
        env, scene, rows = self.env, self.env.scene, env_idx.tolist()
        env._episode_seed[rows] = self._seeds[rows]
        with torch.random.fork_rng():
            for row in rows:
                scene._reset_mask = self._mask(row)
                seed = int(self._seeds[row])
                torch.manual_seed(seed)
                rng = BatchedRNG.from_seeds([seed], backend=env._batched_rng_backend)[0]
                env._episode_rng = env._batched_episode_rng[row] = rng
                self._initialize_batch(env_idx.new_tensor([row]), options)
        scene._reset_mask = self._mask(env_idx)

    def _mask(self, rows: int | torch.Tensor) -> torch.Tensor:
        """Bools [B], True for `rows`."""
        mask = torch.zeros(self.num_envs, dtype=torch.bool, device=self.env.device)
        mask[rows] = True
        return mask


def _reset_unseen(env: Any, seed: int | list[int] | None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """`BaseEnv.reset` without its observation, so that none is rendered needlessly; returns the info."""
    wanted, env._obs_mode = env._obs_mode, "none"
    try:
        info: dict[str, Any] = env.reset(seed=seed, options=options)[1]
        del info["reconfigure"]  # observations are made from an info without it
        return info
    finally:
        env._obs_mode = wanted


def _step_unseen(env: Any, action: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """`BaseEnv.step` without its observation, which is made at the end of a chunk. Returns the reward [B] and the info,
    which has the success."""
    action = env._step_action(action)
    env._elapsed_steps += 1
    info = env.get_info()
    return env.get_reward(obs=_LazyObs(env, info), action=action, info=info), info


class _LazyObs(Mapping[str, Any]):
    """The raw observation that a reward function gets, computed only if the function reads it."""

    def __init__(self, env: Any, info: dict[str, Any]) -> None:
        self._env, self._info = env, info

    @cached_property
    def _obs(self) -> dict[str, Any]:
        obs: dict[str, Any] = self._env.get_obs(self._info, unflattened=True)
        return obs

    def __getitem__(self, key: str) -> Any:
        return self._obs[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._obs)

    def __len__(self) -> int:
        return len(self._obs)
