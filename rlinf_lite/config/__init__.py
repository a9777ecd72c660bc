"""Configuration: schema (pydantic), loading (Hydra) and cross-checks. Needs neither torch nor ray."""

from rlinf_lite.config.errors import ConfigError
from rlinf_lite.config.loading import load_config
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import AlgorithmConfig, Config, EnvConfig

__all__ = ["AlgorithmConfig", "Config", "ConfigError", "EnvConfig", "ReasoningConfig", "load_config"]
