"""What flows between workers: batches, observations, trajectories, and which rows go where."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_lite.data.proto import DataProto as DataProto
    from rlinf_lite.data.proto import DataProtoError as DataProtoError


def __getattr__(name: str) -> Any:
    if name not in ("DataProto", "DataProtoError"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("rlinf_lite.data.proto"), name)
