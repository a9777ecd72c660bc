"""Training of models; `learner.py` has the training step. Names are loaded when first used."""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
