"""One statement of compute precision for acting and training."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(device: torch.device | str, precision: str) -> AbstractContextManager[object]:
    """Autocast to bfloat16 where `actor.precision` is bf16."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)
