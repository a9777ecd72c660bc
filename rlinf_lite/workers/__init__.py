"""What each process of a component does.

Names are loaded when first used: environments need neither torch nor models.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
