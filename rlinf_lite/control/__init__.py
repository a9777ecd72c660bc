"""The control plane: describe a job, launch it, keep it alive.

Importing this package needs neither ray nor torch: names that need ray are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.control.builder import RLJobBuilder as RLJobBuilder
from rlinf_lite.control.spec import JobSpecError as JobSpecError
from rlinf_lite.control.workload import BaseWorkload as BaseWorkload
from rlinf_lite.lazy import lazy_names

if TYPE_CHECKING:
    from rlinf_lite.control.supervisor import JobFailedError as JobFailedError
    from rlinf_lite.control.supervisor import Supervisor as Supervisor
    from rlinf_lite.control.supervisor import supervise as supervise
    from rlinf_lite.control.trainer import BaseTrainer as BaseTrainer
    from rlinf_lite.control.trainer import trainer_invocation as trainer_invocation

__getattr__ = lazy_names(
    __name__,
    {
        "supervisor": ["JobFailedError", "Supervisor", "supervise"],
        "trainer": ["BaseTrainer", "trainer_invocation"],
    },
)
