"""Quiet import of ManiSkill, the choice of devices for simulation and rendering, and SAPIEN's physics for GPUs."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from rlinf_lite.envs.errors import EnvContractError, MissingAssetsError, MissingExtraError, RenderUnavailableError

if TYPE_CHECKING:
    from rlinf_lite.envs.maniskill.card import ManiSkillOptions

log = logging.getLogger(__name__)

_LIBRARY = "libPhysXGpu_64.so"
_FETCH_S = 240.0  # less than `control.hang_timeout_s`
_FETCH = """
import pathlib, signal, sys
signal.alarm(int(sys.argv[2]))
pathlib.Path.home = staticmethod(lambda: pathlib.Path(sys.argv[1]))
import sapien.physx
sapien.physx.enable_gpu()
"""
_INSTALL = (
    "Install a Vulkan driver: the GPU's own on a machine with one, else software Vulkan, Mesa 25 or newer (Debian 12: "
    "add the suite bookworm-backports to your apt sources, then apt-get update && "
    "apt-get install -t bookworm-backports libvulkan1 mesa-vulkan-drivers), or train from states: "
    "env.options.obs_mode=state."
)


@dataclass(frozen=True)
class Backends:
    """The resolved backends of a simulation."""

    sim: str
    """physx_cpu or physx_cuda."""
    render: str
    """none, cpu or gpu."""


class InertMaterial:
    """Replacement for `sapien.render.RenderMaterial`, which raises if there is no Vulkan device.

    Tasks make materials while they are built, but simulation never reads them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def import_maniskill() -> None:
    """Import mani_skill without its messages, which do not concern the run. Raises MissingExtraError."""
    if importlib.util.find_spec("mani_skill") is None:
        raise MissingExtraError("mani_skill", "maniskill")
    with _quiet():
        import sapien.render

        sapien.render.set_log_level("off")
        import mani_skill.envs  # noqa: F401
    logging.getLogger("mani_skill").setLevel(logging.ERROR)


def plan_backends(cfg: ManiSkillOptions) -> Backends:
    """Resolve `auto` options. If no images are wanted and no device can render, also install the inert material.

    Raises RenderUnavailableError if images are wanted but no device renders, or not the one that simulates, and
    EnvContractError if CUDA is missing.
    """
    import torch

    sim, render, has_cuda = cfg.sim_backend, cfg.render_backend, torch.cuda.is_available()
    wants_pictures = cfg.obs_mode != "state"
    if render == "auto" and wants_pictures:
        render = "gpu" if _can_render("cuda") else "cpu"
    renders_on_gpu = render == "gpu" or not wants_pictures  # simulation on a GPU needs its pictures there
    if sim == "auto":
        sim = "physx_cuda" if has_cuda and renders_on_gpu else "physx_cpu"
    elif sim == "physx_cuda" and not has_cuda:
        raise EnvContractError(
            "sim_backend is physx_cuda, and this worker sees no CUDA device: use physx_cpu, or put env on GPU slots.",
            "env.options",
        )
    if not wants_pictures and render in ("auto", "none"):
        if not material_works():
            use_inert_material()
        return Backends(sim, "none")
    if render == "none":
        raise RenderUnavailableError(
            f"env.options: obs_mode {cfg.obs_mode} needs a renderer, and render_backend is none: set it to auto."
        )
    if sim == "physx_cuda" and not renders_on_gpu:
        raise RenderUnavailableError(
            f"env.options: sim_backend is physx_cuda, which needs pictures from the GPU, and "
            f"{'the GPU has no Vulkan device' if cfg.render_backend == 'auto' else 'render_backend is cpu'}. Set "
            "sim_backend to physx_cpu, or give the GPU Vulkan (in a container NVIDIA_DRIVER_CAPABILITIES=all)."
        )
    if not _can_render("cuda" if render == "gpu" else "cpu"):
        raise RenderUnavailableError(f"env.options: no Vulkan device for render_backend {render}. {_INSTALL}")
    return Backends(sim, render)


