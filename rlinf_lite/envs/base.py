"""The environment protocol between workers and simulators: numpy arrays with the batch first.

Images are uint8 [B, H, W, 3], states float32 [B, S], actions float32 [B, C, D] in the environment's own units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.envs.errors import EnvContractError

FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


class Obs(TypedDict, total=False):
    """A batch of observations: images, state or both; one instruction per row ("" where the task has none)."""

    images: dict[str, NDArray[np.uint8]]  # camera -> [B, H, W, 3]
    state: FloatArray  # [B, S]
    instruction: list[str]


@dataclass(frozen=True)
class EpisodeRecord:
    """One finished episode."""

    env_id: int
    """Row within the VecEnv."""
    task_id: str
    seed: int
    """Seed of this episode's initial state."""
    length: int
    """Env steps."""
    return_: float
    """Sum of rewards."""
    success_once: bool | None
    """Success at any step; None if the environment does not report success."""
    success_at_end: bool | None
    """Success at the last step."""
    steps_to_success: int | None = None
    """Env steps until the first success; None without one."""


@dataclass
class ChunkResult:
    """Result of one chunk of actions. B environments, C steps."""

    obs: Obs
    """Observations for the policy; with auto_reset, the next episode's first observation in rows that ended."""
    rewards: FloatArray  # [B, C], 0 where not executed
    terminated: BoolArray  # [B, C], True at the step that ended an episode by the task's own rule
    truncated: BoolArray  # [B, C], True at the step that ended an episode by a time limit; never where terminated
    executed: BoolArray  # [B, C], False after the end of an episode and in frozen rows
    final_obs: tuple[IntArray, Obs] | None = None
    """Rows whose episode ended in this chunk, and their last observations of it."""
    episodes: list[EpisodeRecord] = field(default_factory=list)
    """The episodes that ended in this chunk, by step and then row."""


@runtime_checkable
class VecEnv(Protocol):
    """B environments that take whole chunks of actions. `ChunkedEnv` implements it for any `Simulator`.

    Optional: `action_low` and `action_high` (float32 [D]; default: -1 and 1), `state_names` and `action_names` (a text
    per dimension, to match columns of datasets; None: no names), `state_dict()` and `load_state_dict(rows)` for exact
    resume, `last_success` (success that the last env step reported, by row [B]: 1 success, 0 none, -1 not reported; it
    labels the frames of datasets), `close()`.
    """

    num_envs: int
    action_dim: int
    max_episode_steps: int

    def reset(self, seeds: Sequence[int] | None = None, env_ids: Sequence[int] | None = None) -> Obs:
        """Start new episodes in rows `env_ids` (default: all), from `seeds` (default: the rows' next ones).

        Returns the observations of all B rows.
        """
        ...

    def chunk_step(self, actions: FloatArray) -> ChunkResult:
        """Execute actions [B, C, D], in the environment's own units."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """Optional part of a VecEnv or Simulator: a scripted expert, for demonstrations."""

    def expert_actions(self, num_actions: int) -> FloatArray:
        """The expert's next actions [B, n, D] from the present state, to execute in a row; nothing is stepped.

        n is `num_actions`, or less if the expert needs a new observation before that. Zeros in rows whose episode has
        ended. Raises EnvContractError where there is no expert.
        """
        ...


@dataclass(frozen=True)
class EnvSpec:
    """Sizes, bounds and names of an environment, from which a policy is built."""

    action_dim: int
    state_dim: int | None
    cameras: dict[str, tuple[int, int]]
    """Height and width by camera."""
    action_low: list[float]
    action_high: list[float]
    max_episode_steps: int
    has_instruction: bool
    state_names: list[str] | None = None
    """Names of the state's dimensions; None: the environment has no names."""
    action_names: list[str] | None = None


def get_env_spec(env: VecEnv, obs: Obs) -> EnvSpec:
    """The EnvSpec of an environment, from its attributes and one of its observations. Raises EnvContractError where
    names of dimensions are not one text each."""
    low, high = action_bounds(env)
    state_dim = obs["state"].shape[1] if "state" in obs else None
    return EnvSpec(
        action_dim=env.action_dim,
        state_dim=state_dim,
        cameras={name: (image.shape[1], image.shape[2]) for name, image in obs.get("images", {}).items()},
        action_low=low.tolist(),
        action_high=high.tolist(),
        max_episode_steps=env.max_episode_steps,
        has_instruction=any(obs.get("instruction", [])),
        state_names=_names(env, "state_names", state_dim),
        action_names=_names(env, "action_names", env.action_dim),
    )


def _names(env: VecEnv, attribute: str, num_dims: int | None) -> list[str] | None:
    given = getattr(env, attribute, None)
    if given is None or num_dims is None:
        return None
    names = [given] if isinstance(given, str) else list(given)
    if len(set(map(str, names))) != num_dims or not all(isinstance(name, str) for name in names):
        text = f"{attribute} is {given!r}; set it to {num_dims} different texts, one for each dimension, or to None."
        raise EnvContractError(text)
    return names


def action_bounds(env: VecEnv) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The action bounds [D] of an environment; -1 and 1 if it has none."""
    given = [(getattr(env, "action_low", None), -1.0), (getattr(env, "action_high", None), 1.0)]
    low, high = (np.full(env.action_dim, one) if bound is None else np.asarray(bound, float) for bound, one in given)
    return low, high


def put_rows(obs: Obs, rows: Any, part: Obs) -> None:
    """Write `part` (one entry per row of `rows`) into `obs`, in place."""
    for name, image in part.get("images", {}).items():
        obs["images"][name][rows] = image
    if "state" in part:
        obs["state"][rows] = part["state"]
    for i, text in zip(rows, part.get("instruction", []), strict=False):
        obs["instruction"][i] = text


def first_non_finite(array: NDArray[Any]) -> tuple[int, ...] | None:
    """Index of the first entry that is NaN or infinite; None if there is none."""
    if math.isfinite(np.vdot(array, array)):  # half the time of np.isfinite; overflows only if an entry is huge
        return None
    found = np.argwhere(~np.isfinite(array))
    return tuple(found[0].tolist()) if len(found) else None
