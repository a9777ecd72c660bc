"""Where things run and how they talk: Cluster, placement, Worker, WorkerGroup, Handle, Channel.

Names are loaded when first used, so that importing this package (or `placement`) needs neither ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_lite.scheduler.channel import Channel
    from rlinf_lite.scheduler.cluster import Cluster
    from rlinf_lite.scheduler.dispatch import Deferred, Dispatch, Execute, Scatter, register, register_dispatch_mode
    from rlinf_lite.scheduler.errors import (
        AbortedError,
        CallTimeoutError,
        ChannelTimeoutError,
        ClusterError,
        PeerError,
        PlacementError,
        RecvTimeoutError,
        SchedulerError,
        WorkerDiedError,
        WorkerError,
    )
    from rlinf_lite.scheduler.group import WorkerGroup
    from rlinf_lite.scheduler.handle import Handle, wait_all
    from rlinf_lite.scheduler.placement import (
        ComponentPlacement,
        HybridComponentPlacement,
        ProcessPlacement,
        parse_placement,
        resolve_placements,
    )
    from rlinf_lite.scheduler.pool import ResourcePool
    from rlinf_lite.scheduler.routing import Piece, route
    from rlinf_lite.scheduler.spans import Span
    from rlinf_lite.scheduler.worker import Worker

_MODULES = {
    "channel": ["Channel"],
    "cluster": ["Cluster"],
    "dispatch": ["Deferred", "Dispatch", "Execute", "Scatter", "register", "register_dispatch_mode"],
    "errors": [
        "AbortedError",
        "CallTimeoutError",
        "ChannelTimeoutError",
        "ClusterError",
        "PeerError",
        "PlacementError",
        "RecvTimeoutError",
        "SchedulerError",
        "WorkerDiedError",
        "WorkerError",
    ],
    "group": ["WorkerGroup"],
    "handle": ["Handle", "wait_all"],
    "placement": [
        "ComponentPlacement",
        "HybridComponentPlacement",
        "ProcessPlacement",
        "parse_placement",
        "resolve_placements",
    ],
    "pool": ["ResourcePool"],
    "routing": ["Piece", "route"],
    "spans": ["Span"],
    "worker": ["Worker"],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AbortedError",
    "CallTimeoutError",
    "Channel",
    "ChannelTimeoutError",
    "Cluster",
    "ClusterError",
    "ComponentPlacement",
    "Deferred",
    "Dispatch",
    "Execute",
    "Handle",
    "HybridComponentPlacement",
    "PeerError",
    "Piece",
    "PlacementError",
    "ProcessPlacement",
    "RecvTimeoutError",
    "ResourcePool",
    "Scatter",
    "SchedulerError",
    "Span",
    "Worker",
    "WorkerDiedError",
    "WorkerError",
    "WorkerGroup",
    "parse_placement",
    "register",
    "register_dispatch_mode",
    "resolve_placements",
    "route",
    "wait_all",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
