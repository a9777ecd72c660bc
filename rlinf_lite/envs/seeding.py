"""Seeds as pure functions, so that initial states depend neither on placement nor on history."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """splitmix64's finaliser (Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def env_seed(seed: int, env_id: int) -> int:
    """First seed of the environment with this global id: in [0, 2**31), which every simulator's generator takes."""
    return _mix(_mix(seed & _MASK) ^ (env_id & _MASK)) >> 33


def episode_seed(first_seed: int, episode_index: int) -> int:
    """Seed of the k-th episode of a row; the 0-th has the first seed itself."""
    if episode_index == 0:
        return first_seed
    return _mix(_mix(first_seed & _MASK) + episode_index) >> 33
