"""What ManiSkill's Python does for every scene, done once for all of them: controllers, success, reward and state.

On a GPU a task's `evaluate`, `compute_dense_reward` and `get_obs` see all scenes as one batch. On the CPU every scene
is an environment of its own, and some two hundred small torch operations for each take longer than its physics.
`Together` is an environment whose objects have the poses of all rows, one below the other, so that the same code runs
once. The bits are the same, as these operations do not look from row to row.

Looking may change nothing, and setting actions only controllers and the targets of joints. Whatever else is tried, or
is not known to mean the same in a batch, raises `RowsApart`; nothing has been changed then, and the caller goes row by
row.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from mani_skill.agents.base_agent import BaseAgent
from mani_skill.agents.controllers.base_controller import BaseController
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.scene import ManiSkillScene
from mani_skill.utils.scene_builder import SceneBuilder
from mani_skill.utils.structs import Actor, Articulation, Link, Pose
from mani_skill.utils.structs.base import BaseStruct

_CONSTANTS = int | float | str | bytes | None | enum.Enum | np.generic | torch.device | torch.dtype | type
_CODE = BaseEnv | BaseAgent | BaseController | SceneBuilder
_THAT_ONLY_LOOK = ("get_", "is_", "find_")


class RowsApart(Exception):
    """These environments cannot be treated as one; the text says why."""


def not_maniskills(env: Any) -> str | None:
    """The first class of the environment, its robot or a controller that is not of ManiSkill's package."""
    agents = getattr(env.agent, "agents", [env.agent])
    controllers = [getattr(agent, "controller", None) for agent in agents]
    parts = [part for whole in controllers for part in getattr(whole, "controllers", {}).values()]
    for thing in (env, env.agent, *agents, *controllers, *parts):
        for kind in type(thing).__mro__:
            if kind.__module__.split(".")[0] not in ("mani_skill", "gymnasium", "builtins", "typing", "abc"):
                return kind.__name__
    return None


def same(one: Any, other: Any) -> bool:
    """Whether two values are of one kind, and equal to the last bit, NaN and the sign of 0 included. Of unknown kinds
    nothing is the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.dtype == torch.bfloat16 or one.requires_grad or other.requires_grad:
            return False
        return same(one.numpy(), other.numpy())
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape or one.dtype.hasobject:
            return False
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, float | np.inexact):
        return repr(one) == repr(other)
    if isinstance(one, dict):
        return bool(one.keys() == other.keys()) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Pose):
        return same(one.raw_pose, other.raw_pose)
    if isinstance(one, gymnasium.spaces.Box):  # its own comparison takes as long as a step of physics
        return same((one.low, one.high), (other.low, other.high))
    return isinstance(one, _CONSTANTS | gymnasium.Space) and bool(one == other)


def rows_of(batch: Any, num_rows: int) -> Sequence[Any]:
    """What each row by itself has, where all have `batch`. Raises RowsApart."""
    if isinstance(batch, torch.Tensor):
        if batch.ndim == 0 or len(batch) != num_rows:
            raise RowsApart(f"a tensor {list(batch.shape)} has no row for each of {num_rows} environments")
        return batch.split(1)
    if isinstance(batch, dict):
        if not batch:
            return [{} for _ in range(num_rows)]
        shares = zip(*[rows_of(value, num_rows) for value in batch.values()], strict=True)
        return [dict(zip(batch, row, strict=True)) for row in shares]
    if isinstance(batch, tuple):
        return list(zip(*[rows_of(value, num_rows) for value in batch], strict=True)) if batch else [()] * num_rows
    if isinstance(batch, _CONSTANTS):
        return [batch] * num_rows
    raise RowsApart(f"what a {type(batch).__name__} says of each row is not known here")


@dataclasses.dataclass
class Changes:
    """What `act` has found out, by object: each row's value of attributes, and targets of joints [B, joints]."""

    attributes: list[tuple[list[Any], str, Sequence[Any]]]
    targets: list[tuple[list[Any], np.ndarray]]

    def apply(self, row: int) -> None:
        for owners, name, values in self.attributes:
            owners[row].__dict__[name] = values[row]
        for joints, targets in self.targets:
            for k, joint in enumerate(joints[row]):
                joint.drive_target = targets[row, k : k + 1]

    def are_set(self, row: int) -> bool:
        """Whether `row`, which has done the same by itself, is as `apply` would have made it."""
        for owners, name, values in self.attributes:
            if not same(owners[row].__dict__[name], values[row]):
                return False
        return all(
            [float(joint.drive_target[0]) for joint in joints[row]] == targets[row].tolist()
            for joints, targets in self.targets
        )


