"""Rule rewards: from the text of an answer and the known one to a number. Importable without torch."""

from rlinf_lite.rewards.errors import RewardError, UnknownSourceError
from rlinf_lite.rewards.registry import known_sources, register_reward
from rlinf_lite.rewards.rules import boxed, gsm8k
from rlinf_lite.rewards.scorer import RewardResult, RewardScorer

__all__ = [
    "RewardError",
    "RewardResult",
    "RewardScorer",
    "UnknownSourceError",
    "boxed",
    "gsm8k",
    "known_sources",
    "register_reward",
]
