"""ManiSkill 3 behind one adapter: CPU simulation (one scene per row) or GPU simulation (one batch), state or images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.envs.simulator import Simulator

if TYPE_CHECKING:
    from rlinf_lite.config import EnvConfig


def make_env(num_envs: int, cfg: EnvConfig) -> Simulator:
    """Builds `num_envs` environments of `cfg.task`.

    Raises MissingExtraError, UnknownEnvError, RenderUnavailableError, or EnvContractError where a setting does not fit.
    """
    from rlinf_lite.envs.maniskill.setup import import_maniskill, plan_backends

    import_maniskill()
    backends = plan_backends(cfg.maniskill)
    if backends.sim == "physx_cuda":
        from rlinf_lite.envs.maniskill.cuda import CudaSimulator

        return CudaSimulator(num_envs, cfg, backends)
    from rlinf_lite.envs.maniskill.cpu import CpuSimulator

    return CpuSimulator(num_envs, cfg, backends)
