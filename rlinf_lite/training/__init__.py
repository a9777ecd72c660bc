"""What optimizes a model. `learner.py` has the whole of a training step; names are loaded when first used."""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
