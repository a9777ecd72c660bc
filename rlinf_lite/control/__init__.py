"""Supervision of runs and jobs: workers that die or hang are started again.

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
