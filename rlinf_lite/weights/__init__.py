"""Weights from actor to rollout workers."""

from rlinf_lite.weights.routes import WeightRoutes
from rlinf_lite.weights.sync import WeightReceiver, WeightSender, WeightVersionError

__all__ = ["WeightReceiver", "WeightRoutes", "WeightSender", "WeightVersionError"]
