"""Jobs with roles of the user's own: RLJobBuilder describes one, `submit` starts it, and classes derived from
BaseTrainer and BaseWorkload are its trainer and its workers.

Importing this package needs neither ray nor torch: names that need ray are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_lite.jobs.builder import RLJobBuilder as RLJobBuilder
from rlinf_lite.jobs.ported import RLRoleType as RLRoleType
from rlinf_lite.jobs.spec import JobSpecError as JobSpecError
from rlinf_lite.jobs.workload import BaseWorkload as BaseWorkload
from rlinf_lite.lazy import lazy_names

if TYPE_CHECKING:
    from rlinf_lite.jobs.trainer import BaseTrainer as BaseTrainer
    from rlinf_lite.jobs.trainer import trainer_invocation as trainer_invocation

__getattr__ = lazy_names(__name__, {"trainer": ["BaseTrainer", "trainer_invocation"]})
