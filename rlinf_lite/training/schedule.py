"""Learning-rate schedules: pure functions of the runner step."""

from __future__ import annotations

import math

from rlinf_lite.config.schema import OptimConfig


def lr_factor(cfg: OptimConfig, step: int, total_steps: int) -> float:
    """Factor on the learning rate at `step` of `total_steps`: linear warm-up, then down to `min_lr_ratio`."""
    if step < cfg.warmup_steps:
        return (step + 1) / (cfg.warmup_steps + 1)
    done = (step - cfg.warmup_steps) / max(total_steps - cfg.warmup_steps, 1)
    match cfg.lr_scheduler:
        case "constant":
            return 1.0
        case "linear":
            remaining = 1.0 - done
        case "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * done))
    return cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * remaining