def load_gpu_physics(limit_s: float = _FETCH_S) -> None:
    """Load SAPIEN's physics for GPUs, and fetch it first if it is missing. Raises MissingAssetsError.

    The library is not in SAPIEN's package. SAPIEN itself would fetch it on first use, without a time limit, and in all
    processes at once. Here one process fetches it, within `limit_s` seconds, while the others wait; none of them sees
    an incomplete file.
    """
    import sapien.physx

    key, version = "env.options.sim_backend", sapien.physx.version()
    try:
        directory = Path.home() / ".sapien" / "physx" / version
        if not (directory / _LIBRARY).exists():
            _fetch_gpu_physics(directory, limit_s)
    except (OSError, RuntimeError) as error:
        archive = f"linux-{'' if platform.machine() in ('x86_64', 'AMD64') else 'aarch64-'}so.zip"
        text = (
            "physx_cuda needs SAPIEN's physics for GPUs, which is fetched from github.com on first use. That failed: "
            f"{error}. Without a network, unpack {archive} of "
            f"https://github.com/sapien-sim/physx-precompiled/releases/tag/{version} in ~/.sapien/physx/{version} on "
            "each node that simulates. Or simulate on CPUs: env.options.sim_backend=physx_cpu"
        )
        raise MissingAssetsError(text, key) from error
    try:
        sapien.physx.enable_gpu()
    except (OSError, RuntimeError) as error:
        text = (
            f"physx_cuda needs SAPIEN's physics for GPUs, which does not load: {error}. Some containers lack "
            f"libcuda.so, a link to the driver's libcuda.so.1. To fetch the library again, remove {directory}. Or "
            "simulate on CPUs: env.options.sim_backend=physx_cpu"
        )
        raise MissingAssetsError(text, key) from error


def _fetch_gpu_physics(directory: Path, limit_s: float) -> None:
    """Fetch SAPIEN's physics for GPUs into a directory, unless another process has done so. Raises OSError."""
    deadline = time.monotonic() + limit_s
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / ".lock", timeout=limit_s), TemporaryDirectory(dir=directory) as home:
        if (directory / _LIBRARY).exists():
            return
        log.warning("fetching SAPIEN's physics for GPUs to %s, once, for at most %.0f s", directory, limit_s)
        left_s = max(deadline - time.monotonic(), 1.0)
        words = [sys.executable, "-c", _FETCH, home, str(math.ceil(left_s))]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=left_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"it took longer than {limit_s:.0f} s") from error
        if done.returncode and "Download complete" not in done.stdout:  # then only loading it has failed
            raise OSError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
        fetched = Path(home, *directory.parts[-3:])
        for file in sorted(fetched.iterdir(), key=lambda file: file.name == _LIBRARY):
            os.replace(file, directory / file.name)


def rendered_frame(env_id: str) -> str:
    """A check for doctor: render one frame of the first task. Raises if no device can, or if the frame is blank."""
    from rlinf_lite.config import EnvConfig
    from rlinf_lite.envs.registry import make_env

    options = {"obs_mode": "rgb", "camera_size": [128, 128], "sim_backend": "physx_cpu"}
    cfg = EnvConfig.model_validate({"id": env_id, "options": options})
    env = make_env(cfg, "train", 1)
    image = next(iter(env.reset([1])["images"].values()))
    if image.std() < 1:
        raise RuntimeError(f"the frame is blank (all pixels near {image.mean():.0f})")
    started = time.perf_counter()
    for _ in range(3):
        env.reset([1])
    return f"a 128 x 128 frame of {cfg.task} in {1e3 / 3 * (time.perf_counter() - started):.0f} ms, reset included"


def gpu_physics(env_id: str) -> str:
    """A check for doctor: load PhysX for GPUs, and fetch it if it is missing. Raises MissingAssetsError."""
    import torch

    if not torch.cuda.is_available():
        return "no GPU: ManiSkill simulates on CPUs"
    load_gpu_physics(limit_s=150.0)  # doctor stops a check after 180 s
    return "SAPIEN's library for GPUs loads"


def material_works() -> bool:
    """Whether SAPIEN finds a Vulkan device, which its materials need. Mesa 22's lavapipe is not enough."""
    import sapien.render

    if sapien.render.RenderMaterial is InertMaterial:
        return False
    try:
        sapien.render.RenderMaterial()
    except RuntimeError:
        return False
    return True


def use_inert_material() -> None:
    """Replace SAPIEN's RenderMaterial by InertMaterial in all modules of SAPIEN and ManiSkill."""
    import sapien.render

    real = sapien.render.RenderMaterial
    for name, module in list(sys.modules.items()):
        if name.startswith(("sapien", "mani_skill")) and getattr(module, "RenderMaterial", None) is real:
            module.RenderMaterial = InertMaterial  # type: ignore[attr-defined]


def _can_render(device: str) -> bool:
    import sapien

    if device == "cpu":  # Device("cpu").can_render() is wrongly False for software Vulkan
        return material_works()
    try:
        return bool(sapien.Device(device).can_render())
    except RuntimeError:  # no such device
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """A context that hides warnings, and the output of native code to stderr while it looks for a renderer."""
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(saved, 2)
        os.close(sink)
        os.close(saved)
