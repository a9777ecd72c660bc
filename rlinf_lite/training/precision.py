"""One statement of compute precision for acting and training."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def autocast(device: torch.device | str, precision: str) -> AbstractContextManager[object]:
    """Autocast to bfloat16 where `actor.precision` is bf16."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters to `dtype`, in place; buffers keep theirs, as where transformers loads a model in that type.

    Rotary frequencies are buffers: rounded to bf16, they are 0.4% off, which is an angle of 1 rad at position 1,000.
    """
    kept = {part for module in model.modules() for part in getattr(module, "_keep_in_fp32_modules_strict", None) or ()}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(f".{part}." in f".{name}." for part in kept):
            parameter.data = parameter.data.to(dtype)
