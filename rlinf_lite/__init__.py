"""rlinf_lite: reinforcement learning for vision-language-action policies in simulators.

Names that need torch or Hydra are loaded when first used.
"""

from lazy_loader import attach_stub

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
