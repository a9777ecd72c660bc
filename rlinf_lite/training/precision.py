"""One statement of compute precision for acting and training, and of whether the same numbers come out each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


def autocast(device: torch.device | str, precision: str, cached: bool | None = None) -> AbstractContextManager[object]:
    """Autocast to bfloat16 where `actor.precision` is bf16. On CPUs without its cache of cast weights: threads of a
    process share it, and any of them clears it, so that gradients would be rounded as chance has it.
    `cached`: with or without it, for a preview of another device."""
    if precision == "fp32":
        return nullcontext()
    kind = torch.device(device).type
    return torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=kind != "cpu" if cached is None else cached)


@contextmanager
def shapes_vary() -> Iterator[None]:
    """Around acting and generating, whose passes have other rows or columns time and again: without cuDNN's attention,
    which makes a plan for each new shape. Acting in bf16 on an H100 took 1.7 times as long with it."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def be_deterministic(device: torch.device | str, wanted: bool) -> None:
    """Have torch use only operations that give the same bits every time, in this process (`runner.deterministic`). Of
    those that models are made of, those on CPUs do anyway. To be called before anything is computed on a GPU."""
    if wanted and torch.device(device).type == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


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
