"""Pictures of MuJoCo models without a window, by EGL: exactly as mujoco draws them, or fast."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlinf_lite.envs.errors import RenderUnavailableError

_EGL_CUDA_DEVICE_NV = 0x323A
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
        except RenderUnavailableError as error:
            raise RenderUnavailableError(f"{key}: {error}") from error
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
        devices = list(listed())
        if "MUJOCO_EGL_DEVICE_ID" not in os.environ and (own := _own_gpu(devices)) is not None:
            devices.insert(0, devices.pop(own))
        return devices

    egl_ext.eglQueryDevicesEXT = own_first
    try:
        yield
    finally:
        egl_ext.eglQueryDevicesEXT = listed


def _own_gpu(devices: Sequence[Any]) -> int | None:
    """Which of EGL's devices is the first of CUDA_VISIBLE_DEVICES; None: it names none that is here.

    The driver knows, whatever the names are: it gives the devices that are visible their places there. One that does
    not say so is taken to list GPUs as `nvidia-smi` does. Raises RenderUnavailableError for a name of neither.
    """
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    gpus = [i for i, device in enumerate(devices) if _is_nvidia(device)]
    if not gpus or names[0] in ("", "-1", "NoDevFiles"):
        return None
    places = {i: place for i in gpus if (place := _cuda_place(devices[i])) is not None}
    firsts = [i for i, place in places.items() if place == 0]
    if len(firsts) == 1 and len(places) <= len(names):  # older drivers number what is not visible, too
        return firsts[0]
    if len(gpus) == 1 and not names[0].isdecimal():
        return gpus[0]
    number = int(names[0]) if names[0].isdecimal() else _number_of(names[0])
    if number is None:
        raise RenderUnavailableError(
            f"CUDA_VISIBLE_DEVICES names {names[0]!r}, and neither EGL nor `nvidia-smi -L` says which of {len(gpus)} "
            "GPUs that is. Name GPUs by their numbers, or set MUJOCO_EGL_DEVICE_ID to the device that is to draw"
        )
    return gpus[number] if number < len(gpus) else None


def _cuda_place(device: Any) -> int | None:
    """A device's number among those that are visible to CUDA; None where the driver gives it none."""
    from OpenGL import EGL

    if not (address := EGL.eglGetProcAddress("eglQueryDeviceAttribEXT")):
        return None
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_ssize_t))(address)
    place = ctypes.c_ssize_t(-1)
    return place.value if query(device, _EGL_CUDA_DEVICE_NV, ctypes.byref(place)) and place.value >= 0 else None


def _number_of(name: str) -> int | None:
    """The number of the one GPU that has, or holds a MIG instance that has, a UUID that begins so."""
    number, found = -1, set[int]()
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "-L"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
        for line in lines:  # GPU 0: NVIDIA A100 (UUID: GPU-5d5ba0d6-...), and under it those of its MIG instances
            if gpu := re.match(r"GPU (\d+):", line):
                number = int(gpu[1])
            if (uuid := re.search(r"\(UUID: ([^)\s]+)\)", line)) and uuid[1].startswith(name):
                found.add(number)
    return found.pop() if len(found) == 1 else None


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
