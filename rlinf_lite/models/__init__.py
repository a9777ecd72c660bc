"""Policies: backbone, action head, value head and checkpoint format.

Names are loaded when first used, so that a policy's config (`vla.config`) can be read without torch.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
