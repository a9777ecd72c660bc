"""Seeds of episodes as pure functions, so that initial states depend neither on placement nor on history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def finalised(value: Any) -> Any:
    """splitmix64's finaliser (Steele et al. 2014, "Fast splittable pseudorandom number generators"), of an int below
    2**64 or of an array of uint64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix(value: int) -> int:
    return int(finalised((value + GOLDEN) & _MASK))


def env_seed(seed: int, env_id: int) -> int:
    """First seed of the environment with this global id, in [0, 2**31), a range that all simulators accept."""
    return _mix(_mix(seed & _MASK) ^ (env_id & _MASK)) >> 33


def episode_seed(first_seed: int, episode_index: int, num_scenes: int = 1) -> int:
    """Seed of the k-th episode of a row; episode 0 has the first seed itself. All episodes of a row have the same seed
    modulo `num_scenes`, and so play the same scene (see `EnvCard.num_scenes`)."""
    if episode_index == 0:
        return first_seed
    return _with_remainder(_mix(_mix(first_seed & _MASK) + episode_index) >> 33, first_seed, num_scenes)


def balanced_seed(seed: int, episode: int, num_tasks: int) -> int:
    """Seed of an episode of an evaluation or of demonstrations: its `env_seed`, changed by less than `num_tasks` so
    that consecutive episodes play the tasks in turn (see `EnvCard.num_tasks`)."""
    return _with_remainder(env_seed(seed, episode), episode, num_tasks)


def _with_remainder(seed: int, number: int, divisor: int) -> int:
    """The seed, changed by less than `divisor` so that its remainder is that of `number`."""
    first = seed - seed % divisor
    if first + divisor > 1 << 31:
        first -= divisor
    return first + number % divisor


def episode_order(num_episodes: int, num_envs: int, num_scenes: int) -> NDArray[np.int64]:
    """Numbers of episodes by wave and row, [W, num_envs], of an evaluation or of demonstrations. Episode e plays scene
    `e % num_scenes` (see `EnvCard.num_scenes`). A row goes on to another scene as rarely as possible, because it has to
    build it. Numbers from `num_episodes` on fill the last wave, and do not count."""
    num_waves = -(-num_episodes // num_envs)
    waves = np.arange(num_waves * num_envs).reshape(num_waves, num_envs)
    if num_envs % num_scenes:
        episodes = np.arange(num_episodes)
        by_scene = episodes[np.argsort(episodes % num_scenes, kind="stable")]
        for row, its_own in enumerate(np.array_split(by_scene, num_envs)):  # the first rows have one more
            waves[: len(its_own), row] = its_own
    return waves


def seeded_uniforms(seeds: Sequence[int], count: int) -> NDArray[np.float64]:
    """`count` uniform numbers in [0, 1) for each seed, [B, count]: splitmix64's sequences of all seeds at once."""
    first = np.array([_mix(seed & _MASK) for seed in seeds], np.uint64)
    value = finalised(first[:, None] + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN))
    uniforms: NDArray[np.float64] = (value >> np.uint64(11)) * 2.0**-53
    return uniforms
