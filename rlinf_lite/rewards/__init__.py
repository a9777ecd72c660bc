"""Rule rewards: functions from the text of an answer and the known answer to a number. Importable without torch."""

from rlinf_lite.rewards.registry import RewardError as RewardError
from rlinf_lite.rewards.registry import UnknownSourceError as UnknownSourceError
from rlinf_lite.rewards.registry import known_sources as known_sources
from rlinf_lite.rewards.registry import register_reward as register_reward
from rlinf_lite.rewards.rules import boxed as boxed
from rlinf_lite.rewards.rules import gsm8k as gsm8k
from rlinf_lite.rewards.scorer import RewardResult as RewardResult
from rlinf_lite.rewards.scorer import RewardScorer as RewardScorer
