"""Pictures of MuJoCo models without a window, by EGL: as the public data has them, exactly or fast."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.envs.errors import RenderUnavailableError
from rlinf_lite.envs.metaworld.card import CAMERA

if TYPE_CHECKING:
    from rlinf_lite.envs.metaworld.card import MetaWorldOptions

CAMERA_POSITION = (0.75, 0.075, 0.7)
"""Where the camera of the public data stands, in metres; the library's own stands elsewhere."""
_INSTALL = (
    "Install an OpenGL driver that works without a display (EGL): a GPU's own comes with it, a software one is, on "
    "Debian, apt-get install libegl1 libgl1-mesa-dri. Or train from states: env.options.obs_mode=state"
)


class Painter:
    """Draws all environments of one task, which share its meshes. One process may hold many, never two threads one."""

    def __init__(self, model: Any, options: MetaWorldOptions) -> None:
        """`model` is one of the task's, whose rendering quality is changed. Raises RenderUnavailableError."""
        import mujoco

        self._height, self._width = options.camera_size
        quality, buffer = model.vis.quality, model.vis.global_
        if options.render == "fast":
            quality.offsamples, buffer.offheight, buffer.offwidth = 0, self._height, self._width
        else:
            buffer.offheight = max(buffer.offheight, self._height)
            buffer.offwidth = max(buffer.offwidth, self._width)
        try:
            self._gl = _gl_context(self._width, self._height)
            self._gl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        except Exception as error:  # a missing library is an AttributeError of PyOpenGL's, a missing driver many others
            raise RenderUnavailableError(
                f"env.options.obs_mode: no picture can be drawn by MUJOCO_GL={_backend() or 'its default'} "
                f"({type(error).__name__}: {error}). {_INSTALL}"
            ) from error
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        if options.render == "fast":
            for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                self._scene.flags[flag] = 0
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera.fixedcamid = model.camera(CAMERA).id
        self._viewport = mujoco.MjrRect(0, 0, self._width, self._height)
        self._seen, self._untouched = mujoco.MjvOption(), mujoco.MjvPerturb()

    def paint(self, model: Any, data: Any) -> NDArray[np.uint8]:
        """What the camera sees now, [H, W, 3], flipped in both axes as the public data is."""
        import mujoco

        self._gl.make_current()
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, self._seen, self._untouched, self._camera, everything, self._scene)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)  # each task's context has its own
        mujoco.mjr_render(self._viewport, self._scene, self._context)
        image = np.empty((self._height, self._width, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, self._viewport, self._context)
        return image[:, ::-1]  # OpenGL's rows begin at the bottom, which is one of the two flips

    def close(self) -> None:
        self._gl.make_current()
        self._context.free()


_CONTEXTS: list[Any] = []
"""The process's GL context, made when the first picture is wanted: forked workers must not share one."""


def _gl_context(width: int, height: int) -> Any:
    if not _CONTEXTS:
        if _backend() == "egl":
            from mujoco.egl import GLContext
        else:
            from mujoco.gl_context import GLContext
        _CONTEXTS.append(GLContext(width, height))
        atexit.register(_CONTEXTS[0].free)  # before mujoco ends EGL, after which freeing it fails
    return _CONTEXTS[0]


def _backend() -> str:
    """What the user has set, else what draws without a display; mujoco's own default needs one."""
    return os.environ.get("MUJOCO_GL") or ("egl" if sys.platform == "linux" else "")


def painted(env_id: str) -> str:
    """For doctor: draw some pictures of the first task. Raises where nothing can, or they are blank."""
    import time

    from rlinf_lite.config import EnvConfig
    from rlinf_lite.envs.registry import make_vec_env

    cfg = EnvConfig.model_validate({"id": env_id, "options": {"obs_mode": "rgb"}})
    env = make_vec_env(cfg, "train", 1)
    image = env.reset([1])["images"][CAMERA]
    if image.std() < 1:
        raise RuntimeError(f"the picture is blank (all pixels near {image.mean():.0f})")
    actions = np.zeros((1, 1, 4), np.float32)
    started = time.perf_counter()
    for _ in range(10):
        env.chunk_step(actions)
    return f"128 x 128 pictures of {cfg.task} in {1e2 * (time.perf_counter() - started):.0f} ms, a step included"
