"""Starts the supervision of a run, if its config asks for it. Only then it needs Ray."""

from __future__ import annotations

import uuid
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from rlinf_lite.config.schema import BaseConfig

if TYPE_CHECKING:
    from rlinf_lite.control.supervisor import Supervisor
    from rlinf_lite.scheduler import Cluster


def supervise(cfg: BaseConfig, cluster: Cluster) -> AbstractContextManager[Supervisor | None]:
    """A context in which a master keeps the launched groups alive, if `control.enabled` says so; else it gives None."""
    if not cfg.control.enabled or cfg.cluster.runtime == "local":
        return nullcontext(None)
    from rlinf_lite.control.master import create_master
    from rlinf_lite.control.supervisor import Supervisor

    job = f"{cfg.runner.run_name or 'run'}-{uuid.uuid4().hex[:8]}"
    create_master(job, cfg.control)
    return Supervisor(job, cluster, cfg.runner.phase_timeout_s)
