"""Where things run and how they talk: Cluster, placement, Worker, WorkerGroup, Handle, Channel.

Importing this package needs neither ray nor torch: names that do are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.lazy import lazy_names
from rlinf_lite.scheduler.dispatch import Deferred as Deferred
from rlinf_lite.scheduler.dispatch import Dispatch as Dispatch
from rlinf_lite.scheduler.dispatch import Execute as Execute
from rlinf_lite.scheduler.dispatch import Piece as Piece
from rlinf_lite.scheduler.dispatch import Scatter as Scatter
from rlinf_lite.scheduler.dispatch import nd_compute as nd_compute
from rlinf_lite.scheduler.dispatch import nd_compute_metric as nd_compute_metric
from rlinf_lite.scheduler.dispatch import register as register
from rlinf_lite.scheduler.dispatch import register_dispatch_mode as register_dispatch_mode
from rlinf_lite.scheduler.dispatch import route as route
from rlinf_lite.scheduler.errors import AbortedError as AbortedError
from rlinf_lite.scheduler.errors import CallTimeoutError as CallTimeoutError
from rlinf_lite.scheduler.errors import ChannelTimeoutError as ChannelTimeoutError
from rlinf_lite.scheduler.errors import ClusterError as ClusterError
from rlinf_lite.scheduler.errors import PeerError as PeerError
from rlinf_lite.scheduler.errors import PlacementError as PlacementError
from rlinf_lite.scheduler.errors import RecvTimeoutError as RecvTimeoutError
from rlinf_lite.scheduler.errors import SchedulerError as SchedulerError
from rlinf_lite.scheduler.errors import SharedMemoryFullError as SharedMemoryFullError
from rlinf_lite.scheduler.errors import WorkerDiedError as WorkerDiedError
from rlinf_lite.scheduler.errors import WorkerError as WorkerError
from rlinf_lite.scheduler.heartbeat import report_progress as report_progress
from rlinf_lite.scheduler.placement import ComponentPlacement as ComponentPlacement
from rlinf_lite.scheduler.placement import HybridComponentPlacement as HybridComponentPlacement
from rlinf_lite.scheduler.placement import ProcessPlacement as ProcessPlacement
from rlinf_lite.scheduler.placement import parse_placement as parse_placement
from rlinf_lite.scheduler.placement import resolve_placements as resolve_placements
from rlinf_lite.scheduler.worker import Span as Span
from rlinf_lite.scheduler.worker import Worker as Worker

if TYPE_CHECKING:
    from rlinf_lite.scheduler.channel import Channel as Channel
    from rlinf_lite.scheduler.cluster import Cluster as Cluster
    from rlinf_lite.scheduler.cluster import ResourcePool as ResourcePool
    from rlinf_lite.scheduler.group import WorkerGroup as WorkerGroup
    from rlinf_lite.scheduler.group import fuse as fuse
    from rlinf_lite.scheduler.handle import Handle as Handle
    from rlinf_lite.scheduler.handle import wait_all as wait_all

__getattr__ = lazy_names(
    __name__,
    {
        "channel": ["Channel"],
        "cluster": ["Cluster", "ResourcePool"],
        "group": ["WorkerGroup", "fuse"],
        "handle": ["Handle", "wait_all"],
    },
)
