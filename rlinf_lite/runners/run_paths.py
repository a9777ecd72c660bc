"""Where a run keeps its files, and what it resumes from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rlinf_lite.config.schema import BaseConfig
from rlinf_lite.runners.checkpoints import find_checkpoint, newest_run, verify


@dataclass(frozen=True)
class RunPaths:
    """`<log_path>/<run>` for metrics, `<checkpoint_save_path>/<run>/checkpoints`, and the checkpoint to resume from."""

    log_dir: Path
    checkpoint_dir: Path
    resume_from: Path | None


def run_paths(cfg: BaseConfig) -> RunPaths:
    """Paths of a run that starts now: those of the run it resumes, or new ones named by the time.

    Raises:
        CheckpointError: where `runner.resume` names no complete and undamaged checkpoint.
    """
    checkpoint = _resume_checkpoint(cfg)
    if checkpoint is None:
        run = f"{cfg.runner.run_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    else:
        verify(checkpoint)
        run = checkpoint.parent.parent.name
    return RunPaths(Path(cfg.runner.logger.log_path) / run, Path(cfg.actor.checkpoint_save_path) / run, checkpoint)


def check_resume(cfg: BaseConfig) -> None:
    """Raise CheckpointError where the run cannot resume; for before anything is started."""
    run_paths(cfg)


def _resume_checkpoint(cfg: BaseConfig) -> Path | None:
    if cfg.runner.resume == "never":
        return None
    if cfg.runner.resume != "auto":
        return find_checkpoint(Path(cfg.runner.resume))
    run = newest_run(Path(cfg.actor.checkpoint_save_path), cfg.runner.run_name or "run")
    return None if run is None else find_checkpoint(run)
