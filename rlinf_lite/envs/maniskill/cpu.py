"""ManiSkill on the CPU: one PhysX scene per row, stepped in turn by one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlinf_lite.envs.base import FloatArray, IntArray, Obs
from rlinf_lite.envs.errors import RowError
from rlinf_lite.envs.maniskill.build import Stepper, bounds_of, build, limit_of, reset_unseen, split_obs
from rlinf_lite.envs.maniskill.expert import expert_action
from rlinf_lite.envs.maniskill.fast import speed_up
from rlinf_lite.envs.maniskill.renew import renew_physics
from rlinf_lite.envs.maniskill.setup import Backends
from rlinf_lite.envs.maniskill.tasks import instruction_of
from rlinf_lite.envs.simulator import StepOutputs

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig


class CpuSimulator:
    """A `Simulator`; rows are independent scenes."""

    def __init__(self, num_envs: int, cfg: EnvConfig, backends: Backends) -> None:
        self.num_envs = num_envs
        self.task_id = cfg.task
        speed_up()
        with torch.inference_mode():
            self.envs: list[Any] = [build(1, cfg, backends) for _ in range(num_envs)]
        self.max_episode_steps = limit_of(cfg.task)
        self.action_low, self.action_high = bounds_of(self.envs[0], cfg.task)
        self._steppers = [Stepper(env) for env in self.envs]
        self._infos: list[dict[str, Any]] = [{} for _ in self.envs]
        self._instruction = instruction_of(cfg.task)
        self._keep_state = "state" in cfg.options.obs_mode

    @property
    def reports_success(self) -> bool:
        return "success" in self._infos[0]

    @torch.inference_mode()
    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            env = self.envs[row]
            try:
                if not env.reconfiguration_freq:  # else reset itself rebuilds the scene
                    renew_physics(env)
                self._infos[row] = reset_unseen(env, seed)
            except Exception as error:
                raise RowError(row) from error

    @torch.inference_mode()
    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        batch = torch.from_numpy(np.ascontiguousarray(actions))[:, None].unbind()
        for row in rows.tolist():
            try:
                reward, info = self._steppers[row](batch[row])
            except Exception as error:
                raise RowError(row) from error
            self._infos[row] = info
            out.reward[row] = reward.item()
            success, fail = info.get("success"), info.get("fail")
            succeeded = success is not None and success.item()
            out.success[row] = succeeded if success is not None else -1
            out.terminated[row] = succeeded or (fail is not None and fail.item())

    @torch.inference_mode()
    def observe(self, rows: IntArray) -> Obs:
        parts = [split_obs(self.envs[row].get_obs(self._infos[row]), self._keep_state) for row in rows.tolist()]
        obs: Obs = {"instruction": [self._instruction] * len(rows)}
        states = [state for state, _ in parts if state is not None]
        if states:
            obs["state"] = torch.cat(states).numpy()
        if parts and parts[0][1]:
            obs["images"] = {name: torch.cat([images[name] for _, images in parts]).numpy() for name in parts[0][1]}
        return obs

    @torch.inference_mode()
    def expert_actions(self, num_actions: int) -> FloatArray:
        """The scripted expert's next action [B, 1, D]: it looks again after each."""
        return np.stack([expert_action(env, self.task_id) for env in self.envs])[:, None]

    def close(self) -> None:
        for env in self.envs:
            env.close()
