"""Environments: the chunked protocol, its one implementation over small simulator backends, a registry and checks.

Importable without torch, ray or any simulator.
"""

from rlinf_lite.envs.base import ChunkResult, Demonstrator, EnvSpec, EpisodeRecord, Obs, VecEnv, get_env_spec, put_rows
from rlinf_lite.envs.check import check_env, ensure_valid_env
from rlinf_lite.envs.chunked import ChunkedEnv
from rlinf_lite.envs.errors import (
    EnvContractError,
    EnvError,
    EpisodeError,
    MissingExtraError,
    NonFiniteError,
    RenderUnavailableError,
    RowError,
    SimulatorError,
)
from rlinf_lite.envs.registry import make_vec_env, register_env
from rlinf_lite.envs.seeding import balanced_seed, env_seed, episode_seed
from rlinf_lite.envs.simulator import Simulator, StepOutputs
from rlinf_lite.registry import UnknownEnvError

__all__ = [
    "ChunkResult",
    "ChunkedEnv",
    "Demonstrator",
    "EnvContractError",
    "EnvError",
    "EnvSpec",
    "EpisodeError",
    "EpisodeRecord",
    "MissingExtraError",
    "NonFiniteError",
    "Obs",
    "RenderUnavailableError",
    "RowError",
    "Simulator",
    "SimulatorError",
    "StepOutputs",
    "UnknownEnvError",
    "VecEnv",
    "balanced_seed",
    "check_env",
    "ensure_valid_env",
    "env_seed",
    "episode_seed",
    "get_env_spec",
    "make_vec_env",
    "put_rows",
    "register_env",
]
