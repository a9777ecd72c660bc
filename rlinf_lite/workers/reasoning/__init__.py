"""The roles of reinforcement learning for language models, each the workers of a group."""

from rlinf_lite.registry import UnknownStrategyError
from rlinf_lite.training.strategies import Strategy, register_strategy
from rlinf_lite.workers.reasoning.actor import LanguageActor
from rlinf_lite.workers.reasoning.critic import LanguageCritic
from rlinf_lite.workers.reasoning.reference import LanguageReference
from rlinf_lite.workers.reasoning.reward import RewardWorker
from rlinf_lite.workers.reasoning.roles import launch_roles
from rlinf_lite.workers.reasoning.rollout import LanguageRollout

__all__ = [
    "LanguageActor",
    "LanguageCritic",
    "LanguageReference",
    "LanguageRollout",
    "RewardWorker",
    "Strategy",
    "UnknownStrategyError",
    "launch_roles",
    "register_strategy",
]
