from .strategies import Strategy as Strategy
from .strategies import register_strategy as register_strategy
