"""Where things run and how they talk: Cluster, placement, Worker, WorkerGroup, Handle, Channel.

Importing this package needs neither ray nor torch: names that do are loaded when first used.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
