"""Pictures of MetaWorld as in the public data, and a check of whether this machine can draw them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.envs.metaworld.card import CAMERA
from rlinf_lite.envs.painter import Painter

if TYPE_CHECKING:
    from rlinf_lite.envs.metaworld.card import MetaWorldOptions

CAMERA_POSITION = (0.75, 0.075, 0.7)
"""Position of the public data's camera in metres; the library's own camera stands elsewhere."""


def painter_of(model: Any, options: MetaWorldOptions) -> Painter:
    """A painter for a task's MuJoCo model. Raises RenderUnavailableError."""
    key, instead = "env.options.obs_mode", ". Or train from states: env.options.obs_mode=state"
    return Painter(model, options.camera_size, options.render, key, instead)


def picture(painter: Painter, data: Any) -> NDArray[np.uint8]:
    """Picture [H, W, 3], flipped in both axes as in the public data."""
    return painter.paint(data, CAMERA)[::-1, ::-1]


def painted(env_id: str) -> str:
    """A check for doctor: draw pictures of the first task. Raises if that fails, or if they are blank."""
    import time

    from rlinf_lite.config import EnvConfig
    from rlinf_lite.envs.registry import make_env

    cfg = EnvConfig.model_validate({"id": env_id, "options": {"obs_mode": "rgb"}})
    env = make_env(cfg, "train", 1)
    image = env.reset([1])["images"][CAMERA]
    if image.std() < 1:
        raise RuntimeError(f"the picture is blank (all pixels near {image.mean():.0f})")
    actions = np.zeros((1, 1, 4), np.float32)
    started = time.perf_counter()
    for _ in range(10):
        env.chunk_step(actions)
    return f"128 x 128 pictures of {cfg.task} in {1e2 * (time.perf_counter() - started):.0f} ms, a step included"
