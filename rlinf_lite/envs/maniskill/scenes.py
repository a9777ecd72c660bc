"""ManiSkill as a `Simulator`: on the CPU one scene per row, stepped in turn; on a GPU all rows in one batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG
from mani_skill.utils.common import flatten_state_dict
from mani_skill.utils.registration import REGISTERED_ENVS

from rlinf_lite.envs.base import FloatArray, IntArray, Obs
from rlinf_lite.envs.errors import RowError
from rlinf_lite.envs.gymnasium.simulator import action_bounds_of
from rlinf_lite.envs.maniskill.card import instruction_of
from rlinf_lite.envs.maniskill.expert import expert_action
from rlinf_lite.envs.maniskill.physics import has_hooks, renew_physics, seeds_of_the_cpu, speed_up
from rlinf_lite.envs.maniskill.setup import Backends
from rlinf_lite.envs.maniskill.together import RowsApart, Together, not_maniskills, rows_of, same
from rlinf_lite.envs.observations import take_rows
from rlinf_lite.envs.simulator import StepOutputs
from rlinf_lite.registry import UnknownEnvError, did_you_mean

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig

log = logging.getLogger(__name__)

_CALLS_CHECKED, _CHECK_EVERY = 8, 61
"""Calls that are checked in every row, and after which number of calls a row is: a prime one, so that checks come at
all steps of an episode."""


def build(num_envs: int, cfg: EnvConfig, backends: Backends) -> Any:
    """The bare environment (no wrappers: their only use here, time limits, is ChunkedEnv's). Raises UnknownEnvError."""
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
    """What both kinds of simulation have in common."""

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

        With images alone, the state is what a robot itself senses: joint positions and velocities, and what the task
        adds.
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
    """A `Simulator`; rows are independent scenes, whose physics is stepped in turn. Nobody else changes them.

    Actions, rewards and states of all rows are computed `Together`, where the task's code allows it. Whether the bits
    are those of each row by itself is checked: at first in every row, then in one row now and then. What fails is
    computed row by row from then on.
    """

    def __init__(self, num_envs: int, cfg: EnvConfig, backends: Backends) -> None:
        speed_up()
        super().__init__([build(1, cfg, backends) for _ in range(num_envs)], num_envs, cfg)
        self._num_calls = {"actions": 0, "rewards": 0, "states": 0}
        self.apart: dict[str, str] = {}
        """Which of the three are computed row by row, and why."""
        batch_rows, of = cfg.options.batch_rows, not_maniskills(self.envs[0])
        self._is_maniskills, self._has_hooks = of is None, list(map(has_hooks, self.envs))
        if batch_rows is None and of:
            why = f"{of} is not ManiSkill's own, and env.options.batch_rows is not true"
            self.apart = dict.fromkeys(self._num_calls, why)
        elif batch_rows is False:
            self.apart = dict.fromkeys(self._num_calls, "env.options.batch_rows is false")
        elif any(env.reconfiguration_freq for env in self.envs):
            self.apart = dict.fromkeys(self._num_calls, "resets build the scene anew")
        elif type(self.envs[0])._step_action is not BaseEnv._step_action:
            self.apart = dict.fromkeys(("actions", "rewards"), "the task has its own _step_action")
        if backends.render != "none":
            self.apart["states"] = "pictures are taken scene by scene"
        self._together: Together | None = None
        if len(self.apart) < len(self._num_calls):
            try:
                self._together = Together(self.envs, self._is_maniskills)
            except RowsApart as error:
                self.apart = dict.fromkeys(self._num_calls, str(error))

    @torch.inference_mode()
    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        if self._together is not None:
            self._together.forget()
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            env = self.envs[row]
            try:
                if not env.reconfiguration_freq:  # else reset itself rebuilds the scene
                    renew_physics(env)
                with seeds_of_the_cpu() if self._is_maniskills else nullcontext():  # a task may draw on its own device
                    self._infos[row] = _reset_unseen(env, seed)
                self._has_hooks[row] = has_hooks(env)
            except (Exception, SystemExit) as error:
                raise RowError(row) from error

    @torch.inference_mode()
    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        batch = torch.from_numpy(np.ascontiguousarray(actions))
        numbers = rows.tolist()
        used = self._move(numbers, batch)
        results = self._of_rows(
            "rewards",
            numbers,
            lambda env, together: _reward_and_info(env, together.lend("the action", batch)),
            lambda row: _reward_and_info(self.envs[row], used[row]),
        )
        for row, (reward, info) in zip(numbers, results, strict=True):
            self._infos[row] = info
            out.reward[row] = reward.item()
            success, fail = info.get("success"), info.get("fail")
            succeeded = success is not None and success.item()
            out.success[row] = succeeded if success is not None else -1
            out.terminated[row] = succeeded or (fail is not None and fail.item())

    @torch.inference_mode()
    def observe(self, rows: IntArray) -> Obs:
        def state_of_all(env: Any, together: Together) -> torch.Tensor:
            state: torch.Tensor = env.get_obs(together.join("info", self._infos))
            return state

        numbers = rows.tolist()
        obs: Obs = {"instruction": [self._instruction] * len(numbers)}
        if "states" not in self.apart:
            states = self._of_rows("states", numbers, state_of_all, lambda row: self._split_obs(row)[0])
            return {**obs, "state": torch.cat(states).numpy()}
        parts = [self._split_obs(row) for row in numbers]
        if self._together is not None:
            self._together.look_again()
        states = [state for state, _ in parts if state is not None]
        if states:
            obs["state"] = torch.cat(states).numpy()
        if parts and parts[0][1]:
            obs["images"] = {  # drawn on a card, they are there
                name: torch.cat([images[name] for _, images in parts]).cpu().numpy() for name in parts[0][1]
            }
        return obs

    def _move(self, rows: list[int], actions: torch.Tensor) -> dict[int, torch.Tensor]:
        """Sets what `actions` [B, D] say and steps the physics of `rows`. Returns each one's action [1, D], as used."""
        used = {row: actions[row : row + 1] for row in rows}
        together, targets, checked = self._together, None, []
        if together is not None and "actions" not in self.apart and len(rows) > 1:
            try:
                targets = together.act(lambda env: env.agent.set_action(together.lend("the action", actions)))
                checked = self._to_check("actions", rows)
            except RowsApart as error:
                self._set_apart("actions", str(error))
        if together is not None:
            together.moved()
            if targets is None or checked:
                together.forget()
            elif any(self._has_hooks[row] for row in rows):
                together.look_again()
        # Each loop does one thing in all rows: physics drives out of the caches whatever comes in between.
        to_set: dict[int, torch.Tensor | None] = {**used}
        try:
            if targets is not None:
                for row in rows:
                    if row not in checked:
                        targets.apply(row)
                    else:
                        self.envs[row].agent.set_action(used[row])
                    to_set[row] = None
                    if row in checked and not targets.are_set(row):
                        self._set_apart("actions", f"row {row} by itself has other targets", was_wrong=True)
                        break
            for row in rows:
                env = self.envs[row]
                if to_set[row] is not None:
                    used[row] = env._step_action(to_set[row])
                elif self._is_maniskills and not self._has_hooks[row]:
                    step = env.scene.px.step
                    for _ in range(env._sim_steps_per_control):
                        step()
                else:
                    env._step_action(None)
        except (Exception, SystemExit) as error:
            raise RowError(row) from error
        for row in rows:
            self.envs[row]._elapsed_steps += 1
        return used

    def _of_rows(
        self,
        part: str,
        rows: list[int],
        of_all: Callable[[Any, Together], Any],
        of_row: Callable[[int], Any],
    ) -> list[Any]:
        """What `of_row` returns for each of `rows`, out of what `of_all` returns for all, if that is the same.

        Each row's own code runs once at most, as it may not give the same twice."""
        results: dict[int, Any] = {}
        together = self._together

        def alone(row: int) -> Any:
            if together is not None:
                together.forget()
            try:
                results[row] = of_row(row)
            except (Exception, SystemExit) as error:
                raise RowError(row) from error
            return results[row]

        if together is not None and part not in self.apart and len(rows) > 1:
            try:
                batch = together.look(lambda env: of_all(env, together))
                shares = rows_of(batch, self.num_envs)
                other = [row for row in self._to_check(part, rows) if not same(alone(row), shares[row])]
                if not other:
                    return [shares[row] for row in rows]
                self._set_apart(part, f"row {other[0]} by itself gives something else", was_wrong=True)
            except RowsApart as error:
                self._set_apart(part, str(error))
        return [results[row] if row in results else alone(row) for row in rows]

    def _to_check(self, part: str, rows: list[int]) -> list[int]:
        call = self._num_calls[part]
        self._num_calls[part] += 1
        if call < _CALLS_CHECKED:
            return rows
        number, now = divmod(call + list(self._num_calls).index(part), _CHECK_EVERY)  # each in a step of its own
        return [] if now else [rows[number % len(rows)]]

    def _set_apart(self, part: str, why: str, was_wrong: bool = False) -> None:
        self.apart[part] = why
        if not was_wrong or self._num_calls[part] <= _CALLS_CHECKED:
            log.info("%s: %s are computed row by row: %s", self.task_id, part, why)
        else:
            log.warning(
                "%s: %s are computed row by row from now on: %s. Before, some may have been wrong: "
                "env.options.batch_rows=false computes all of them row by row",
                self.task_id, part, why,
            )  # fmt: skip

    @torch.inference_mode()
    def expert_actions(self, num_actions: int) -> FloatArray:
        """The scripted expert's next action [B, 1, D]: it looks again after each."""
        return np.stack([expert_action(env, self.task_id) for env in self.envs])[:, None]


class CudaSimulator(Scenes):
    """A `Simulator` whose rows move together: those not asked for are stepped too, and what they do is ignored.

    Initial states are drawn row by row, each from its own seed; ManiSkill would draw a batch from the first row's seed.
    What a task builds into its scene (the shapes of PegInsertionSide) is drawn from the seeds of the first reset and
    stays.
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
        if self._scene_is_seeded:  # with seeds, the generators of all rows would be made anew, twice
            info = _reset_unseen(self.env, None, {"env_idx": torch.from_numpy(rows).to(self.env.device)})
        else:  # ChunkedEnv's first reset is of all rows
            info = _reset_unseen(self.env, self._seeds.tolist(), {"reconfigure": True})
            self._scene_is_seeded = True
        self._infos, self._obs = [info], None

    @torch.inference_mode()
    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        batch = torch.from_numpy(np.ascontiguousarray(actions)).to(self.env.device)
        action = self.env._step_action(batch)
        self.env._elapsed_steps += 1
        reward, info = _reward_and_info(self.env, action)
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
        """`BaseEnv._initialize_episode`, called once per row under that row's random state."""
        env, scene, rows = self.env, self.env.scene, env_idx.tolist()
        env._episode_seed[rows] = self._seeds[rows]
        with torch.random.fork_rng():
            for row in rows:
                scene._reset_mask = torch.zeros(self.num_envs, dtype=torch.bool, device=env.device)
                scene._reset_mask[row] = True
                seed = int(self._seeds[row])
                torch.manual_seed(seed)
                env._episode_rng = BatchedRNG.from_seeds([seed], backend=env._batched_rng_backend)[0]
                env._batched_episode_rng[row] = env._episode_rng
                self._initialize_batch(env_idx.new_tensor([row]), options)
        scene._reset_mask = torch.zeros(self.num_envs, dtype=torch.bool, device=env.device)
        scene._reset_mask[env_idx] = True


def _reset_unseen(env: Any, seed: int | list[int] | None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """`BaseEnv.reset` without its observation, which would be rendered in vain; returns its info."""
    wanted, env._obs_mode = env._obs_mode, "none"
    try:
        info: dict[str, Any] = env.reset(seed=seed, options=options)[1]
        del info["reconfigure"]  # which no other info has, nor that from which reset makes its observation
        return info
    finally:
        env._obs_mode = wanted


def _reward_and_info(env: Any, action: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """The end of `BaseEnv.step` without its observation: reward [B], and the info that success is read from."""
    info = env.get_info()
    return env.get_reward(obs=_LazyObs(env, info), action=action, info=info), info


class _LazyObs(Mapping[str, Any]):
    """The raw observation that a reward function may look at, computed only if it does."""

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
