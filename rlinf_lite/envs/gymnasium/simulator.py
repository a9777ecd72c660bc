"""Adapters for gymnasium: separate `gymnasium.Env`s, one per row, and a batched `gymnasium.vector.VectorEnv`.

An observation's pictures become uint8 images by camera, its texts the instruction, and the rest is flattened into a
state. Success is `info["success"]` or `info["is_success"]`, if an environment reports it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import flatdim, flatten
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from rlinf_lite.envs.base import FloatArray, IntArray, Obs, put_rows
from rlinf_lite.envs.errors import EnvContractError, MissingExtraError, RowError
from rlinf_lite.envs.observations import take_rows
from rlinf_lite.envs.simulator import StepOutputs
from rlinf_lite.registry import UnknownEnvError, did_you_mean

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig


def make_simulator(num_envs: int, cfg: EnvConfig) -> GymnasiumSimulator:
    """`gymnasium.make(cfg.task, **cfg.options)`, once per row. Raises UnknownEnvError, MissingExtraError."""
    task, kwargs = cfg.task, cfg.options
    module, colon, name = task.rpartition(":")  # `module:Name-v0`: the module registers the environment
    if colon:
        try:
            importlib.import_module(module)
        except ImportError as error:
            text = f"{task!r}: {module} cannot be imported: {error}. Is it installed?"
            raise UnknownEnvError(text, "env.task") from error
    try:
        spec: Any = gymnasium.spec(name)
    except gymnasium.error.Error as error:
        known = did_you_mean(task, gymnasium.registry)
        raise UnknownEnvError(f"there is no environment {task!r}. {known}", "env.task") from error
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "a package", "all") from error
    # max_episode_steps=-1: no TimeLimit wrapper, which would end episodes before a longer limit of ChunkedEnv's
    envs = [gymnasium.make(spec, max_episode_steps=-1, disable_env_checker=True, **kwargs) for _ in range(num_envs)]
    return GymnasiumSimulator(envs, task, max_episode_steps=spec.max_episode_steps)


class ObsReader:
    """Reader of observations of one space. Keys of nested Dict spaces are joined by dots; an image without a key is
    camera "rgb"."""

    def __init__(self, space: spaces.Space[Any], task_id: str) -> None:
        self.task_id = task_id
        leaves = _leaves(space)
        self._images = {
            name: leaf
            for name, leaf in leaves.items()
            if isinstance(leaf, spaces.Box) and leaf.dtype == np.uint8 and len(leaf.shape) == 3 and leaf.shape[2] == 3
        }
        self._texts = [name for name, leaf in leaves.items() if isinstance(leaf, spaces.Text)]
        apart = {*self._images, *self._texts}
        self._states = {name: leaf for name, leaf in leaves.items() if name not in apart}
        for name, leaf in self._states.items():
            if isinstance(leaf, spaces.Box) and len(leaf.shape) >= 3 and {leaf.shape[0], leaf.shape[-1]} & {1, 3}:
                raise EnvContractError(
                    f"{name or 'the observation'} is {leaf.dtype} {list(leaf.shape)}, which would be {flatdim(leaf):,} "
                    "state numbers; pictures are uint8 [H, W, 3]: transpose it, scale it to 0..255 and cast it, or "
                    "repeat its one channel. (Where it is no picture, flatten it.)",
                    task_id,
                )
        if not self._images and not self._states:
            raise EnvContractError(
                f"the observation space {space} holds neither a state nor an image; return at least one of them.",
                task_id,
            )

    def read(self, rows: Mapping[int, Mapping[str, Any]], instructions: Sequence[str]) -> Obs:
        """The observation of all rows; each item of `rows` is the `_leaves` of one. Raises RowError from the
        EnvContractError of an observation that does not fit the space."""
        images: dict[str, list[Any]] = {name: [] for name in self._images}
        states = []
        for row, item in rows.items():
            try:
                for name, stack in images.items():
                    stack.append(self._image(name, item))
                if self._states:
                    states.append(self._state(item))
            except EnvContractError as error:
                raise RowError(row) from error
        obs: Obs = {}
        if images:
            obs["images"] = {name or "rgb": np.stack(stack) for name, stack in images.items()}
        if states:
            obs["state"] = np.stack(states)
        texts = [" ".join(str(item[name]) for name in self._texts) for item in rows.values()]
        obs["instruction"] = [text or given for text, given in zip(texts, instructions, strict=True)]
        return obs

    def state_key(self, column: int) -> str:
        """Key of the observation from which this column of the state comes; "" if the space has no keys."""
        ends = np.cumsum([flatdim(space) for space in self._states.values()])
        return list(self._states)[int(np.searchsorted(ends, column, side="right"))]

    @property
    def state_names(self) -> list[str] | None:
        """The keys of the state's parts, if each part is one number; else None."""
        keys = list(self._states)
        return keys if "" not in keys and all(flatdim(space) == 1 for space in self._states.values()) else None

    def _image(self, name: str, item: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        image, space = self._leaf(name, item), self._images[name]
        if image.dtype != np.uint8 or image.shape != space.shape:
            self._refuse(name, f"{image.dtype} of shape {image.shape}", f"uint8 of shape {space.shape}")
        return image

    def _state(self, item: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
        parts = []
        for name, space in self._states.items():
            value = self._leaf(name, item)
            if space.shape is not None and value.shape != space.shape:
                self._refuse(name, f"shape {value.shape}", f"shape {space.shape}")
            try:
                with np.errstate(over="raise"):
                    parts.append(np.asarray(flatten(space, item[name]), np.float32).reshape(-1))
            except FloatingPointError as error:
                raise EnvContractError(
                    f"{_named(name)} holds a number of size {np.nanmax(np.abs(value)):.3g}, which does not fit "
                    "float32, as policies read it; look for a diverged simulation, or scale it down.",
                    self.task_id,
                ) from error
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _leaf(self, name: str, item: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        if name not in item:
            self._refuse(name, "nothing", "that key")
        return np.asarray(item[name])

    def _refuse(self, name: str, got: str, promised: str) -> None:
        raise EnvContractError(
            f"{_named(name)} is {got} where observation_space promises {promised}; make the two agree.", self.task_id
        )


def _named(name: str) -> str:
    return f"observation {name!r}" if name else "the observation"


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of a space or of an observation, by key."""
    inner = tree.spaces if isinstance(tree, spaces.Dict) else tree
    if not isinstance(inner, dict):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, one in inner.items():
        found |= _leaves(one, f"{prefix}.{key}" if prefix else str(key))
    return found


def _copied(obs: Any) -> dict[str, Any]:
    """Copies of an observation's leaves, by key: other rows may write into the same arrays when they are stepped."""
    leaves = _leaves(obs)
    return {name: leaf.copy() if isinstance(leaf, np.ndarray) else deepcopy(leaf) for name, leaf in leaves.items()}


class GymnasiumSimulator:
    """A `Simulator` of one `gymnasium.Env` per row."""

    def __init__(
        self, envs: Sequence[gymnasium.Env[Any, Any]], task_id: str, max_episode_steps: int | None = None
    ) -> None:
        self.envs = list(envs)
        self.num_envs = len(self.envs)
        self.task_id = task_id
        if len({id(env.unwrapped) for env in self.envs}) < self.num_envs:
            raise EnvContractError(
                "make_env returned the same environment for several rows, which would play in one world; make a new "
                "one at every call.",
                task_id,
            )
        for name in ("action_space", "observation_space"):
            if not hasattr(self.envs[0], name):
                raise EnvContractError(
                    f"{type(self.envs[0].unwrapped).__name__} has no {name}; set it in __init__.", task_id
                )
        spec = self.envs[0].spec
        self.max_episode_steps = max_episode_steps or (spec.max_episode_steps if spec is not None else None)
        self._action_space = self.envs[0].action_space
        self.action_low, self.action_high = action_bounds_of(self._action_space, task_id)
        self._reader = ObsReader(self.envs[0].observation_space, task_id)
        given = _attribute(self.envs[0], "state_names")
        self.state_names = self._reader.state_names if given is None else given
        self.action_names = _attribute(self.envs[0], "action_names")
        self._instructions = [""] * self.num_envs
        self._obs: list[dict[str, Any]] = [{}] * self.num_envs  # leaves of each row's last observation

    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            try:
                returned = self.envs[row].reset(seed=seed)
                obs, _ = _unpacked("reset", returned, ("obs", "info"), self.task_id)
                self._obs[row] = _copied(obs)
                [self._instructions[row]] = _instructions_of(self.envs[row], 1, self.task_id)
            except (Exception, SystemExit) as error:  # any error of the task's own code
                raise RowError(row) from error

    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        batch = _in_space(actions, self._action_space)
        for row in rows.tolist():
            try:
                returned = self.envs[row].step(batch[row])
                obs, reward, terminated, truncated, info = _unpacked(
                    "step", returned, ("obs", "reward", "terminated", "truncated", "info"), self.task_id
                )
                self._obs[row] = _copied(obs)
                out.reward[row] = _number("reward", reward, self.task_id)
                out.terminated[row] = _truth("terminated", terminated, self.task_id)
                out.truncated[row] = _truth("truncated", truncated, self.task_id)
                out.success[row] = _success(info, self.task_id)
            except (Exception, SystemExit) as error:  # any error of the task's own code
                raise RowError(row) from error

    def observe(self, rows: IntArray) -> Obs:
        leaves = {row: self._obs[row] for row in rows.tolist()}
        return self._reader.read(leaves, [self._instructions[row] for row in leaves])

    def state_key(self, column: int) -> str:
        return self._reader.state_key(column)

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _unpacked(method: str, returned: Any, names: Sequence[str], task_id: str) -> Any:
    if isinstance(returned, tuple | list) and len(returned) == len(names):
        if not isinstance(returned[-1], Mapping):
            text = (
                f"{method} returned {_shown(returned[-1])} as info; return a dict, {{}} where there is nothing to say."
            )
            raise EnvContractError(text, task_id)
        return returned
    got = f"{len(returned)} values" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
    raise EnvContractError(f"{method} returned {got}; gymnasium's {method} returns {', '.join(names)}.", task_id)


_MAX = float(np.finfo(np.float32).max)


def _number(name: str, value: Any, task_id: str) -> float:
    """`value`, or the single number of an array or tensor, as a float. Raises EnvContractError for other values."""
    if not isinstance(value, float | int):
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise EnvContractError(f"{name} is {_shown(value)}; return one number per step.", task_id)
        value = float(array.item())
    if _MAX < abs(value) < math.inf:  # NaN and infinity are ChunkedEnv's to refuse
        raise EnvContractError(f"{name} is {_shown(value)}, which does not fit float32; scale it down.", task_id)
    return float(value)


def _truth(name: str, value: Any, task_id: str) -> bool:
    """`value` as True or False. Raises EnvContractError for other values than True, False, 1 and 0."""
    if isinstance(value, bool):
        return value
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf" or array.item() not in (0, 1):
        raise EnvContractError(f"{name} is {_shown(value)}; return True or False, one per step.", task_id)
    return bool(array.item())


def _of_rows(name: str, values: Any, rows: IntArray, num_envs: int, read: Callable[..., Any], task_id: str) -> Any:
    """The values of `rows` among `values`, which a step of `num_envs` rows returned; `read` (`_number` or `_truth`)
    reads each. Raises RowError for a wrong value, and EnvContractError for a wrong number of values."""
    if np.shape(values) != (num_envs,):
        text = f"step returned {name} of shape {np.shape(values)}; return one value per environment, {(num_envs,)}."
        raise EnvContractError(text, task_id)
    array = np.asarray(values)[rows]
    if array.dtype.kind == "b" or (read is _number and array.dtype.kind in "iuf" and not (np.abs(array) > _MAX).any()):
        return array
    found = np.empty(len(rows))
    for i, value in enumerate(array.tolist()):
        try:
            found[i] = read(name, value, task_id)
        except EnvContractError as error:
            raise RowError(int(rows[i])) from error
    return found


def _shown(value: Any) -> str:
    """A value as text that is short enough for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def simulator_of_vector_env(env: VectorEnv[Any, Any, Any], task_id: str) -> GymnasiumSimulator | VectorEnvSimulator:
    """A simulator made of a VectorEnv. The environments of a SyncVectorEnv are used one by one; any other class is used
    as a batch, because it may do more than its environments.

    Raises EnvContractError if the VectorEnv resets rows by itself, because then rows cannot be kept at their end.
    """
    if type(env) is SyncVectorEnv:
        return GymnasiumSimulator(env.envs, task_id)
    if env.metadata.get("autoreset_mode") != AutoresetMode.DISABLED:
        raise EnvContractError(
            f"{type(env).__name__} resets its rows by itself (autoreset_mode "
            f"{env.metadata.get('autoreset_mode')}). Build it with autoreset_mode="
            "gymnasium.vector.AutoresetMode.DISABLED, so that rows can be reset by options['reset_mask'], "
            "or return one gymnasium.Env from make_env.",
            task_id,
        )
    return VectorEnvSimulator(env, task_id)


class VectorEnvSimulator:
    """A `Simulator` of a batched VectorEnv with autoreset disabled. All rows are stepped at once; results of ended rows
    are not used."""

    def __init__(self, env: VectorEnv[Any, Any, Any], task_id: str) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.task_id = task_id
        self.max_episode_steps = env.spec.max_episode_steps if env.spec is not None else None
        self.action_low, self.action_high = action_bounds_of(env.single_action_space, task_id)
        self._reader = ObsReader(env.single_observation_space, task_id)
        given = _attribute(env, "state_names")
        self.state_names = self._reader.state_names if given is None else given
        self.action_names = _attribute(env, "action_names")
        self._instructions = [""] * self.num_envs
        self._obs: Obs | None = None

    def reset(self, rows: IntArray, seeds: list[int]) -> None:
        mask = np.zeros(self.num_envs, np.bool_)
        mask[rows] = True
        seeds_of_all: Any = [None] * self.num_envs  # rows that play on keep their generators
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            seeds_of_all[row] = seed
        raw, _ = self.env.reset(seed=seeds_of_all, options=None if mask.all() else {"reset_mask": mask})
        instructions = _instructions_of(self.env, self.num_envs, self.task_id)
        for row in rows.tolist():
            self._instructions[row] = instructions[row]
        fresh = self._read(raw)
        if self._obs is None:
            self._obs = fresh
        else:
            others = np.flatnonzero(~mask)
            if others.size:
                self._check_others(others, _leaves(self._obs), _leaves(fresh))
            put_rows(self._obs, rows, take_rows(fresh, rows))

    def step(self, rows: IntArray, actions: FloatArray, out: StepOutputs) -> None:
        batch = _in_space(actions, self.env.single_action_space)
        raw, reward, terminated, truncated, info = self.env.step(batch)
        self._obs = self._read(raw)
        of = rows, self.num_envs
        out.reward[rows] = _of_rows("reward", reward, *of, _number, self.task_id)
        out.terminated[rows] = _of_rows("terminated", terminated, *of, _truth, self.task_id)
        out.truncated[rows] = _of_rows("truncated", truncated, *of, _truth, self.task_id)
        out.success[rows] = _success_of_rows(info, *of, self.task_id)

    def observe(self, rows: IntArray) -> Obs:
        assert self._obs is not None
        return take_rows(self._obs, rows)

    def state_key(self, column: int) -> str:
        return self._reader.state_key(column)

    def close(self) -> None:
        self.env.close()

    def _check_others(self, others: IntArray, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Raise RowError if a reset changed the observation of a row that was not reset."""
        for name, part in before.items():
            if name == "instruction":
                continue
            changed = (part[others] != after[name][others]).reshape(len(others), -1).any(axis=1)
            if changed.any():
                text = (
                    f"a reset of other rows returned another {name or 'observation'} of this one, which plays on; "
                    "reset the rows of options['reset_mask'] alone, and return the last observations of the others."
                )
                raise RowError(int(others[changed][0])) from EnvContractError(text, self.task_id)

    def _read(self, raw: Any) -> Obs:
        leaves = _leaves(raw)
        rows = {row: {name: value[row] for name, value in leaves.items()} for row in range(self.num_envs)}
        return self._reader.read(rows, self._instructions)


def _owner(env: Any, attribute: str) -> Any:
    """The outermost wrapper that has an attribute, or else the environment itself."""
    while isinstance(env, gymnasium.Wrapper | VectorWrapper) and not hasattr(env, attribute):
        env = env.env
    return env


def _attribute(env: Any, attribute: str) -> Any:
    return getattr(_owner(env, attribute), attribute, None)


def _instructions_of(env: Any, num_envs: int, task_id: str) -> list[str]:
    """Instruction of each row, from the attribute `instruction`."""
    env = _owner(env, "instruction")
    given = getattr(env, "instruction", None)
    if given is None and isinstance(env, SyncVectorEnv | AsyncVectorEnv):
        has = all(env.call("has_wrapper_attr", "instruction"))
        given = [one or "" for one in env.call("instruction")] if has else None
    given = "" if given is None else given
    is_batch = isinstance(env, VectorEnv)
    per_row = given if isinstance(given, list) and is_batch else [given] * num_envs
    if len(per_row) != num_envs or not all(isinstance(one, str) for one in per_row):
        other = f", or to a list of {num_envs} of them" if is_batch else ""
        raise EnvContractError(f"instruction is {given!r}; set it to a str{other}.", task_id)
    return per_row


def action_bounds_of(space: Any, task_id: str) -> tuple[FloatArray, FloatArray]:
    """Bounds [D] of a continuous, bounded action space. Raises EnvContractError for other spaces."""
    if not isinstance(space, spaces.Box):
        raise EnvContractError(
            f"the action space is {space}; policies here act in a continuous Box: wrap the environment to take one.",
            task_id,
        )
    if np.dtype(space.dtype).kind != "f":
        raise EnvContractError(
            f"the action space is {space}, and policies act in fractions, which {space.dtype} would cut off: make it a "
            "Box of np.float32, and round in step where whole numbers are meant.",
            task_id,
        )
    low, high = (np.asarray(bound, np.float32).reshape(-1) for bound in (space.low, space.high))
    unbounded = np.flatnonzero(~(np.isfinite(low) & np.isfinite(high))).tolist()
    if unbounded:
        raise EnvContractError(
            f"action dimensions {unbounded} have no finite bounds; give the action space a finite low and high "
            "(gymnasium.wrappers.TransformAction takes another space), so that policies know its scale.",
            task_id,
        )
    empty = np.flatnonzero(low >= high).tolist()
    if empty:
        raise EnvContractError(f"action dimensions {empty} have low >= high; give each a range.", task_id)
    return low, high


def _in_space(actions: FloatArray, space: Any) -> Any:
    """Actions [B, D] as elements of `space`. They are clipped, because its float64 bounds may be narrower than the
    float32 ones."""
    return np.clip(actions.reshape(-1, *space.shape).astype(space.dtype), space.low, space.high)


_SUCCESS = ("success", "is_success")


def _success(info: Mapping[str, Any], task_id: str) -> int:
    """Success as 1 or 0; -1 if it is not reported. Raises EnvContractError for values other than True and False."""
    for key in _SUCCESS:
        if key in info:
            return int(_truth(f"info[{key!r}]", info[key], task_id))
    return -1


def _success_of_rows(info: Mapping[str, Any], rows: IntArray, num_envs: int, task_id: str) -> Any:
    """Success of `rows` of a batch; -1 for rows that do not report it, by gymnasium's mask of the key."""
    found = np.full(len(rows), -1.0)
    for key in _SUCCESS:
        if key in info:
            has = np.broadcast_to(np.asarray(info.get(f"_{key}", True), np.bool_), (num_envs,))[rows] & (found < 0)
            values = np.asarray(info[key])
            values = values.reshape(num_envs) if values.size == num_envs else values
            found[has] = _of_rows(f"info[{key!r}]", values, rows[has], num_envs, _truth, task_id)
    return found