class Together:
    """`env` stands for `envs`, one-scene environments of one task: what its methods take and return are batches."""

    def __init__(self, envs: Sequence[Any], is_maniskills: bool) -> None:
        self.num_rows, self.is_maniskills = len(envs), is_maniskills
        self.may_set = False
        self.where: dict[tuple[int, str], tuple[list[Any], torch.Tensor]] = {}
        """Poses and joints, with the rows' objects; nothing moves between two calls of `moved`."""
        self.attributes: dict[tuple[int, str], tuple[list[Any], Any, torch.Tensor | None]] = {}
        """Of rows' objects, by name: tensors that were read, as they are and as they were, and what was set."""
        self.others: dict[int, tuple[str, Any, Any]] = {}
        """Tensors and arrays that are no attributes themselves, and as they were: a change in place would be lost. By
        `id`."""
        self.lasting: dict[tuple[int, str], tuple[list[Any], Any, dict[int, tuple[str, Any, Any]]]] = {}
        """Attributes whose values stay the same objects from call to call: those values, what was made of them, and
        what of that belongs to `others`."""
        self.sure: dict[tuple[int, str], list[Any]] = {}
        """Attributes of which all rows (the values) have been looked at since code of their own has run: as `lasting`
        says, or, if it does not, of the class."""
        self.targets: list[tuple[list[Any], np.ndarray]] = []
        """Of joints: each row's, and [B, joints]."""
        try:
            self.env: Any = self.join("env", list(envs))
        except Exception as error:
            raise RowsApart(f"no batch can be made of {type(envs[0]).__name__}: {error}") from error

    def moved(self) -> None:
        """Forgets where things are: call it when the scenes have been stepped."""
        self.where.clear()

    def look_again(self) -> None:
        """Looks at every row's attributes before it trusts them: call it when methods have run, row by row, that a
        task, a robot or a controller has for every step or observation. ManiSkill's change nothing in place."""
        if self.is_maniskills:
            self.sure.clear()
        else:
            self.forget()

    def forget(self) -> None:
        """Forgets whatever code of the rows' own may have changed: call it when some has run."""
        self.moved()
        self.sure.clear()
        fixed = _Rows | _CONSTANTS  # else what the same object says may have changed
        self.lasting = {key: known for key, known in self.lasting.items() if isinstance(known[1], fixed)}

    def lend(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """For a method that `look` or `act` calls: a copy of `tensor`, which may not be changed."""
        lent = tensor.clone()
        self.others[id(lent)] = (name, lent, tensor)
        return lent

    def look(self, method: Callable[[Any], Any]) -> Any:
        """What `method(env)` returns. Raises RowsApart, for whatever `method` raises too."""
        result, changed = self._call(method, may_set=False)
        for _, name, _ in changed:
            raise RowsApart(f"{name} is changed in place")
        return result

    def act(self, method: Callable[[Any], Any]) -> Changes:
        """Calls `method(env)`, which may set attributes of controllers and targets of joints; nothing is changed yet.

        Raises RowsApart.
        """
        _, changed = self._call(method, may_set=True)
        for _, name, value in changed:
            if not isinstance(value, torch.Tensor | int | float | None):
                raise RowsApart(f"{name} is set to a {type(value).__name__}")
            if isinstance(value, torch.Tensor) and (value.ndim == 0 or len(value) != self.num_rows):
                raise RowsApart(f"{name} is set to a tensor without a row for each environment")
        for owners, name, _ in changed:
            self.sure.pop((id(owners[0]), name), None)
        shares = [  # each with memory of its own
            (owners, name, rows_of(value.contiguous() if isinstance(value, torch.Tensor) else value, self.num_rows))
            for owners, name, value in changed
        ]
        return Changes(shares, list(self.targets))

    def _call(self, method: Callable[[Any], Any], may_set: bool) -> tuple[Any, list[tuple[list[Any], str, Any]]]:
        """What `method(env)` returns, and the attributes that it has changed: rows, name and value."""
        self.attributes.clear()
        self.others.clear()
        self.targets.clear()
        self.may_set = may_set
        generators = self._generators()
        try:
            result = method(self.env)
        except RowsApart:
            raise
        except Exception as error:
            raise RowsApart(f"{type(error).__name__} in a batch: {error}") from error
        finally:
            draws = not same(generators, self._generators())
            if draws:  # as if nothing had been
                torch.set_rng_state(generators[0])
                if not self.is_maniskills:
                    np.random.set_state(generators[1])
        if draws:
            raise RowsApart("random numbers are drawn")
        for name, batch, before in self.others.values():
            if not same(batch, before):
                raise RowsApart(f"{name} is changed in place")
        return result, [
            (rows, name, value)
            for (_, name), (rows, value, before) in self.attributes.items()
            if before is None or not same(value, before)
        ]

    def _generators(self) -> tuple[torch.Tensor, Any]:
        """ManiSkill's code does not draw from NumPy's, which takes 50 us to copy."""
        return torch.get_rng_state(), None if self.is_maniskills else np.random.get_state()

    def join(self, name: str, values: list[Any]) -> Any:
        """One value for `values`, those of all rows."""
        first = values[0]
        kind = type(first)
        if isinstance(first, torch.Tensor):
            batch = _join_tensors(name, values)
            self.others[id(batch)] = (name, batch, batch.clone())
            return batch
        if any(type(value) is not kind for value in values):
            raise RowsApart(f"{name} is of different types")
        if isinstance(first, _CODE):
            return _class_of(kind, _Code)(self, values)
        if isinstance(first, BaseStruct | ManiSkillScene):
            return _class_of(kind, _Objects)(self, values)
        if isinstance(first, Pose):
            return Pose(self.join(name, [pose.raw_pose for pose in values]))
        if isinstance(first, dict) and all(value.keys() == first.keys() for value in values):
            return MappingProxyType(  # not to be written to
                {key: self.join(f"{name}[{key!r}]", [value[key] for value in values]) for key in first}
            )
        if isinstance(first, list | tuple) and all(len(value) == len(first) for value in values):
            return tuple(self.join(f"{name}[{i}]", [value[i] for value in values]) for i in range(len(first)))
        if isinstance(first, _CONSTANTS | gymnasium.Space) and all(same(value, first) for value in values):
            return first
        if isinstance(first, np.ndarray) and all(same(value, first) for value in values):
            array = first.copy()
            array.flags.writeable = False  # torch.from_numpy passes over that
            self.others[id(array)] = (name, array, first)
            return array
        if _is_setting(first):
            self.join(name, [vars(value) for value in values])
            return _fixed(first)
        raise RowsApart(f"{name} ({kind.__name__}) differs between rows, or is of no kind that is known here")


def _is_setting(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and type(value).__module__.startswith("mani_skill.")


class _Fixed:
    def __setattr__(self, name: str, value: object) -> None:
        raise RowsApart(f"{type(self).__name__}.{name} is set")

    def __delattr__(self, name: str) -> NoReturn:
        raise RowsApart(f"{type(self).__name__}.{name} is deleted")


def _fixed(setting: Any) -> Any:
    """A copy, as far as it consists of settings, whose attributes cannot be set."""
    copied = copy.copy(setting)
    copied.__dict__.update({name: _fixed(value) for name, value in vars(setting).items() if _is_setting(value)})
    object.__setattr__(copied, "__class__", _class_of(type(setting), _Fixed))
    return copied


def _join_tensors(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    if first.ndim and len(first) == 1 and all((one.shape, one.dtype) == (first.shape, first.dtype) for one in tensors):
        return torch.cat(tensors)
    return _same_tensor(name, tensors)


def _same_tensor(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    if not all(same(one, tensors[0]) for one in tensors):
        raise RowsApart(f"{name} has no row of its own for each environment: {list(tensors[0].shape)}")
    return tensors[0].clone()


_classes: dict[type, type] = {}


def _class_of(kind: type, base: type) -> type:
    if kind not in _classes:
        _classes[kind] = type(f"{kind.__name__}Together", (base, kind), {})
    return _classes[kind]


class _Rows(_Fixed):
    """Stands for `rows`, objects of one class."""

    def __init__(self, together: Together, rows: list[Any]) -> None:
        object.__setattr__(self, "_rows", (together, rows))


class _Code(_Rows):
    """An environment, a robot or a controller: its own methods run, over attributes that are joined."""

    def __getattribute__(self, name: str) -> Any:
        get = object.__getattribute__
        together, rows = get(self, "_rows")
        key = (id(rows[0]), name)
        if key in together.attributes:
            return together.attributes[key][1]
        known = together.lasting.get(key)
        if key in together.sure:
            if known is None:
                return get(self, name)
            together.others.update(known[2])
            return known[1]
        first = rows[0].__dict__
        of_class = getattr(type(self), name, None)
        if name not in first or hasattr(of_class, "__set__"):
            kept = isinstance(of_class, cached_property) or any(name in row.__dict__ for row in rows)
            if kept and name not in first:
                raise RowsApart(f"{type(rows[0]).__name__}.{name} is kept by some rows")
            together.sure[key] = rows
            return get(self, name)  # a method, a property, or what the class says
        if name == "num_envs":
            return together.num_rows
        values = [row.__dict__[name] for row in rows]
        if known is not None and all(map(_is, values, known[0])):
            together.sure[key] = rows
            together.others.update(known[2])
            return known[1]
        num_others, where = len(together.others), f"{type(rows[0]).__name__}.{name}"
        # of a controller's tensors those of one dimension are about its joints, of which it may have a single one
        of_joints = isinstance(values[0], torch.Tensor) and isinstance(rows[0], BaseController) and values[0].ndim == 1
        if of_joints:
            joined: Any = _same_tensor(where, values)
            together.others[id(joined)] = (where, joined, values[0])
        elif isinstance(values[0], torch.Tensor):
            batch = _join_tensors(where, values)
            together.attributes[key] = (rows, batch, batch.clone())
            return batch
        else:
            joined = together.join(where, values)
        if name == "action_space" and isinstance(joined, gymnasium.Space):
            joined = batch_space(joined, together.num_rows)
        # the lists of robots and controllers stay as they are built, and so do settings
        fixed = isinstance(rows[0], BaseAgent | BaseController) or _is_setting(values[0])
        if of_joints or fixed or isinstance(joined, _Rows | int | float | str):
            others = dict(itertools.islice(together.others.items(), num_others, None))
            together.lasting[key] = (values, joined, others)
            together.sure[key] = rows
        return joined

    def __setattr__(self, name: str, value: object) -> None:
        together, rows = object.__getattribute__(self, "_rows")
        has_setter = hasattr(getattr(type(self), name, None), "__set__")
        if has_setter or not (together.may_set and isinstance(rows[0], BaseController)):
            super().__setattr__(name, value)
        else:
            together.attributes[id(rows[0]), name] = (rows, value, None)


class _Objects(_Rows):
    """Something in the scene, or the scene: what is asked of it is asked of each row's."""

    def __getattribute__(self, name: str) -> Any:
        get = object.__getattribute__
        if name.startswith("__"):
            return get(self, name)
        together, rows = get(self, "_rows")
        if name in ("num_envs", "_num_objs"):
            return together.num_rows
        if name in _QUICK and isinstance(rows[0], Actor | Link | Articulation) and len(rows[0]._objs) == 1:
            key = (id(rows[0]), name)
            if key not in together.where:
                together.where[key] = (rows, _QUICK[name](rows))
            value = together.where[key][1].clone()
            return Pose(value) if name == "pose" else value
        if name in ("get_qpos", "get_qvel"):
            return lambda: getattr(self, name.removeprefix("get_"))
        if name == "set_joint_drive_targets":
            return get(self, "_aim")
        found = [getattr(row, name) for row in rows]
        if not callable(found[0]) or isinstance(found[0], _Rows):
            return together.join(f"{type(rows[0]).__name__}.{name}", found)
        if not name.startswith(_THAT_ONLY_LOOK):
            raise RowsApart(f"{type(rows[0]).__name__}.{name}() may change something")

        def call(*args: Any, **kwargs: Any) -> Any:
            results = []
            for i, method in enumerate(found):
                keywords = {key: _of_row(value, i) for key, value in kwargs.items()}
                results.append(method(*[_of_row(value, i) for value in args], **keywords))
            return together.join(f"{type(rows[0]).__name__}.{name}()", results)

        return call

    def _aim(self, targets: torch.Tensor, joints: list[Any], joint_indices: Any = None) -> None:
        """`Articulation.set_joint_drive_targets`."""
        together = object.__getattribute__(self, "_rows")[0]
        if not together.may_set or targets.dtype != torch.float32 or len(targets) != together.num_rows:
            raise RowsApart("set_joint_drive_targets for no row of its own")
        by_joint = [[one._objs[0] for one in object.__getattribute__(joint, "_rows")[1]] for joint in joints]
        together.targets.append((list(zip(*by_joint, strict=True)), targets.numpy().copy()))


def _is(one: object, other: object) -> bool:
    return one is other


def _of_row(value: Any, row: int) -> Any:
    if isinstance(value, _Rows):
        return object.__getattribute__(value, "_rows")[1][row]
    if isinstance(value, torch.Tensor | Pose):
        raise RowsApart("a tensor goes to a method that is called row by row")
    return value


def _poses(rows: list[Any]) -> torch.Tensor:
    if isinstance(rows[0], Articulation):
        rows = [row.root for row in rows]
    poses = [row._objs[0].entity_pose if isinstance(row, Link) else row._objs[0].pose for row in rows]
    return torch.from_numpy(np.concatenate([part for pose in poses for part in (pose.p, pose.q)]).reshape(-1, 7))


_QUICK: dict[str, Callable[[list[Any]], torch.Tensor]] = {
    "pose": _poses,
    "qpos": lambda rows: torch.from_numpy(np.array([row._objs[0].qpos for row in rows])),
    "qvel": lambda rows: torch.from_numpy(np.array([row._objs[0].qvel for row in rows])),
}
