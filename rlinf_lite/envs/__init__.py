"""Environments: the chunked protocol, its implementation for any `Simulator`, adapters, a registry and checks.

Importable without torch, ray or any simulator.
"""

from rlinf_lite.envs.base import ChunkResult as ChunkResult
from rlinf_lite.envs.base import Demonstrator as Demonstrator
from rlinf_lite.envs.base import EnvSpec as EnvSpec
from rlinf_lite.envs.base import EpisodeRecord as EpisodeRecord
from rlinf_lite.envs.base import Obs as Obs
from rlinf_lite.envs.base import VecEnv as VecEnv
from rlinf_lite.envs.base import get_env_spec as get_env_spec
from rlinf_lite.envs.base import put_rows as put_rows
from rlinf_lite.envs.check import check_env as check_env
from rlinf_lite.envs.check import ensure_valid_env as ensure_valid_env
from rlinf_lite.envs.chunked import ChunkedEnv as ChunkedEnv
from rlinf_lite.envs.errors import EnvContractError as EnvContractError
from rlinf_lite.envs.errors import EnvError as EnvError
from rlinf_lite.envs.errors import EpisodeContractError as EpisodeContractError
from rlinf_lite.envs.errors import EpisodeError as EpisodeError
from rlinf_lite.envs.errors import MissingAssetsError as MissingAssetsError
from rlinf_lite.envs.errors import MissingExtraError as MissingExtraError
from rlinf_lite.envs.errors import NonFiniteError as NonFiniteError
from rlinf_lite.envs.errors import RenderUnavailableError as RenderUnavailableError
from rlinf_lite.envs.errors import RowError as RowError
from rlinf_lite.envs.errors import SimulatorError as SimulatorError
from rlinf_lite.envs.errors import StepRewardError as StepRewardError
from rlinf_lite.envs.registry import make_env as make_env
from rlinf_lite.envs.registry import register_env as register_env
from rlinf_lite.envs.seeding import balanced_seed as balanced_seed
from rlinf_lite.envs.seeding import env_seed as env_seed
from rlinf_lite.envs.seeding import episode_order as episode_order
from rlinf_lite.envs.seeding import episode_seed as episode_seed
from rlinf_lite.envs.simulator import Simulator as Simulator
from rlinf_lite.envs.simulator import StepOutputs as StepOutputs
from rlinf_lite.registry import UnknownEnvError as UnknownEnvError
