"""Pictures of MuJoCo models without a window: exactly as mujoco draws them, or faster with less detail."""

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

if sys.platform == "linux":  # mujoco reads this when it is first imported; its own default needs a display
    os.environ.setdefault("MUJOCO_GL", "egl")

_DEVICE_ID = "MUJOCO_EGL_DEVICE_ID"
_EGL_CUDA_DEVICE_NV = 0x323A
_UNSEEN = 5
"""A group of geoms that MuJoCo's default options do not draw."""
_INSTALL = (
    "Install an OpenGL driver that works without a display (EGL): a GPU's own comes with it, a software one is, on "
    "Debian, apt-get install libegl1 libgl1-mesa-dri"
)

_IMPORTED_BEFORE = (
    "mujoco was imported before MUJOCO_GL was set: set it in the program's environment, or import "
    "rlinf_lite.envs.painter before mujoco"
)


class Painter:
    """Draws pictures of all environments of one task. A process may have several; each is used by one thread."""

    def __init__(
        self,
        model: Any,
        camera_size: tuple[int, int],
        render: Literal["fast", "exact"],
        key: str,
        instead: str = "",
        hidden_groups: Sequence[int] = (),
    ) -> None:
        """`model` is the MuJoCo model of one of the environments; its rendering quality is changed. `key` (the option
        that asks for pictures) and `instead` (advice for running without) are for messages. Geoms of `hidden_groups`
        are not drawn.

        Raises RenderUnavailableError.
        """
        import mujoco

        height, width = camera_size
        quality, buffer = model.vis.quality, model.vis.global_
        if render == "fast":
            quality.offsamples, buffer.offheight, buffer.offwidth = 0, height, width
        else:
            buffer.offheight, buffer.offwidth = max(buffer.offheight, height), max(buffer.offwidth, width)
        draws_by_egl = mujoco.gl_context.GLContext.__module__ == "mujoco.egl"
        try:
            with _egl_device() if draws_by_egl else nullcontext():
                self._renderer = mujoco.Renderer(model, height, width, max_geom=1000)
        except RenderUnavailableError as error:
            raise RenderUnavailableError(f"{key}: {error}") from error
        except Exception as error:  # AttributeError of PyOpenGL without a library, many others without a driver
            backend = os.environ.get("MUJOCO_GL", "its default")
            late = backend == "egl" and not draws_by_egl
            raise RenderUnavailableError(
                f"{key}: no picture can be drawn by MUJOCO_GL={backend} ({type(error).__name__}: {error}). "
                f"{_IMPORTED_BEFORE if late else _INSTALL}{instead}"
            ) from error
        atexit.register(self._renderer.close)  # before mujoco ends EGL, after which closing fails
        if render == "fast":
            for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                self._renderer.scene.flags[flag] = 0
        self._visible = mujoco.MjvOption()
        for group in hidden_groups:
            self._visible.geomgroup[group] = 0
        self._mj_model, self._size, self._skips_unseen = model, camera_size, render == "fast"
        self._groups = model.geom_group.copy()

    def paint(self, data: Any, camera: str) -> NDArray[np.uint8]:
        """Picture of a camera now, [H, W, 3], the highest row first. `data` is the MjData of one of the
        environments."""
        if self._skips_unseen:
            self._mj_model.geom_group[_out_of_view(self._mj_model, data, camera, self._size)] = _UNSEEN
        try:
            self._renderer.update_scene(data, camera, self._visible)
        finally:
            self._mj_model.geom_group[:] = self._groups
        image: NDArray[np.uint8] = self._renderer.render()
        return image

    def close(self) -> None:
        atexit.unregister(self._renderer.close)
        self._renderer.close()


def _out_of_view(model: Any, data: Any, camera: str, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Which geoms have their bounding sphere beside or behind a camera's picture [H, W]. Drawing them costs as much as
    if they were seen: a camera at a robot's hand has most of the robot behind it."""
    number = model.camera(camera).id
    x, y, z = ((data.geom_xpos - data.cam_xpos[number]) @ data.cam_xmat[number].reshape(3, 3)).T
    radius, depth = model.geom_rbound, -z
    height = np.tan(np.deg2rad(model.cam_fovy[number]) / 2)  # of half the picture, at a depth of 1
    width = height * size[1] / size[0]
    beside = (np.abs(x) - depth * width > radius * np.hypot(1, width)) | (
        np.abs(y) - depth * height > radius * np.hypot(1, height)
    )
    unseen: NDArray[np.bool_] = (radius > 0) & (beside | (depth < -radius))  # planes have a radius of 0
    return unseen


@contextmanager
def _egl_device() -> Iterator[None]:
    """A context in which MUJOCO_EGL_DEVICE_ID names the device to draw on: the user's choice, else the first GPU of
    this worker's slot, else the first device that can draw. (EGL ignores CUDA_VISIBLE_DEVICES and lists all devices.)
    """
    from mujoco import egl

    chosen = os.environ.get(_DEVICE_ID)
    if egl.EGL_DISPLAY is not None:  # a process draws on one device
        yield
        return
    try:
        for device in [chosen] if chosen is not None else _own_gpu_first(egl.EGL.eglQueryDevicesEXT()):
            os.environ[_DEVICE_ID] = device
            # tested before mujoco makes a context: an incomplete one prints long errors when it is deleted
            if egl.create_initialized_egl_device_display() != egl.EGL.EGL_NO_DISPLAY:
                break
        else:
            raise RuntimeError("no device of EGL can draw")
        yield
    finally:
        if chosen is None:
            os.environ.pop(_DEVICE_ID, None)


def _own_gpu_first(devices: Sequence[Any]) -> list[str]:
    numbers = [str(number) for number in range(len(devices))]
    if (own := _own_gpu(devices)) is not None:
        numbers.insert(0, numbers.pop(own))
    return numbers


def _own_gpu(devices: Sequence[Any]) -> int | None:
    """Index of the EGL device that is the first GPU of CUDA_VISIBLE_DEVICES; None: no GPU is named, or it is not here.

    The driver reports the place of each visible device in CUDA_VISIBLE_DEVICES, for all kinds of names. If it does not,
    EGL is assumed to list GPUs in the order of `nvidia-smi`. Raises RenderUnavailableError for a name that neither
    knows.
    """
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    gpus = [i for i, device in enumerate(devices) if _is_nvidia(device)]
    if not gpus or names[0] in ("", "-1", "NoDevFiles"):
        return None
    places = {i: place for i in gpus if (place := _cuda_place(devices[i])) is not None}
    firsts = [i for i, place in places.items() if place == 0]
    if len(firsts) == 1 and len(places) <= len(names):  # older drivers also number devices that are not visible
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
    """A device's number among those that are visible to CUDA; None if the driver does not report it."""
    from OpenGL import EGL

    if not (address := EGL.eglGetProcAddress("eglQueryDeviceAttribEXT")):
        return None
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_ssize_t))(address)
    place = ctypes.c_ssize_t(-1)
    return place.value if query(device, _EGL_CUDA_DEVICE_NV, ctypes.byref(place)) and place.value >= 0 else None


def _number_of(name: str) -> int | None:
    """The number of the only GPU whose UUID, or the UUID of one of its MIG instances, begins with `name`."""
    number, found = -1, set[int]()
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "-L"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
        for line in lines:  # GPU 0: NVIDIA A100 (UUID: GPU-5d5ba0d6-...), then a line for each of its MIG instances
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
