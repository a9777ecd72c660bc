"""What flows between workers: batches, observations, trajectories, and which rows go where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.lazy import lazy_names

if TYPE_CHECKING:
    from rlinf_lite.data.proto import DataProto as DataProto
    from rlinf_lite.data.proto import DataProtoError as DataProtoError

__getattr__ = lazy_names(__name__, {"proto": ["DataProto", "DataProtoError"]})
