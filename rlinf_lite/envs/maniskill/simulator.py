"""Choice of the simulator: one scene per row on the CPU, or all rows in one batch on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.envs.maniskill.setup import import_maniskill, load_gpu_physics, plan_backends

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig
    from rlinf_lite.envs.simulator import Simulator


def make_simulator(num_envs: int, cfg: EnvConfig) -> Simulator:
    """The simulator of a config. Raises MissingExtraError, MissingAssetsError, UnknownEnvError, RenderUnavailableError,
    or EnvContractError where an option does not fit."""
    import_maniskill()
    backends = plan_backends(cfg.options)
    if backends.sim == "physx_cuda":
        load_gpu_physics()
    from rlinf_lite.envs.maniskill.scenes import CpuSimulator, CudaSimulator

    simulator = CudaSimulator if backends.sim == "physx_cuda" else CpuSimulator
    return simulator(num_envs, cfg, backends)
