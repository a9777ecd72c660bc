"""Failover: every run is watched, and what dies or hangs in it is started again.

Importing this package needs neither ray nor torch: names that need ray are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.lazy import lazy_names

if TYPE_CHECKING:
    from rlinf_lite.control.entry import supervise as supervise
    from rlinf_lite.control.supervisor import JobFailedError as JobFailedError
    from rlinf_lite.control.supervisor import Supervisor as Supervisor

__getattr__ = lazy_names(__name__, {"entry": ["supervise"], "supervisor": ["JobFailedError", "Supervisor"]})
