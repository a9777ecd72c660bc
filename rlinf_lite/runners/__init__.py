"""Runners: the training loops that drive worker groups. Names are loaded when they are first used, so reading a
checkpoint needs neither ray nor torch."""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
