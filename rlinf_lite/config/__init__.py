"""Configuration: schema (pydantic), loading (Hydra) and cross-checks. Needs neither torch nor ray.

`load_config` is imported when first used: workers import schemas, and do not need Hydra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.config.explain import ConfigError as ConfigError
from rlinf_lite.config.reasoning import ReasoningConfig as ReasoningConfig
from rlinf_lite.config.schema import AlgorithmConfig as AlgorithmConfig
from rlinf_lite.config.schema import Config as Config
from rlinf_lite.config.schema import EnvConfig as EnvConfig
from rlinf_lite.lazy import lazy_names

if TYPE_CHECKING:
    from rlinf_lite.config.loading import load_config as load_config

__getattr__ = lazy_names(__name__, {"loading": ["load_config"]})
