"""Importing ManiSkill quietly, and deciding where to simulate and where to render."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_lite.envs.errors import EnvContractError, MissingAssetsError, MissingExtraError, RenderUnavailableError

if TYPE_CHECKING:
    from rlinf_lite.envs.maniskill.card import ManiSkillOptions

log = logging.getLogger(__name__)

_FETCH_S = 240.0  # less than `control.hang_timeout_s`
_FETCH = "import sapien.physx; sapien.physx.enable_gpu()"
_INSTALL = (
    "Install a Vulkan driver: the GPU's own on a machine with one, else software Vulkan, Mesa 25 or newer (Debian 12: "
    "add the suite bookworm-backports to your apt sources, then apt-get update && "
    "apt-get install -t bookworm-backports libvulkan1 mesa-vulkan-drivers), or train from states: "
    "env.options.obs_mode=state."
)


@dataclass(frozen=True)
class Backends:
    sim: str
    """physx_cpu or physx_cuda"""
    render: str
    """none, cpu or gpu"""


class InertMaterial:
    """Stands in for `sapien.render.RenderMaterial`, which raises where there is no Vulkan device.

    Tasks make materials while they are built, and nothing that simulates ever reads one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def import_maniskill() -> None:
    """Imports mani_skill without the messages that say nothing about this run. Raises MissingExtraError."""
    if importlib.util.find_spec("mani_skill") is None:
        raise MissingExtraError("mani_skill", "maniskill")
    with _quiet():
        import sapien.render

        sapien.render.set_log_level("off")
        import mani_skill.envs  # noqa: F401
    logging.getLogger("mani_skill").setLevel(logging.ERROR)


def plan_backends(cfg: ManiSkillOptions) -> Backends:
    """Resolves `auto`, and puts the inert material in place where nothing can render and no image is asked for.

    Raises RenderUnavailableError where images are asked for and no device renders, or not the one that simulates;
    EnvContractError where CUDA is missing.
    """
    import torch

    sim, render, has_cuda = cfg.sim_backend, cfg.render_backend, torch.cuda.is_available()
    wants_pictures = cfg.obs_mode != "state"
    if render == "auto" and wants_pictures:
        render = "gpu" if _can_render("cuda") else "cpu"
    on_card = render == "gpu" or not wants_pictures  # what simulates on a card hands its pictures over there
    if sim == "auto":
        sim = "physx_cuda" if has_cuda and on_card else "physx_cpu"
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
    if sim == "physx_cuda" and not on_card:
        raise RenderUnavailableError(
            f"env.options: sim_backend is physx_cuda, which needs pictures from the card, and "
            f"{'there is no Vulkan device on it' if cfg.render_backend == 'auto' else 'render_backend is cpu'}. Set "
            "sim_backend to physx_cpu, or give the card Vulkan (in a container NVIDIA_DRIVER_CAPABILITIES=all)."
        )
    if not _can_render("cuda" if render == "gpu" else "cpu"):
        raise RenderUnavailableError(f"env.options: no Vulkan device for render_backend {render}. {_INSTALL}")
    return Backends(sim, render)


def fetch_gpu_physics(limit_s: float = _FETCH_S) -> None:
    """See that SAPIEN's physics for GPUs is on this machine, which is no part of its package: SAPIEN fetches it when it
    is first used, for as long as that takes, and all processes at once. Here one of them does, within `limit_s`, and
    the others wait for it. Raises MissingAssetsError."""
    import sapien.physx

    directory = Path.home() / ".sapien" / "physx" / sapien.physx.version()
    library, deadline = directory / "libPhysXGpu_64.so", time.monotonic() + limit_s
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory, deadline) as lock:
            if library.exists():
                return
            log.warning("fetching SAPIEN's physics for GPUs to %s, once, for at most %.0f s", directory, limit_s)
            words, left_s = [sys.executable, "-c", _FETCH], max(deadline - time.monotonic(), 1.0)
            try:  # it keeps the lock, too, should this process die
                subprocess.run(words, capture_output=True, text=True, timeout=left_s, check=True, pass_fds=(lock,))
            except BaseException:
                library.unlink(missing_ok=True)  # a part of it would be taken for the whole
                raise
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
        if isinstance(error, subprocess.TimeoutExpired):
            why = f"it was not there after {limit_s:.0f} s"
        elif isinstance(error, subprocess.CalledProcessError) and error.stderr.strip():
            why = error.stderr.strip().splitlines()[-1]
        source = f"https://github.com/sapien-sim/physx-precompiled/releases/tag/{sapien.physx.version()}"
        text = (
            "physx_cuda needs SAPIEN's physics for GPUs, which is fetched from github.com when it is first used, and "
            f"could not be: {why}. Without a network, bring it to {directory} on each node that simulates: "
            f"linux-so.zip of {source}, unpacked there. Or simulate on CPUs: env.options.sim_backend=physx_cpu"
        )
        raise MissingAssetsError(text, "env.options.sim_backend") from error


@contextmanager
def _locked(directory: Path, deadline: float) -> Iterator[int]:
    """A descriptor of it, while no other process has one. Raises TimeoutError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("another process was fetching it all the time") from None
                time.sleep(0.2)
        yield descriptor
    finally:
        os.close(descriptor)


def rendered_frame(env_id: str) -> str:
    """For doctor: render one frame of the first task. Raises where nothing can, or the frame is blank."""
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
    """For doctor: see that what simulates on GPUs is there, or fetch it. Raises MissingAssetsError."""
    import torch

    if not torch.cuda.is_available():
        return "no GPU: ManiSkill simulates on CPUs"
    fetch_gpu_physics(limit_s=150.0)  # doctor ends what takes longer than 180 s
    return "SAPIEN's library for GPUs is there"


def material_works() -> bool:
    """Whether there is a Vulkan device: only then can SAPIEN make materials. Mesa 22's lavapipe is none to it."""
    import sapien.render

    if sapien.render.RenderMaterial is InertMaterial:
        return False
    try:
        sapien.render.RenderMaterial()
    except RuntimeError:
        return False
    return True


def use_inert_material() -> None:
    import sapien.render

    real = sapien.render.RenderMaterial
    for name, module in list(sys.modules.items()):
        if name.startswith(("sapien", "mani_skill")) and getattr(module, "RenderMaterial", None) is real:
            module.RenderMaterial = InertMaterial  # type: ignore[attr-defined]


def _can_render(device: str) -> bool:
    import sapien

    if device == "cpu":  # Device("cpu").can_render() says no to software Vulkan, which renders
        return material_works()
    try:
        return bool(sapien.Device(device).can_render())
    except RuntimeError:  # no such device
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings, and what native code writes to stderr while it probes for a renderer."""
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
