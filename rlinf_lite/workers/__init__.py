"""The worker classes of a run's components: actor, rollout, env and others.

Names are loaded when they are first used, so that env workers load neither torch nor models.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
