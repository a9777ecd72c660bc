"""What optimizes a model. `learner.py` has the whole of a training step; names are loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.lazy import lazy_names

if TYPE_CHECKING:
    from rlinf_lite.training.strategies import Strategy as Strategy
    from rlinf_lite.training.strategies import register_strategy as register_strategy

__getattr__ = lazy_names(__name__, {"strategies": ["Strategy", "register_strategy"]})
