"""Weights from actor to rollout workers. Names are loaded when first used: routes need no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.lazy import lazy_names

if TYPE_CHECKING:
    from rlinf_lite.weights.routes import WeightRoutes as WeightRoutes
    from rlinf_lite.weights.sync import Offer as Offer
    from rlinf_lite.weights.sync import WeightReceiver as WeightReceiver
    from rlinf_lite.weights.sync import WeightSender as WeightSender
    from rlinf_lite.weights.sync import WeightVersionError as WeightVersionError
    from rlinf_lite.weights.sync import copy_weights as copy_weights
    from rlinf_lite.weights.sync import is_whole as is_whole

__getattr__ = lazy_names(
    __name__,
    {
        "routes": ["WeightRoutes"],
        "sync": ["Offer", "WeightReceiver", "WeightSender", "WeightVersionError", "copy_weights", "is_whole"],
    },
)
