"""One statement of compute precision for acting and training."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def autocast(device: torch.device | str, precision: str, cached: bool | None = None) -> AbstractContextManager[object]:
    """Autocast to bfloat16 where `actor.precision` is bf16. On CPUs without its cache of cast weights: threads of a
    process (`lanes.py`) share it, and any of them clears it, so that gradients would be rounded as chance has it.
    `cached`: with or without it, for a preview of another device."""
    if precision == "fp32":
        return nullcontext()
    kind = torch.device(device).type
    return torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=kind != "cpu" if cached is None else cached)


def cast_parameters(model: nn.Module, dtype: torch.dtype, frozen_only: bool = False) -> None:
    """Parameters (or only those that do not train) to `dtype`, in place; buffers keep theirs, as where transformers
    loads a model in that type.

    Rotary frequencies are buffers: rounded to bf16, they are 0.4% off, which is an angle of 1 rad at position 1,000.
    """
    kept = {part for module in model.modules() for part in getattr(module, "_keep_in_fp32_modules_strict", None) or ()}
    for name, parameter in model.named_parameters():
        if frozen_only and parameter.requires_grad:
            continue
        if parameter.is_floating_point() and not any(f".{part}." in f".{name}." for part in kept):
            parameter.data = parameter.data.to(dtype)
