from .explain import ConfigError as ConfigError
from .loading import load_config as load_config
from .reasoning import ReasoningConfig as ReasoningConfig
from .schema import AlgorithmConfig as AlgorithmConfig
from .schema import Config as Config
from .schema import EnvConfig as EnvConfig
