"""What each process of a component does."""

from rlinf_lite.workers.actor import EmbodiedFSDPActor, NonFiniteUpdateError
from rlinf_lite.workers.env import EnvWorker
from rlinf_lite.workers.rollout import MultiStepRolloutWorker

__all__ = ["EmbodiedFSDPActor", "EnvWorker", "MultiStepRolloutWorker", "NonFiniteUpdateError"]
