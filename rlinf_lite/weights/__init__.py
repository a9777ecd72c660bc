"""Transfer of weights from actor to rollout workers. Names are loaded when first used: routes need no torch."""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
