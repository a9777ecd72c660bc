"""Sampling noise as a function of (seed, environment, decision), so that an environment's actions depend neither on the
others in its batch nor on the order in which environments are ready.

The key of a row is a hash of the three; the numbers of a row are hashes of its key and their position.
"""

from __future__ import annotations

import numpy as np

from rlinf_lite.envs.seeding import GOLDEN, finalised

_GOLDEN = np.uint64(GOLDEN)
START_NOISE = "start_noise"
"""Key of `obs` under which a flow policy finds the noise to start from, [B, H, D], instead of drawing it."""


def noise_keys(seed: int, env_ids: np.ndarray, decisions: np.ndarray | int) -> np.ndarray:
    """Keys uint64 [B], one per row, from the run's seed, environment ids [B] and decision indices ([B] or one)."""
    with np.errstate(over="ignore"):
        key = finalised(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN)
        key = finalised(key + np.asarray(env_ids).astype(np.uint64) * _GOLDEN)
        return finalised(key + (np.asarray(decisions).astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def uniform_noise(keys: np.ndarray, num: int) -> np.ndarray:
    """Uniform numbers in the open interval (0, 1), float64 [B, num]."""
    with np.errstate(over="ignore"):
        positions = np.arange(1, num + 1, dtype=np.uint64) * _GOLDEN
        bits = finalised(keys[:, None] + positions[None, :])
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal_noise(keys: np.ndarray, num: int) -> np.ndarray:
    """Standard normal numbers, float32 [B, num] (Box-Muller)."""
    half = (num + 1) // 2
    uniform = uniform_noise(keys, 2 * half)
    radius = np.sqrt(-2.0 * np.log(uniform[:, :half]))
    angle = 2.0 * np.pi * uniform[:, half:]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return normal[:, :num].astype(np.float32)
