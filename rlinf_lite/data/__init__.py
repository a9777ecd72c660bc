"""What flows between workers: batches, observations, trajectories, and which rows go where."""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
