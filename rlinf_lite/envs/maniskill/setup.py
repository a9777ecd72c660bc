"""Importing ManiSkill quietly, and deciding where to simulate and where to render."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf_lite.envs.errors import EnvContractError, MissingExtraError, RenderUnavailableError

if TYPE_CHECKING:
    from rlinf_lite.envs.maniskill.card import ManiSkillOptions

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


def rendered_frame(env_id: str) -> str:
    """For doctor: render one frame of the first task. Raises where nothing can, or the frame is blank."""
    import time

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
