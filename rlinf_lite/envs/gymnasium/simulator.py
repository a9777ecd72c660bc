"""Adapters for gymnasium: separate `gymnasium.Env`s, one per row, and a batched `gymnasium.vector.VectorEnv`.

Success is `info["success"]` or `info["is_success"]` where an environment reports one.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from rlinf_lite.envs.base import FloatArray, IntArray, Obs, put_rows
from rlinf_lite.envs.errors import EnvContractError, MissingExtraError, RowError
from rlinf_lite.envs.gymnasium.obs import ObsReader
from rlinf_lite.envs.observations import take_rows
from rlinf_lite.envs.simulator import StepOutputs
from rlinf_lite.registry import UnknownEnvError, did_you_mean

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig


def make_simulator(num_envs: int, cfg: EnvConfig) -> GymnasiumSimulator:
    """`gymnasium.make(cfg.task, **cfg.options)`, once per row. Raises UnknownEnvError, MissingExtraError."""
    task, kwargs, spec = cfg.task, cfg.options, _spec(cfg.task)
    # time limits are ChunkedEnv's: gymnasium's own wrapper (max_episode_steps=-1: none) would cut longer ones short
    envs = [gymnasium.make(spec, max_episode_steps=-1, disable_env_checker=True, **kwargs) for _ in range(num_envs)]
    return GymnasiumSimulator(envs, task, max_episode_steps=spec.max_episode_steps)


def _spec(task: str) -> Any:
    """Of `Name-v0`, or of `module:Name-v0`, whose module registers it."""
    module, colon, name = task.rpartition(":")
    try:
        if colon:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except ImportError as error:
        raise UnknownEnvError(f"env.task: {task!r}: {module} cannot be imported: {error}. Is it installed?") from error
    except gymnasium.error.Error as error:
        known = did_you_mean(task, gymnasium.registry)
        raise UnknownEnvError(f"env.task: there is no environment {task!r}. {known}") from error
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "a package", "all") from error


class GymnasiumSimulator:
    """One `gymnasium.Env` per row."""

    def __init__(
        self, envs: Sequence[gymnasium.Env[Any, Any]], task_id: str, max_episode_steps: int | None = None
    ) -> None:
        self.envs = list(envs)
        self.num_envs = len(self.envs)
        self.task_id = task_id
        spec = self.envs[0].spec
        self.max_episode_steps = max_episode_steps or (spec.max_episode_steps if spec is not None else None)
        self.action_low, self.action_high, self._action_shape, self._action_dtype = box_actions(
            self.envs[0].action_space, task_id
        )
        self._reader = ObsReader(self.envs[0].observation_space, task_id)
        self._instructions = [str(getattr(env.unwrapped, "instruction", "") or "") for env in self.envs]
        self._obs: list[Any] = [None] * self.num_envs

    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            try:
                self._obs[row], _ = self.envs[row].reset(seed=seed)
            except Exception as error:
                raise RowError(row) from error
            self._instructions[row] = str(getattr(self.envs[row].unwrapped, "instruction", "") or "")

    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        for row in rows.tolist():
            action = actions[row].reshape(self._action_shape).astype(self._action_dtype)
            try:
                self._obs[row], reward, terminated, truncated, info = self.envs[row].step(action)
                out.reward[row] = _scalar(reward, self.task_id)
                out.terminated[row] = terminated
                out.truncated[row] = truncated
                out.success[row] = _success(info)
            except EnvContractError:
                raise
            except Exception as error:
                raise RowError(row) from error

    def observe(self, rows: IntArray) -> Obs:
        indices = rows.tolist()
        return self._reader.read([self._obs[row] for row in indices], [self._instructions[row] for row in indices])

    def state_key(self, column: int) -> str:
        return self._reader.state_key(column)

    def close(self) -> None:
        for env in self.envs:
            env.close()


def simulator_of_vector_env(env: VectorEnv[Any, Any, Any], task_id: str) -> GymnasiumSimulator | VectorEnvSimulator:
    """A simulator over a VectorEnv: over its environments where it holds them, else over the batch.

    Raises EnvContractError where it resets by itself: then no row could be held at its end.
    """
    inner = getattr(env, "envs", None)
    if inner and all(isinstance(one, gymnasium.Env) for one in inner):
        return GymnasiumSimulator(inner, task_id)
    if env.metadata.get("autoreset_mode") != AutoresetMode.DISABLED:
        raise EnvContractError(
            [
                f"{type(env).__name__} resets its rows by itself (autoreset_mode "
                f"{env.metadata.get('autoreset_mode')}). Build it with autoreset_mode="
                "gymnasium.vector.AutoresetMode.DISABLED, so that rows can be reset by options['reset_mask'], "
                "or return one gymnasium.Env from make_env."
            ],
            task_id,
        )
    return VectorEnvSimulator(env, task_id)


class VectorEnvSimulator:
    """A batched VectorEnv with autoreset disabled: all rows are stepped at once, ended ones too and in vain."""

    def __init__(self, env: VectorEnv[Any, Any, Any], task_id: str) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.task_id = task_id
        self.max_episode_steps = env.spec.max_episode_steps if env.spec is not None else None
        self.action_low, self.action_high, shape, self._action_dtype = box_actions(env.single_action_space, task_id)
        self._action_shape = (self.num_envs, *shape)
        self._reader = ObsReader(env.single_observation_space, task_id)
        self._obs: Obs | None = None
        self._seeds: list[int] = [0] * self.num_envs

    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        mask = np.zeros(self.num_envs, np.bool_)
        mask[rows] = True
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            self._seeds[row] = seed
        seeds_of_all: Any = list(self._seeds)  # typed as int | None in gymnasium, which takes lists too
        raw, _ = self.env.reset(seed=seeds_of_all, options=None if mask.all() else {"reset_mask": mask})
        fresh = self._read(raw)
        if self._obs is None:
            self._obs = fresh
        else:
            put_rows(self._obs, rows, take_rows(fresh, rows))

    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        batch = actions.reshape(self._action_shape).astype(self._action_dtype)
        raw, reward, terminated, truncated, info = self.env.step(batch)
        self._obs = self._read(raw)
        out.reward[:] = reward
        out.terminated[:] = terminated
        out.truncated[:] = truncated
        out.success[:] = _batch_success(info, self.num_envs)

    def observe(self, rows: IntArray) -> Obs:
        assert self._obs is not None
        return take_rows(self._obs, rows)

    def state_key(self, column: int) -> str:
        return self._reader.state_key(column)

    def close(self) -> None:
        self.env.close()

    def _read(self, raw: Any) -> Obs:
        return self._reader.read_batch(raw, self.num_envs)


def box_actions(space: Any, task_id: str) -> tuple[FloatArray, FloatArray, tuple[int, ...], Any]:
    """Bounds [D], shape and dtype of a continuous, bounded action space. Raises EnvContractError for any other."""
    if not isinstance(space, spaces.Box):
        raise EnvContractError(
            [f"the action space is {space}; policies here act in a continuous Box: wrap the environment to take one."],
            task_id,
        )
    low, high = (np.asarray(bound, np.float32).reshape(-1) for bound in (space.low, space.high))
    unbounded = np.flatnonzero(~(np.isfinite(low) & np.isfinite(high))).tolist()
    if unbounded:
        raise EnvContractError(
            [
                f"action dimensions {unbounded} have no finite bounds; give the action space a finite low and high "
                "(gymnasium.wrappers.RescaleAction or ClipAction can), so that policies know its scale."
            ],
            task_id,
        )
    if (low >= high).any():
        raise EnvContractError(
            [f"action dimensions {np.flatnonzero(low >= high).tolist()} have low >= high; give each a range."], task_id
        )
    return low, high, space.shape, space.dtype


def _scalar(reward: Any, task_id: str) -> float:
    if np.size(reward) != 1:
        raise EnvContractError(
            [f"step returned a reward of shape {np.shape(reward)}; return one number per step."], task_id
        )
    return float(np.asarray(reward).reshape(()))


def _success(info: Mapping[str, Any]) -> int:
    for key in ("success", "is_success"):
        if key in info:
            return int(bool(info[key]))
    return -1


def _batch_success(info: Mapping[str, Any], num_envs: int) -> Any:
    for key in ("success", "is_success"):
        if key in info:
            reported = info.get(f"_{key}", np.ones(num_envs, np.bool_))  # gymnasium's mask of rows that reported it
            return np.where(reported, np.asarray(info[key], np.bool_), -1)
    return -1
