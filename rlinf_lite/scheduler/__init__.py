"""Starting worker processes and passing messages: Cluster, placement, Worker, WorkerGroup, Handle, Channel.

Importing this package needs neither ray nor torch: a name that needs them is loaded when it is first used.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
