"""Configuration: schema (pydantic), loading (Hydra) and cross-checks. Needs neither torch nor ray."""

from rlinf_lite.config.schema import AlgorithmConfig, Config, EnvConfig

__all__ = ["AlgorithmConfig", "Config", "EnvConfig"]
