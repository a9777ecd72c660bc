"""ManiSkill on the GPU: all rows in one batched PhysX simulation, stepped together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlinf_lite.envs.base import FloatArray, IntArray, Obs
from rlinf_lite.envs.maniskill.build import Stepper, bounds_of, build, limit_of, reset_unseen, split_obs
from rlinf_lite.envs.maniskill.setup import Backends
from rlinf_lite.envs.maniskill.tasks import instruction_of
from rlinf_lite.envs.observations import take_rows
from rlinf_lite.envs.simulator import StepOutputs

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig


class CudaSimulator:
    """A `Simulator` whose rows move together: those not asked for are stepped too, and what they do is ignored.

    Initial states are drawn row by row, each from its own seed; ManiSkill would draw a batch from the first row's seed.
    What a task builds into its scene (the shapes of PegInsertionSide) is drawn from the seeds of the first reset and
    stays.
    """

    def __init__(self, num_envs: int, cfg: EnvConfig, backends: Backends) -> None:
        self.num_envs = num_envs
        self.task_id = cfg.task
        with torch.inference_mode():
            self.env: Any = build(num_envs, cfg, backends)
        self.max_episode_steps = limit_of(cfg.task)
        self.action_low, self.action_high = bounds_of(self.env, cfg.task)
        self._stepper = Stepper(self.env)
        self._initialize_batch = self.env._initialize_episode
        self.env._initialize_episode = self._initialize_rows
        self._seeds = np.zeros(num_envs, np.int64)
        self._scene_is_seeded = False
        self._info: dict[str, Any] = {}
        self._obs: Obs | None = None  # of all rows, since the last step or reset
        self._instruction = instruction_of(cfg.task)
        self._keep_state = "state" in cfg.options.obs_mode

    @property
    def reports_success(self) -> bool:
        return "success" in self._info

    @torch.inference_mode()
    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        self._seeds[rows] = seeds
        options: dict[str, Any] = {"env_idx": torch.from_numpy(rows).to(self.env.device)}
        if not self._scene_is_seeded:  # ChunkedEnv's first reset is of all rows
            options, self._scene_is_seeded = {"reconfigure": True}, True
        self._info = reset_unseen(self.env, self._seeds.tolist(), options)
        self._obs = None

    @torch.inference_mode()
    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        batch = torch.from_numpy(np.ascontiguousarray(actions)).to(self.env.device)
        reward, self._info = self._stepper(batch)
        self._obs = None
        success, fail = self._info.get("success"), self._info.get("fail")
        nothing = torch.zeros_like(reward)
        columns = [reward, nothing if success is None else success, nothing if fail is None else fail]
        table = torch.stack([column.to(torch.float32) for column in columns]).cpu().numpy()  # one transfer
        out.reward[:] = table[0]
        out.success[:] = -1 if success is None else table[1]
        out.terminated[:] = (table[1] + table[2]) > 0

    @torch.inference_mode()
    def observe(self, rows: IntArray) -> Obs:
        if self._obs is None:
            state, images = split_obs(self.env.get_obs(self._info), self._keep_state)
            self._obs = {"instruction": [self._instruction] * self.num_envs}
            if state is not None:
                self._obs["state"] = state.to(torch.float32).cpu().numpy()
            if images:
                self._obs["images"] = {name: image.cpu().numpy() for name, image in images.items()}
        return take_rows(self._obs, rows)

    def close(self) -> None:
        self.env.close()

    def _initialize_rows(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        """`BaseEnv._initialize_episode`, called once per row under that row's random state."""
        env, scene = self.env, self.env.scene
        for row in env_idx.tolist():
            scene._reset_mask = torch.zeros(self.num_envs, dtype=torch.bool, device=env.device)
            scene._reset_mask[row] = True
            torch.manual_seed(int(self._seeds[row]))  # BaseEnv.reset has forked torch's generators
            env._episode_rng = env._batched_episode_rng[row]
            self._initialize_batch(env_idx.new_tensor([row]), options)
        scene._reset_mask = torch.zeros(self.num_envs, dtype=torch.bool, device=env.device)
        scene._reset_mask[env_idx] = True
