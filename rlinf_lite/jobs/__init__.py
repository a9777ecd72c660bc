"""Jobs with the user's own roles: RLJobBuilder describes a job, `submit` starts it, and classes derived from
BaseTrainer and BaseWorkload are its trainer and its workers.

Importing this package needs neither ray nor torch: names that need ray are loaded when they are first used.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
