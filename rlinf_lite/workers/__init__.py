"""What each process of a component does.

Names are loaded when first used: environments need neither torch nor models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.lazy import lazy_names

if TYPE_CHECKING:
    from rlinf_lite.workers.actor import EmbodiedFSDPActor as EmbodiedFSDPActor
    from rlinf_lite.workers.env import EnvWorker as EnvWorker
    from rlinf_lite.workers.rollout import MultiStepRolloutWorker as MultiStepRolloutWorker

__getattr__ = lazy_names(
    __name__, {"actor": ["EmbodiedFSDPActor"], "env": ["EnvWorker"], "rollout": ["MultiStepRolloutWorker"]}
)
