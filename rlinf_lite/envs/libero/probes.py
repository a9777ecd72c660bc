"""Checks of LIBERO for `rlinf-lite doctor`. Each runs in its own process."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np


def imported(env_id: str) -> str:
    """Check the library without assets: its import and the initial states of all tasks."""
    from rlinf_lite.envs.libero.package import import_libero, initial_states
    from rlinf_lite.envs.libero.tasks import SUITE_OF

    import_libero(Path("/nowhere"))
    for task in SUITE_OF:
        initial_states(task)
    return f"{len(SUITE_OF)} tasks, with their initial states"


def played(env_id: str) -> str:
    """Check an environment with both cameras. Raises without assets, without a driver, or for blank pictures."""
    from rlinf_lite.config import EnvConfig
    from rlinf_lite.envs.registry import make_env

    cfg = EnvConfig.model_validate({"id": env_id, "options": {"camera_size": [128, 128]}})
    env = make_env(cfg, "train", 1)
    images = env.reset([0])["images"]
    blank = [camera for camera, image in images.items() if image.std() < 1]
    if blank:
        raise RuntimeError(f"pictures are blank: {', '.join(blank)}")
    started = time.perf_counter()
    for _ in range(10):
        env.chunk_step(np.zeros((1, 1, 7), np.float32))
    return f"{cfg.task}: {10 / (time.perf_counter() - started):.0f} env steps/s with two pictures of 128 x 128 each"
