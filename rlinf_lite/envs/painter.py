"""Pictures of MuJoCo models without a window, by EGL: exactly as mujoco draws them, or fast."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.envs.errors import RenderUnavailableError

_INSTALL = (
    "Install an OpenGL driver that works without a display (EGL): a GPU's own comes with it, a software one is, on "
    "Debian, apt-get install libegl1 libgl1-mesa-dri"
)


class Painter:
    """Draws all environments of one task, which share its meshes. One process may hold many, never two threads one."""

    def __init__(
        self,
        model: Any,
        camera_size: tuple[int, int],
        render: Literal["fast", "exact"],
        key: str,
        instead: str = "",
        hidden_groups: Sequence[int] = (),
    ) -> None:
        """`model` is one of the task's, whose rendering quality is changed. `key` is the option that asks for pictures,
        `instead` what to do without, geoms of `hidden_groups` are not drawn. Raises RenderUnavailableError."""
        import mujoco

        self._height, self._width = camera_size
        quality, buffer = model.vis.quality, model.vis.global_
        if render == "fast":
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
                f"{key}: no picture can be drawn by MUJOCO_GL={_backend() or 'its default'} "
                f"({type(error).__name__}: {error}). {_INSTALL}{instead}"
            ) from error
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        if render == "fast":
            for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                self._scene.flags[flag] = 0
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._viewport = mujoco.MjrRect(0, 0, self._width, self._height)
        self._seen, self._untouched = mujoco.MjvOption(), mujoco.MjvPerturb()
        for group in hidden_groups:
            self._seen.geomgroup[group] = 0

    def paint(self, model: Any, data: Any, camera: str) -> NDArray[np.uint8]:
        """What a camera sees now, [H, W, 3], in OpenGL's order: the lowest row comes first."""
        import mujoco

        self._gl.make_current()
        self._camera.fixedcamid = model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, self._seen, self._untouched, self._camera, everything, self._scene)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)  # each task's context has its own
        mujoco.mjr_render(self._viewport, self._scene, self._context)
        image = np.empty((self._height, self._width, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, self._viewport, self._context)
        return image

    def close(self) -> None:
        self._gl.make_current()
        self._context.free()


_CONTEXTS: list[Any] = []
"""The process's GL context, made when the first picture is wanted: forked workers must not share one."""


def _gl_context(width: int, height: int) -> Any:
    if not _CONTEXTS:
        is_egl = _backend() == "egl"
        if is_egl:
            from mujoco.egl import GLContext
        else:
            from mujoco.gl_context import GLContext
        GLContext._context = None  # of one that could not be made, whose `__del__` else complains that it has none
        with _own_gpu_first() if is_egl else nullcontext():
            _CONTEXTS.append(GLContext(width, height))
        atexit.register(_CONTEXTS[0].free)  # before mujoco ends EGL, after which freeing it fails
    return _CONTEXTS[0]


@contextmanager
def _own_gpu_first() -> Iterator[None]:
    """mujoco draws on the first device that it can, and EGL lists all of a machine's, whatever CUDA_VISIBLE_DEVICES
    says: have it begin with the GPU of this worker's slot."""
    from mujoco.egl import egl_ext

    listed = egl_ext.eglQueryDevicesEXT

    def own_first() -> list[Any]:
        devices, number = list(listed()), os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
        if number.isdecimal() and "MUJOCO_EGL_DEVICE_ID" not in os.environ:
            gpus = [i for i, device in enumerate(devices) if _is_nvidia(device)]
            if int(number) < len(gpus):
                devices.insert(0, devices.pop(gpus[int(number)]))
        return devices

    egl_ext.eglQueryDevicesEXT = own_first
    try:
        yield
    finally:
        egl_ext.eglQueryDevicesEXT = listed


def _is_nvidia(device: Any) -> bool:
    from OpenGL import EGL
    from OpenGL.EGL.EXT.device_query import eglQueryDeviceStringEXT
    from OpenGL.error import Error

    try:
        return b"EGL_NV_device_cuda" in (eglQueryDeviceStringEXT(device, EGL.EGL_EXTENSIONS) or b"")
    except Error:
        return False


def _backend() -> str:
    """What the user has set, else what draws without a display; mujoco's own default needs one."""
    return os.environ.get("MUJOCO_GL") or ("egl" if sys.platform == "linux" else "")
